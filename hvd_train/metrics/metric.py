"""The contract of a metric, and the sums of which losses and metrics are made.

n is the number of samples of a batch, T of places (each sample has T labels, or one), C of classes.
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
    """The kind of labels: one of ``size`` classes (yes or no is one of two), or ``size`` labels of yes or no."""

    kind: Literal["classes", "labels"]
    size: int

    @classmethod
    def of_shapes(cls, outputs: Sequence[int], labels: Sequence[int]) -> LabelForm:
        """Derive the form from the shapes of one sample's outputs and labels.

        One axis of labels holds several labels. More axes, as of a mask over an image, are the places of one label.
        """
        if len(outputs) == len(labels) + 1 and outputs[-1] > 1:
            return cls("classes", outputs[-1])
        several = len(labels) == 1 and labels[0] > 1
        return cls("labels", labels[0]) if several else cls("classes", 2)


def says_yes(labels: Any) -> Any:
    """Return where labels say yes. Of 0 and 1, of -1 and 1, and of shares as at the edges of a mask: above a half."""
    return labels > 0.5


@dataclass(frozen=True)
class Predictions:
    """A batch's outputs and its labels.

    outputs: (n, ...), or (n, ..., C) where the labels are classes. labels: (n, ...). weights: (n,), 1 for a sample and
    0 for padding. present: (n, ...), 1 where a place has a label and 0 where it does not; None: all places have one.
    raw: the outputs and labels as the model and the data give them, for functions of the user.
    """

    outputs: Tensor
    labels: Tensor
    weights: Tensor
    present: Tensor | None
    raw: tuple[Any, Any]
    ops: Ops

    def flat(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return all places in one row: outputs (places,) or (places, C), labels (places,), weights (places,)."""
        ops, z, y, dtype = self.ops, self.outputs, self.labels, self.ops.dtype(self.weights)
        present = ops.cast(y == y, dtype) if self.present is None else self.present
        classes = (int(z.shape[-1]),) if len(z.shape) > len(y.shape) else ()
        weights = flat_weights(present, self.weights, ops)
        return ops.reshape(z, (-1, *classes)), ops.cast(ops.reshape(y, (-1,)), dtype), weights


class Metric(ABC):
    """A number that is made of sums over samples.

    Sums add over micro-batches and ranks, so that any number of ranks gives the same number. ``masked``: some places
    have no label.
    """

    length: int  # how many sums there are
    two_classes_only = False
    one_label_only = False  # not of several labels of yes and no
    # How outputs that are numbers say yes: "threshold", by being above 0; "ranking", by being larger. "": they do not.
    binary = ""
    # The labels of yes and no of a metric that follows from the order of all outputs, so that sums cannot be exact. For
    # it an evaluation keeps the outputs, and asks for ``exact``. 0: sums tell all.
    ranked = 0

    def __init__(self, form: LabelForm, masked: bool = False) -> None:
        self.form, self.masked = form, masked

    @abstractmethod
    def sums(self, predictions: Predictions) -> Tensor:
        """Add up a batch: (length,)."""

    @abstractmethod
    def result(self, sums: np.ndarray) -> float:
        """Compute the metric from the sums (length,) float64 of all batches and ranks; nan where there is none."""

    def exact(self, ranking: Ranking) -> float:
        """Compute the metric from the outputs of all batches and ranks, if it is ``ranked``."""
        raise NotImplementedError


class Mean(Metric):
    """A metric that is a mean over samples, of one value for each sample or place.

    Its sums are S, the sum of the values, and W, their number, where some places have no label. Else W is the number of
    samples, which the task adds up once for all: ``result`` gets (S, W) in both cases.
    """

    by_user = False

    def __init__(self, form: LabelForm, masked: bool = False) -> None:
        super().__init__(form, masked)
        self.length = 2 if masked else 1

    @abstractmethod
    def values(self, predictions: Predictions) -> tuple[Tensor, Tensor | None]:
        """Compute the value of each place (n, ...), and its weight (n, ...); None: all count alike."""

    def totals(self, predictions: Predictions) -> tuple[Tensor, ...]:
        """Return ``sums`` as ``length`` tensors of shape ()."""
        values, place_weights = self.values(predictions)
        return weighted_sum(values, place_weights, predictions.weights, predictions.ops, self.by_user)

    def sums(self, predictions: Predictions) -> Tensor:
        return predictions.ops.stack(self.totals(predictions))

    def result(self, sums: np.ndarray) -> float:
        return share(*sums.tolist())


def share(total: float, count: float) -> float:
    """Return total / count; nan where nothing was counted, so that it never passes for a value."""
    return total / count if count else math.nan


def weighted_sum(
    values: Tensor, place_weights: Tensor | None, weights: Tensor, ops: Ops, by_user: bool = False
) -> tuple[Tensor, ...]:
    """Add up values (n, ...) by the weights of their places (n, ...) and samples (n,).

    Returns (S, W), each of shape (). Without weights of places a sample counts by the mean over its places, W is the
    number of samples, and (S,) is returned.
    ``by_user``: values of a user's function, of which those that do not count may be NaN.
    """
    values = ops.cast(values, ops.dtype(weights)) if by_user else values
    if place_weights is None:
        values = values if len(values.shape) == 1 else ops.row_means(values)
        # 0 times NaN is NaN, so padding must be left out before the product.
        return (ops.dot(ops.where(weights > 0, values, 0.0) if by_user else values, weights),)
    w = flat_weights(place_weights, weights, ops)
    values = ops.reshape(values, (-1,))
    return ops.dot(ops.where(w != 0, values, 0.0), w), ops.sum(w, 0)


def flat_weights(place_weights: Tensor, weights: Tensor, ops: Ops) -> Tensor:
    """Multiply the weight of each place (n, ...) by that of its sample (n,), as (places,)."""
    of_sample = ops.reshape(weights, (-1, *[1] * (len(place_weights.shape) - 1)))
    return ops.reshape(ops.cast(place_weights, ops.dtype(weights)) * of_sample, (-1,))
