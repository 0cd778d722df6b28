"""Metrics that are means over samples. z are the outputs (n, ...) or (n, ..., C), y the labels (n, ...)."""

from __future__ import annotations

import math
from abc import abstractmethod

import numpy as np

from hvd_train.metrics.metric import LabelForm, Mean, Predictions, says_yes
from hvd_train.metrics.table import loss_function
from hvd_train.protocol import Ops, Tensor

EPSILON = 2.0**-52  # of float64


class BuiltInMean(Mean):
    """The mean of a formula over all positions that have a label."""

    @abstractmethod
    def of_positions(self, z: Tensor, y: Tensor, ops: Ops) -> Tensor:
        """Compute the value of each position, (n, ...)."""

    def values(self, predictions: Predictions) -> tuple[Tensor, Tensor | None]:
        p = predictions
        return self.of_positions(p.outputs, p.labels, p.ops), p.present


class MeanLoss(BuiltInMean):
    """The mean of a built-in loss."""

    def __init__(self, form: LabelForm, masked: bool = False, *, loss: str) -> None:
        super().__init__(form, masked)
        self._formula = loss_function(loss)

    def of_positions(self, z: Tensor, y: Tensor, ops: Ops) -> Tensor:
        return self._formula(z, y, ops)


class Perplexity(MeanLoss):
    """The exponential of the mean cross-entropy, an effective number of equal choices (Jelinek et al. 1977)."""

    def result(self, sums: np.ndarray) -> float:
        return float(np.exp(super().result(sums)))


class RootOfSquaredError(MeanLoss):
    """The root of the mean squared error over all samples, not a mean of roots over batches."""

    def result(self, sums: np.ndarray) -> float:
        return math.sqrt(super().result(sums))


class PercentageError(BuiltInMean):
    """The mean of |z - y| / |y|, not in percent. A label of 0 is replaced by float64's epsilon, as in scikit-learn."""

    def of_positions(self, z: Tensor, y: Tensor, ops: Ops) -> Tensor:
        return abs(z - y) / ops.where(abs(y) > EPSILON, abs(y), EPSILON)


class Accuracy(BuiltInMean):
    """The share of positions whose label is the largest output; without an axis of classes, z > 0 means class 1."""

    binary = "threshold"

    def of_positions(self, z: Tensor, y: Tensor, ops: Ops) -> Tensor:
        if len(z.shape) == len(y.shape):
            return ops.cast((z > 0) == says_yes(y), ops.dtype(z))
        # z (n, ..., C), y (n, ...).
        return ops.cast(ops.argmax(z) == y, ops.dtype(z))


class Top5(BuiltInMean):
    """The share of positions whose label is among the 5 largest outputs (Russakovsky et al. 2015).

    Ties are broken in favor of the higher class number, as in scikit-learn. Otherwise a model with all outputs equal
    would always be right.
    """

    def of_positions(self, z: Tensor, y: Tensor, ops: Ops) -> Tensor:
        # The first axis may be unknown while a graph is traced.
        shape, count = (-1, *(int(k) for k in tuple(y.shape)[1:])), int(z.shape[-1])
        y = ops.cast(y, "int64")
        classes = ops.from_numpy(np.arange(count))  # (C,)
        known = (y >= 0) & (y < count)
        label = ops.where(known, y, 0)
        of_label = ops.reshape(ops.take_last(z, label), (*shape, 1))
        lower = classes <= ops.reshape(label, (*shape, 1))  # (n, ..., C), including the label itself
        below = (z < of_label) | ((z == of_label) & lower)
        # NaN is not below anything, so it never counts as a hit.
        above = count - ops.sum(ops.cast(below, "int64"), -1)
        return ops.cast(known & (above < 5), ops.dtype(z))
