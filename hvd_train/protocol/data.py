"""Samples and batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

Fields = Mapping[str, np.ndarray]  # named arrays, first axis: samples


@dataclass(frozen=True)
class Field:
    """An input or label of a sample, as stored and copied to the device.

    The device divides it by ``divisor``, in float32, and normalizes it with ``mean`` and ``std``, if given: one number
    each, or one for each entry of the last axis. Then floats are cast to the type of the weights, integers to int64.
    ``classes``: the number of classes of a label 0, 1, ...; ``masked``: some labels are ``ignore_index``.
    ``image``: whether the axes are (height, width, channels); the default is True for three axes without classes.
    ``names``: the class names in order, or (). ``columns``: the names of the entries of the last axis of a table.
    ``ragged``: batches are cut along the first axis to their longest sample; shape[0] is the maximum.
    """

    shape: tuple[int, ...]
    dtype: str
    # 255 for uint8 images, which take a quarter of the bytes of float32 and give the same bits.
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
        """Return the shape of a sample for the model, with None for a variable length."""
        return (None, *self.shape[1:]) if self.ragged else self.shape

    @property
    def whole(self) -> bool:
        """Return whether the model receives integers or booleans."""
        return self.divisor == 1 and np.dtype(self.dtype).kind != "f"

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}"


@dataclass(frozen=True)
class Sample:
    """The fields of a sample. A model gets a single input directly, several as a dictionary.

    ``declared_classes``: the number of classes from the data or the configuration if no label's loss is cross_entropy.
    """

    inputs: Mapping[str, Field]
    labels: Mapping[str, Field]
    declared_classes: int | None = None

    @property
    def input_shape(self) -> Any:
        """Return the shape that a build function gets: {name: shape} for several inputs."""
        return one_or_all({name: field.model_shape for name, field in self.inputs.items()})

    @property
    def num_classes(self) -> Any:
        """Return the number of classes, or {label: number} for several labels; None: labels are not classes."""
        numbers = {name: field.classes for name, field in self.labels.items() if field.classes}
        return one_or_all(numbers) if numbers else self.declared_classes

    def joined(self, other: Sample) -> Sample:
        """Merge the fields of a training and a validation part: classes are those of either."""
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
        # Masks are all True: attention to no position gives NaN.
        {
            name: np.full((2, *field.shape), field.ragged and field.dtype == "bool", field.dtype)
            for name, field in fields.items()
        }
        for fields in (sample.inputs, sample.labels)
    )
    return Batch(inputs, labels, np.ones(2, np.float32), np.arange(2))


def different(sample: Sample, count: int) -> Batch:
    """Make a batch of ``count`` different samples; labels are 0 and 1."""
    rng = np.random.default_rng(0)

    def values(field: Field, label: bool) -> np.ndarray:
        shape, kind = (count, *field.shape), np.dtype(field.dtype).kind
        if kind == "b":
            return np.ones(shape, bool)
        if kind == "f":
            return rng.uniform(0, 1, shape).astype(field.dtype)
        most = 2 if label else field.classes or (256 if field.divisor != 1 else 2)
        return rng.integers(0, most, shape).astype(field.dtype)

    inputs = {name: values(field, False) for name, field in sample.inputs.items()}
    labels = {name: values(field, True) for name, field in sample.labels.items()}
    return Batch(inputs, labels, np.ones(count, np.float32), np.arange(count))


def one_or_all(named: Mapping[str, Any]) -> Any:
    return next(iter(named.values())) if len(named) == 1 else dict(named)


@dataclass(frozen=True)
class Batch:
    """One rank's part of a (micro-)batch, padded to a fixed length so that shapes never change.

    inputs, labels: {name: (length, ...)} as stored; a label is (length,) or, with one for each of T positions, (length,
    T). weights: (length,) float32, 1 for a sample and 0 for padding. indices: (count,) int64, the samples' indices in
    the source, in the order of ``inputs`` (padding comes last).
    """

    inputs: Fields
    labels: Fields
    weights: np.ndarray
    indices: np.ndarray

    @property
    def count(self) -> int:
        return len(self.indices)

    def part(self, rows: np.ndarray) -> Batch:
        """Return a batch of these rows (k,), without padding."""
        inputs, labels = ({name: x[rows] for name, x in fields.items()} for fields in (self.inputs, self.labels))
        return Batch(inputs, labels, self.weights[rows], self.indices[rows])


# Labels of mixup and cutmix batches: the class of the other sample and the weight of the first one, (length,) each.
# No argument of a model can have such a name.
PARTNER, SHARE = "class of the other", "share of the first"


class Source(Protocol):
    """A finite data set with random access. ``fetch`` must be a pure function of the indices.

    If it has ``drawn(indices, seed, epoch)``, training calls that instead; with ``ordered = True`` in the order of the
    source, from one thread.
    """

    sample: Sample
    # A short hash of the content (or of names, sizes and samples), which must be equal on all ranks.
    fingerprint: str

    def __len__(self) -> int: ...

    def fetch(self, indices: np.ndarray) -> tuple[Fields, Fields]:
        """Return inputs and labels for indices (k,) int64, each {name: (k, *shape)} of its field's type.

        All samples' labels have the same shape; a sample's loss and accuracy are means over its labels.
        """
