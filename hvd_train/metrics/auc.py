"""The areas under the ROC curve and under the curve of precision over recall."""

from __future__ import annotations

import math

import numpy as np

from hvd_train.metrics.metric import LabelForm, Metric, Predictions
from hvd_train.protocol import Tensor

BINS = 1000
# Scores are divided by this before the sigmoid. Bins of the sigmoid itself end at scores of 7: for a class of one in a
# thousand, AUC was wrong by 0.02, and is now by 0.00002.
SPREAD = 8.0


class AUC(Metric):
    """The chance that a sample of class 1 scores above one of class 0 (Hanley and McNeil 1982, Radiology 143).

    The sums are histograms of the scores, one of class 0 and one of class 1, for each of L labels: (2 L BINS,). A pair
    in one bin counts a half. ``average``: how several labels become one number, as in scikit-learn; "": macro.
    """

    two_classes_only = True
    binary = "ranking"

    def __init__(self, form: LabelForm, masked: bool = False, *, average: str) -> None:
        super().__init__(form, masked)
        self.average = average
        self.labels = form.size if form.kind == "labels" else 1
        self.length = 2 * self.labels * BINS

    def sums(self, predictions: Predictions) -> Tensor:
        ops, half = predictions.ops, self.length // 2
        z, y, w = predictions.flat()  # (places,) or (places, 2); (places,); (places,)
        score = z[:, 1] - z[:, 0] if len(z.shape) > 1 else z
        position = ops.clip(ops.sigmoid(score / SPREAD) * BINS, BINS - 1.0)
        # NaN has no bin: it goes to the first one, and the loss, which is NaN too, reports it.
        bins = ops.cast(ops.where(score == score, position, 0.0), "int64")
        if self.labels > 1:
            first = ops.from_numpy(np.arange(self.labels) * BINS)  # (L,): the first bin of each label
            bins = ops.reshape(ops.reshape(bins, (-1, self.labels)) + first, (-1,))
        # In 32 bits a count stands still at 2^24, which one batch of large masks has.
        w = ops.cast(w, "float64")
        one = ops.cast(y > 0.5, "float64")
        return ops.concat([ops.scatter(half, bins, w * x, same_bits=False) for x in (1 - one, one)])

    def result(self, sums: np.ndarray) -> float:
        zero, one = sums.reshape(2, -1, BINS)  # (L, BINS) each
        if self.average == "micro":
            zero, one = zero.sum(0, keepdims=True), one.sum(0, keepdims=True)
        defined, actual = self.defined(zero, one), one.sum(1)  # (L,) each
        if not defined.any():
            return math.nan
        areas = self.areas(zero[defined], one[defined])
        return float(np.average(areas, weights=actual[defined] if self.average == "weighted" else None))

    def defined(self, zero: np.ndarray, one: np.ndarray) -> np.ndarray:
        """Return for each label whether it has an area: not where all samples have it, or none."""
        return zero.sum(1) * one.sum(1) > 0

    def areas(self, zero: np.ndarray, one: np.ndarray) -> np.ndarray:
        """Return the area (L,) of each label from its histograms (L, BINS)."""
        # (L, BINS): samples of class 0 below the middle of each bin.
        below = np.cumsum(zero, 1) - zero / 2
        return (below * one).sum(1) / (zero.sum(1) * one.sum(1))


class AveragePrecision(AUC):
    """The mean, over the samples of class 1, of the precision at their score (Buckley and Voorhees 2000)."""

    def defined(self, zero: np.ndarray, one: np.ndarray) -> np.ndarray:
        return one.sum(1) > 0

    def areas(self, zero: np.ndarray, one: np.ndarray) -> np.ndarray:
        # (L, BINS): samples of class 1, and of both, above each bin.
        right, predicted = (np.cumsum(x[:, ::-1], 1)[:, ::-1] - x for x in (one, zero + one))
        # Within a bin the order is unknown. The middle one of its samples of class 1 has half of the others above it.
        middle = (one + 1) / 2
        return (one * (right + middle) / (predicted + middle + zero / 2)).sum(1) / one.sum(1)
