"""The areas under the ROC curve and under the curve of precision over recall."""

from __future__ import annotations

import math

import numpy as np

from hvd_train.metrics.metric import LabelForm, Metric, Predictions, says_yes
from hvd_train.metrics.ranking import Ranking
from hvd_train.protocol import Tensor

BINS = 1000
# Scores are divided by this before the sigmoid. Bins of the sigmoid itself end at scores of 7: for a class of one in a
# thousand, AUC was wrong by 0.02, and is now by 0.00002.
SPREAD = 8.0


class AUC(Metric):
    """The chance that a sample of class 1 scores above one of class 0 (Hanley and McNeil 1982, Radiology 143).

    The sums are histograms of the scores, one of class 0 and one of class 1, for each of L labels: (2 L BINS,). Scores
    in one bin count as equal, and a pair of equal ones counts a half. For ``exact`` each score has a bin of its own.
    ``average``: how several labels become one number, as in scikit-learn; "": macro.
    """

    two_classes_only = True
    binary = "ranking"

    def __init__(self, form: LabelForm, masked: bool = False, *, average: str) -> None:
        super().__init__(form, masked)
        self.average = average
        self.ranked = form.size if form.kind == "labels" else 1
        self.length = 2 * self.ranked * BINS

    def sums(self, predictions: Predictions) -> Tensor:
        ops, half = predictions.ops, self.length // 2
        score, yes, w = scores(predictions)
        position = ops.clip(ops.sigmoid(score / SPREAD) * BINS, BINS - 1.0)
        # NaN has no bin: it goes to the first one, and the loss, which is NaN too, reports it.
        bins = ops.cast(ops.where(score == score, position, 0.0), "int64")
        if self.ranked > 1:
            first = ops.from_numpy(np.arange(self.ranked) * BINS)  # (L,): the first bin of each label
            bins = ops.reshape(ops.reshape(bins, (-1, self.ranked)) + first, (-1,))
        one = ops.cast(yes, "float64")
        return ops.concat([ops.scatter(half, bins, w * x, same_bits=False) for x in (1 - one, one)])

    def result(self, sums: np.ndarray) -> float:
        zero, one = sums.reshape(2, -1, BINS)  # (L, BINS) each
        if self.average == "micro":
            zero, one = zero.sum(0, keepdims=True), one.sum(0, keepdims=True)
        return self._mean(list(zip(zero, one, strict=True)))

    def exact(self, ranking: Ranking) -> float:
        return self._mean(ranking.histograms(self.average == "micro"))

    def _mean(self, labels: list[tuple[np.ndarray, np.ndarray]]) -> float:
        """Average the areas of labels, each given by its histograms of class 0 and 1; nan where none has an area."""
        defined = [(zero, one) for zero, one in labels if self.defined(zero, one)]
        if not defined:
            return math.nan
        weights = [one.sum() for _, one in defined] if self.average == "weighted" else None
        return float(np.average([self.area(*pair) for pair in defined], weights=weights))

    def defined(self, zero: np.ndarray, one: np.ndarray) -> bool:
        """Return whether a label has an area: not where all samples have it, or none."""
        return bool(zero.any() and one.any())

    def area(self, zero: np.ndarray, one: np.ndarray) -> float:
        """Return the area of a label from its histograms (bins,), the lowest scores first."""
        # (bins,): samples of class 0 below the middle of each bin.
        below = np.cumsum(zero) - zero / 2
        return float(below @ one / (zero.sum() * one.sum()))


class AveragePrecision(AUC):
    """The mean, over the samples of class 1, of the precision among all that score as high (Buckley and Voorhees 2000).

    Equal scores have one precision, that of all of them, as in scikit-learn.
    """

    def defined(self, zero: np.ndarray, one: np.ndarray) -> bool:
        return bool(one.any())

    def area(self, zero: np.ndarray, one: np.ndarray) -> float:
        # (bins,): samples of class 1, and of both, in each bin and above it.
        right, predicted = (np.cumsum(x[::-1])[::-1] for x in (one, zero + one))
        there = one > 0
        return float((one[there] * right[there] / predicted[there]).sum() / one.sum())


def scores(predictions: Predictions) -> tuple[Tensor, Tensor, Tensor]:
    """Return of each place how surely the model says yes, whether its label does, and its weight: (places,) each.

    Scores and weights are float64: in 32 bits a count stands still at 2^24, which one batch of large masks has, and the
    difference of two outputs makes ties of scores that differ.
    """
    ops = predictions.ops
    z, y, w = predictions.flat()  # (places,) or (places, 2); (places,); (places,)
    z = ops.cast(z, "float64")
    return (z[:, 1] - z[:, 0] if len(z.shape) > 1 else z), says_yes(y), ops.cast(w, "float64")
