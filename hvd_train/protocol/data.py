"""Samples: what a data set gives, and the part of a batch that one rank takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

Fields = Mapping[str, np.ndarray]  # named arrays, first axis: samples


@dataclass(frozen=True)
class Field:
    """An array of one sample as it is stored and travels.

    The device divides it by ``divisor``, in float32. Where it has a ``mean``, the device subtracts that and divides by
    ``std``: a number each, or as many as the last axis has. Then numbers take the type of the weights, whole ones
    int64.
    ``classes``: of a label that is one of 0, 1, ..., how many there are; ``masked``: some of them are ``ignore_index``.
    ``image``: the axes are (height, width, channels); None becomes True for three axes of numbers.
    ``names``: the names of these classes in the order of their numbers, () where they have none. ``columns``: the names
    of the entries of the last axis, where they are columns of a table.
    ``ragged``: batches are cut along the first axis, which the longest of their samples fills; shape[0] is the limit.
    """

    shape: tuple[int, ...]
    dtype: str
    # 255 for bytes of an image, which travel as a quarter of the bytes of float32 and give the same bits.
    divisor: float = 1.0
    classes: int | None = None
    masked: bool = False
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    image: bool | None = None

    def __post_init__(self) -> None:
        if self.image is None:
            object.__setattr__(self, "image", len(self.shape) == 3 and not self.classes)

    names: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    ragged: bool = False

    @property
    def model_shape(self) -> tuple[int | None, ...]:
        """Return the shape of a sample as a model gets it: None for a length that varies."""
        return (None, *self.shape[1:]) if self.ragged else self.shape

    @property
    def whole(self) -> bool:
        """Return whether it reaches the model as whole numbers, or as True and False."""
        return self.divisor == 1 and np.dtype(self.dtype).kind != "f"

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}"


@dataclass(frozen=True)
class Sample:
    """The fields of a sample. A model gets a single input as it is, several of them by their names.

    ``told_classes``: the number of classes that the data or the configuration give where no label's loss is
    cross_entropy.
    """

    inputs: Mapping[str, Field]
    labels: Mapping[str, Field]
    told_classes: int | None = None

    @property
    def input_shape(self) -> Any:
        """Return the shape that a build function gets, or {name: shape} where there are several inputs."""
        return one_or_all({name: field.model_shape for name, field in self.inputs.items()})

    @property
    def num_classes(self) -> Any:
        """Return the number of classes, or {label: number} of several labels; None: labels are not classes."""
        numbers = {name: field.classes for name, field in self.labels.items() if field.classes}
        return one_or_all(numbers) if numbers else self.told_classes

    def joined(self, other: Sample) -> Sample:
        """Join a training and a validation part: a class that only one of them holds is a class."""
        labels = {}
        for name, field in self.labels.items():
            its = other.labels[name]
            most = max(field.classes or 0, its.classes or 0) or None
            names = max(field.names, its.names, key=len)
            labels[name] = replace(field, classes=most, masked=field.masked or its.masked, names=names)
        return replace(self, labels=labels)


def made_up(sample: Sample) -> Batch:
    """Make a batch of two samples of zeros."""
    inputs, labels = (
        # All places of a mask are there: attention to none is not a number.
        {
            name: np.full((2, *field.shape), field.ragged and field.dtype == "bool", field.dtype)
            for name, field in fields.items()
        }
        for fields in (sample.inputs, sample.labels)
    )
    return Batch(inputs, labels, np.ones(2, np.float32), np.arange(2))


def one_or_all(named: Mapping[str, Any]) -> Any:
    return next(iter(named.values())) if len(named) == 1 else dict(named)


@dataclass(frozen=True)
class Batch:
    """One rank's part of a (micro-)batch, padded to a fixed length so that shapes never change.

    inputs, labels: {name: (length, ...)} as stored; a label is (length,) where a sample has one, (length, T) where it
    has one at each of T places; weights: (length,) float32, 1 for a sample and 0 for padding; indices: (count,) int64,
    the samples' places in the source, in the order in which they stand in ``inputs`` (padding comes last).
    """

    inputs: Fields
    labels: Fields
    weights: np.ndarray
    indices: np.ndarray

    @property
    def count(self) -> int:
        return len(self.indices)


# Labels of a batch whose samples are mixed with others: the class of the other one, (length,), and the share of the
# first one, (length,). No argument of a model has such a name.
PARTNER, SHARE = "class of the other", "share of the first"


class Source(Protocol):
    """A finite data set with random access. ``fetch`` must be a pure function of the indices.

    Where it has ``drawn(indices, seed, epoch)``, training takes its samples by that; with ``ordered = True`` in the
    order of the source, by one thread.
    """

    sample: Sample
    # A short hash of the content (or of names, sizes and samples): equal on all ranks, or training is refused.
    fingerprint: str

    def __len__(self) -> int: ...

    def fetch(self, indices: np.ndarray) -> tuple[Fields, Fields]:
        """indices (k,) int64 -> inputs and labels, each {name: (k, *shape)} of its field's type.

        A sample's labels have the same shape everywhere; its loss is the mean over them, and so is its accuracy.
        """
