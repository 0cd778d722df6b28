"""The interface of a metric, and the sums from which losses and metrics are computed.

n is the number of samples in a batch, C of classes. A sample has one label, or one per position (token, pixel).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hvd_train.metrics.ranking import Ranking
from hvd_train.protocol import Ops, Tensor


@dataclass(frozen=True)
class LabelForm:
    """The kind of labels: one of ``size`` classes (a binary label is one of two), or ``size`` binary labels."""

    kind: Literal["classes", "labels"]
    size: int

    @classmethod
    def of_shapes(cls, outputs: Sequence[int], labels: Sequence[int]) -> LabelForm:
        """Derive the form from the shapes of one sample's outputs and labels.

        One axis of labels means several labels. More axes, as in a mask of an image, are positions of one label.
        """
        if len(outputs) == len(labels) + 1 and outputs[-1] > 1:
            return cls("classes", outputs[-1])
        several = len(labels) == 1 and labels[0] > 1
        return cls("labels", labels[0]) if several else cls("classes", 2)


def says_yes(labels: Any) -> Any:
    """Return whether binary labels are yes, which is above 0.5: labels are 0 and 1, -1 and 1, or fractions."""
    return labels > 0.5


@dataclass(frozen=True)
class Predictions:
    """The outputs and labels of a batch.

    outputs: (n, ...), or (n, ..., C) if the labels are classes. labels: (n, ...). weights: (n,), 1 for a sample and 0
    for padding. present: (n, ...), 1 for a label and 0 for none; None: all are present. raw: the outputs and labels
    before any conversion, for a user's functions.
    """

    outputs: Tensor
    labels: Tensor
    weights: Tensor
    present: Tensor | None
    raw: tuple[Any, Any]
    ops: Ops

    def flat(self) -> tuple[Tensor, Tensor, Tensor]:
        """Flatten outputs to (positions,) or (positions, C), labels to (positions,), weights to (positions,)."""
        ops, z, y, dtype = self.ops, self.outputs, self.labels, self.ops.dtype(self.weights)
        present = ops.cast(y == y, dtype) if self.present is None else self.present
        classes = (int(z.shape[-1]),) if len(z.shape) > len(y.shape) else ()
        weights = flat_weights(present, self.weights, ops)
        return ops.reshape(z, (-1, *classes)), ops.cast(ops.reshape(y, (-1,)), dtype), weights


class Metric(ABC):
    """A metric that is computed from sums over samples.

    Sums are added over micro-batches and ranks, so the result is the same for any number of ranks. ``masked``: some
    positions have no label.
    """

    length: int  # the number of sums
    two_classes_only = False
    one_label_only = False  # not for several binary labels
    # For binary metrics: "threshold" if an output above 0 is yes, "ranking" if only the order of outputs matters.
    binary = ""
    # The number of binary labels of a metric that depends on the order of all outputs, which sums only approximate. An
    # evaluation then keeps the outputs and calls ``exact``. 0: sums are exact.
    ranked = 0

    def __init__(self, form: LabelForm, masked: bool = False) -> None:
        self.form, self.masked = form, masked

    @abstractmethod
    def sums(self, predictions: Predictions) -> Tensor:
        """Return the sums of a batch, (length,)."""

    @abstractmethod
    def result(self, sums: np.ndarray) -> float:
        """Compute the metric from the sums (length,) float64 of all batches and ranks; nan if it is undefined."""

    def exact(self, ranking: Ranking) -> float:
        """Compute a ``ranked`` metric from the outputs of all batches and ranks."""
        raise NotImplementedError


class Mean(Metric):
    """A metric that is a mean of one value per sample or position.

    Its sums are S, the sum of the values, and W, their number, if some positions have no label. Otherwise W is the
    number of samples, which the task sums once for all metrics. ``result`` gets (S, W) in both cases.
    """

    by_user = False

    def __init__(self, form: LabelForm, masked: bool = False) -> None:
        super().__init__(form, masked)
        self.length = 2 if masked else 1

    @abstractmethod
    def values(self, predictions: Predictions) -> tuple[Tensor, Tensor | None]:
        """Compute the value of each position (n, ...), and its weight (n, ...); None: all weights are 1."""

    def totals(self, predictions: Predictions) -> tuple[Tensor, ...]:
        """Return ``sums`` as a tuple of ``length`` scalars."""
        values, position_weights = self.values(predictions)
        return weighted_sum(values, position_weights, predictions.weights, predictions.ops, self.by_user)

    def sums(self, predictions: Predictions) -> Tensor:
        return predictions.ops.stack(self.totals(predictions))

    def result(self, sums: np.ndarray) -> float:
        return share(*sums.tolist())


def share(total: float, count: float) -> float:
    """Return total / count, or nan if the count is 0."""
    return total / count if count else math.nan


def weighted_sum(
    values: Tensor, position_weights: Tensor | None, weights: Tensor, ops: Ops, by_user: bool = False
) -> tuple[Tensor, ...]:
    """Sum values (n, ...), weighted by positions (n, ...) and samples (n,).

    Returns (S, W), each of shape (). Without weights of positions it returns (S,), where a sample counts by the mean
    over its positions, and W is the number of samples.
    ``by_user``: values of a user's function, which may be NaN where the weight is 0.
    """
    values = ops.cast(values, ops.dtype(weights)) if by_user else values
    if position_weights is None:
        values = values if len(values.shape) == 1 else ops.row_means(values)
        # 0 times NaN is NaN, so padding must be left out before the product.
        return (ops.dot(ops.where(weights > 0, values, 0.0) if by_user else values, weights),)
    w = flat_weights(position_weights, weights, ops)
    values = ops.reshape(values, (-1,))
    return ops.dot(ops.where(w != 0, values, 0.0), w), ops.sum(w, 0)


def flat_weights(position_weights: Tensor, weights: Tensor, ops: Ops) -> Tensor:
    """Multiply the weights of positions (n, ...) by those of samples (n,), and flatten them to (positions,)."""
    of_sample = ops.reshape(weights, (-1, *[1] * (len(position_weights.shape) - 1)))
    return ops.reshape(ops.cast(position_weights, ops.dtype(weights)) * of_sample, (-1,))
