"""The areas under the ROC curve and under the precision-recall curve."""

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
    """The probability that a sample of class 1 scores above one of class 0 (Hanley and McNeil 1982, Radiology 143).

    The sums are histograms of the scores, one of class 0 and one of class 1, for each of L labels: (2 L BINS,). Scores
    in the same bin are ties, which count a half. For ``exact`` each score has its own bin. ``average``: how several
    labels are averaged, as in scikit-learn; "": macro.
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
        # NaN goes to the first bin; the loss, which is NaN as well, reports it.
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
        """Average the areas over labels, given the histograms (class 0, class 1) of each; nan if none is defined."""
        defined = [(zero, one) for zero, one in labels if self.defined(zero, one)]
        if not defined:
            return math.nan
        weights = [one.sum() for _, one in defined] if self.average == "weighted" else None
        return float(np.average([self.area(*pair) for pair in defined], weights=weights))

    def defined(self, zero: np.ndarray, one: np.ndarray) -> bool:
        """Return whether the area is defined, which needs samples of both classes."""
        return bool(zero.any() and one.any())

    def area(self, zero: np.ndarray, one: np.ndarray) -> float:
        """Compute the area from the histograms (bins,) of both classes, lowest scores first."""
        # (bins,): samples of class 0 below the center of each bin.
        below = np.cumsum(zero) - zero / 2
        return float(below @ one / (zero.sum() * one.sum()))


class AveragePrecision(AUC):
    """The mean precision at the score of each sample of class 1 (Buckley and Voorhees 2000).

    Ties share one precision, as in scikit-learn.
    """

    def defined(self, zero: np.ndarray, one: np.ndarray) -> bool:
        return bool(one.any())

    def area(self, zero: np.ndarray, one: np.ndarray) -> float:
        # (bins,): samples of class 1, and of both classes, in each bin and above.
        right, predicted = (np.cumsum(x[::-1])[::-1] for x in (one, zero + one))
        there = one > 0
        return float((one[there] * right[there] / predicted[there]).sum() / one.sum())


def scores(predictions: Predictions) -> tuple[Tensor, Tensor, Tensor]:
    """Return (score for class 1, whether the label is class 1, weight) of each position, (positions,) each.

    Scores and weights are float64. A float32 count stops at 2^24, which a batch of large masks reaches, and a float32
    difference of two outputs would create ties.
    """
    ops = predictions.ops
    z, y, w = predictions.flat()  # (positions,) or (positions, 2); (positions,); (positions,)
    z = ops.cast(z, "float64")
    return (z[:, 1] - z[:, 0] if len(z.shape) > 1 else z), says_yes(y), ops.cast(w, "float64")
