"""Metrics that are means over samples. z are the outputs (n, ...) or (n, ..., C), y the labels (n, ...)."""

from __future__ import annotations

import math
from abc import abstractmethod

import numpy as np

from hvd_train.metrics import losses
from hvd_train.metrics.metric import Mean, Predictions
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
            return ops.cast((z > 0) == (y > 0.5), ops.dtype(z))
        # z (n, ..., C), y (n, ...).
        return ops.cast(ops.argmax(z) == y, ops.dtype(z))


class Top5(BuiltInMean):
    """The share of places with fewer than 5 outputs above that of the label (Russakovsky et al. 2015)."""

    def of_places(self, z: Tensor, y: Tensor, ops: Ops) -> Tensor:
        # The first axis may be unknown while a graph is traced.
        places = (-1, *(int(k) for k in tuple(y.shape)[1:]))
        of_label = ops.reshape(ops.take_last(z, y), (*places, 1))
        return ops.cast(ops.sum(ops.cast(z > of_label, ops.dtype(z)), -1) < 5, ops.dtype(z))
