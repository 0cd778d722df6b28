"""Metrics that are means over samples. z are the outputs (n, ...) or (n, ..., C), y the labels (n, ...)."""

from __future__ import annotations

import math
from abc import abstractmethod

import numpy as np

from hvd_train.metrics import losses
from hvd_train.metrics.metric import Mean, Predictions, says_yes
from hvd_train.protocol import Ops, Tensor

EPSILON = 2.0**-52  # of numbers in 64 bits


class BuiltInMean(Mean):
    """A mean of one formula over all places that have a label."""

    @abstractmethod
    def of_places(self, z: Tensor, y: Tensor, ops: Ops) -> Tensor:
        """Compute the value of each place, (n, ...)."""

    def values(self, predictions: Predictions) -> tuple[Tensor, Tensor | None]:
        p = predictions
        return self.of_places(p.outputs, p.labels, p.ops), p.present


class CrossEntropy(BuiltInMean):
    """The mean cross-entropy."""

    def of_places(self, z: Tensor, y: Tensor, ops: Ops) -> Tensor:
        return losses.cross_entropy(z, y, ops)


class Perplexity(CrossEntropy):
    """e to the mean cross-entropy: among so many equal choices the model is as unsure (Jelinek et al. 1977)."""

    def result(self, sums: np.ndarray) -> float:
        return float(np.exp(super().result(sums)))


class BinaryCrossEntropy(BuiltInMean):
    """The mean cross-entropy of yes and no."""

    def of_places(self, z: Tensor, y: Tensor, ops: Ops) -> Tensor:
        return losses.bce(z, y, ops)


class SquaredError(BuiltInMean):
    """The mean squared error."""

    def of_places(self, z: Tensor, y: Tensor, ops: Ops) -> Tensor:
        return losses.mse(z, y, ops)


class RootOfSquaredError(SquaredError):
    """The root of the mean squared error over all samples, which is not the mean of the roots of batches."""

    def result(self, sums: np.ndarray) -> float:
        return math.sqrt(super().result(sums))


class AbsoluteError(BuiltInMean):
    """The mean absolute error."""

    def of_places(self, z: Tensor, y: Tensor, ops: Ops) -> Tensor:
        return losses.mae(z, y, ops)


class PercentageError(BuiltInMean):
    """The mean of |z - y| / |y|, as a share. A label of 0 counts as in scikit-learn, by the spacing of numbers at 1."""

    def of_places(self, z: Tensor, y: Tensor, ops: Ops) -> Tensor:
        return abs(z - y) / ops.where(abs(y) > EPSILON, abs(y), EPSILON)


class Huber(BuiltInMean):
    """The mean of Huber's loss."""

    def of_places(self, z: Tensor, y: Tensor, ops: Ops) -> Tensor:
        return losses.huber(z, y, ops)


class Accuracy(BuiltInMean):
    """The share of places whose class has the largest output; without an axis of classes, it is 1 where z > 0."""

    binary = "threshold"

    def of_places(self, z: Tensor, y: Tensor, ops: Ops) -> Tensor:
        if len(z.shape) == len(y.shape):
            return ops.cast((z > 0) == says_yes(y), ops.dtype(z))
        # z (n, ..., C), y (n, ...).
        return ops.cast(ops.argmax(z) == y, ops.dtype(z))


class Top5(BuiltInMean):
    """The share of places whose label is among the 5 largest outputs (Russakovsky et al. 2015).

    Of equal outputs that of the higher class counts as the larger one, as in scikit-learn. Else a model whose outputs
    are all equal would be right everywhere.
    """

    def of_places(self, z: Tensor, y: Tensor, ops: Ops) -> Tensor:
        # The first axis may be unknown while a graph is traced.
        places, count = (-1, *(int(k) for k in tuple(y.shape)[1:])), int(z.shape[-1])
        y = ops.cast(y, "int64")
        classes = ops.from_numpy(np.arange(count))  # (C,)
        known = (y >= 0) & (y < count)
        label = ops.where(known, y, 0)
        of_label = ops.reshape(ops.take_last(z, label), (*places, 1))
        lower = classes <= ops.reshape(label, (*places, 1))  # (n, ..., C), with the label itself
        below = (z < of_label) | ((z == of_label) & lower)
        # What is NaN lies below nothing, so that it is no hit.
        above = count - ops.sum(ops.cast(below, "int64"), -1)
        return ops.cast(known & (above < 5), ops.dtype(z))
