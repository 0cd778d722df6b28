"""The classes of labels: the map from words or whole numbers in the data to class numbers 0, 1, ...

A run keeps this map. It comes from ``data.classes``, from the run whose checkpoint is used, or from the training
part, whichever is known before the data are read. A word that is not in it is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hvd_train.config import DataConfig
from hvd_train.errors import DataError, listing, noun_and_names
from hvd_train.protocol import Field, Sample, Source

OF_CONFIG, TRAINING = "data.classes", "the training part"  # where class names may come from
MAX_NAME = 1000  # characters that a checkpoint's manifest takes


def all_names(names: Sequence[str] | None, count: int) -> list[str]:
    """Return ``count`` class names; classes beyond ``names`` are called by their numbers."""
    return [*map(str, names or ()), *map(str, range(len(names or ()), count))]


def values_of(names: Sequence[str]) -> np.ndarray | None:
    """Convert names to integers (k,) int64, or return None if some are not."""
    try:
        values = [int(name) for name in names]
    except ValueError:
        return None
    same = all(str(value) == name and abs(value) < 1 << 63 for value, name in zip(values, names, strict=True))
    return np.array(values, np.int64) if names and same else None


NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)
WHOLE = "^-?[0-9]+$"  # also for pyarrow
PADDED = "^-?0[0-9]+$"  # a code, such as a postal code, rather than a number


def numbers_of(names: Iterable[str]) -> dict[str, float] | None:
    """Return {name: its number}, or None if some names are not decimal numbers."""
    numbers = {name: float(name) if NUMBER.fullmatch(name) else np.inf for name in names}
    return numbers if np.isfinite([*numbers.values()]).all() else None


def two_meanings(names: Sequence[str], numbers: Sequence[int]) -> str | None:
    """Find a name that is one of ``numbers`` but has another class number, as '1' in '1', '2', 'none'; else None."""
    present, its = set(numbers), dict[str, int]()
    for name in names:
        with suppress(ValueError):
            its[name] = int(name)
    return next((name for k, name in enumerate(names) if its.get(name, k) != k and its[name] in present), None)


MISSING = ("nan", "na", "n/a", "<na>", "null", "none")  # what programs write for a missing value


def remarks_on_missing(title: str, names: Sequence[str], known: Classes) -> list[str]:
    """Return a remark for each class name that probably means a missing value."""
    words = [name for name in names if name.casefold() in MISSING and name not in (known.names or ())]
    return [f"{title}: '{name}' is treated as a class (if it means no value, leave its rows out)" for name in words]


def by_number(title: str, names: Sequence[str]) -> str:
    """Return the remark for integer labels of classes that have names."""
    listed = listing([f"{name} {k}" for k, name in enumerate(names)])
    return f"{title} are whole numbers without names: they are taken as {listed}"


def unknown(words: Sequence[Any], whose: str, names: Sequence[str], where: str) -> DataError:
    """Make the error for classes ``words`` that are not in ``names``, the classes of ``whose``."""
    what = f"unknown {noun_and_names('class', words)}: {whose} has {listing(names)}"
    return DataError(what, where=where, fix="correct the labels, or leave these samples out")


@dataclass(frozen=True)
class Classes:
    """What is known of the classes of a label before the label is read.

    count: the number of classes. names: in the order of class numbers; () if they have none; None if not known. auto:
    use the values that occur as names. whose: where the names come from, for messages. samples: the number of samples
    in the training part. trained: the number of classes in the training part.
    """

    count: int | None = None
    names: tuple[str, ...] | None = None
    auto: bool = False
    whose: str = ""
    samples: int = 0
    trained: int | None = None

    def strange(self, words: Sequence[Any], where: str) -> DataError:
        """Make the error for unknown classes."""
        return unknown(words, self.whose, self.names or (), where)


@dataclass(frozen=True)
class Known:
    """The classes of each label before the data are read, and the fields of the trained run and the training part.

    ``listed``: names of classes that are numbers in the training part, as its data set says them.
    """

    default: Classes = Classes()
    each: Mapping[str, Classes] = field(default_factory=dict)
    run: Sample | None = None
    train: Sample | None = None
    listed: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: DataConfig, run: Sample | None = None) -> Known:
        """Combine ``data.classes`` with the fields of the run whose checkpoint is used."""
        setting = config.classes
        whose = OF_CONFIG if setting else ""
        named = setting if isinstance(setting, dict) else {}
        listed = tuple(setting) if isinstance(setting, list) else None
        default = Classes(config.num_classes, listed, setting == "auto", whose)
        each = {name: Classes(config.num_classes, tuple(names), False, whose) for name, names in named.items()}
        if run is None:
            return cls(default, each)
        known_labels = {}
        for name, stored in run.labels.items():
            asked = each.get(name, default)
            if stored.names and asked.names not in (None, stored.names):
                what = (
                    f"data.classes are {listing(asked.names or ())}, and those of the run are {listing(stored.names)}"
                )
                raise DataError(what, where="data.classes", fix="leave it out: the run keeps its classes")
            names = stored.names or asked.names or ()
            if stored.classes and len(names) > stored.classes:
                what = f"there are {len(names)} names, {listing(names)}, and the run has {stored.classes} classes"
                raise DataError(what, where="data.classes", fix="name these, in the order of their numbers")
            known_labels[name] = Classes(stored.classes or asked.count, names, False, "the run")
        return cls(default, known_labels, run)

    def with_count(self, count: int | None) -> Known:
        """Return a copy with ``count`` classes for each label whose number of classes is not known."""

        def one(known: Classes) -> Classes:
            return known if known.names or known.count else replace(known, count=count)

        return replace(self, default=one(self.default), each={name: one(known) for name, known in self.each.items()})

    def after(self, train: Source) -> Known:
        """Return what is known once the training part has been read: other parts use its class names or numbers."""
        labels, listed = train.sample.labels, getattr(train, "class_names", ())
        known_labels = {}
        for name, label_field in labels.items():
            known = self.label(name, len(labels) == 1)
            if label_field.classes and known.whose != "the run":
                # Also () for classes without names: words of another part must be refused, not numbered.
                names = () if listed else label_field.names
                known = replace(known, names=names, auto=False, whose=known.whose or TRAINING)
            known_labels[name] = replace(known, samples=len(train), trained=label_field.classes)
        return Known(self.default, known_labels, self.run, train.sample, listed)

    def named(self, labels: Mapping[str, Field], listed: tuple[str, ...], where: str) -> dict[str, Field]:
        """Give a part's only label the names that its data set lists for its numbers, or the training part's.

        Raises DataError if the numbers mean other classes in the run or in the training part.
        """
        if len(labels) != 1 or not (listed or self.listed):
            return dict(labels)
        ((name, one),) = labels.items()
        run = self.label_of_run(name)
        before, whose = (run.names, "the run") if run else (self.listed, TRAINING)
        if one.classes and listed and before and listed != before[: len(listed)]:
            what = f"the data set numbers its classes {listing(listed)}, and {whose} has {listing(before)}"
            raise DataError(what, where=where, fix=f"give it {whose}'s list of classes, and number its labels by that")
        names = before or listed
        # Names that are numbers would be taken for the labels' values.
        if one.classes != len(names) or one.names or self.default.auto or values_of(names) is not None:
            return dict(labels)
        return {name: replace(one, names=names)}

    def label_of_run(self, name: str) -> Field | None:
        """Return the label of the run of this name, or its only one."""
        fields = self.run.labels if self.run else {}
        return next(iter(fields.values())) if len(fields) == 1 else fields.get(name)

    def named_run(self, run: Sample) -> Sample:
        """Return the fields of ``run``, with the names of ``data.classes`` for labels that have none."""
        labels = {name: replace(field, names=self.each[name].names or ()) for name, field in run.labels.items()}
        return replace(run, labels=labels)

    def label(self, name: str, alone: bool) -> Classes:
        """Return the classes of a label; if it is the only one (``alone``), its name need not match."""
        if name not in self.each and alone and len(self.each) == 1:
            return next(iter(self.each.values()))
        return self.each.get(name, self.default)

    def input(self, name: str, alone: bool) -> Field | None:
        """Return the field of an input in the trained run, or None."""
        fields = self.run.inputs if self.run else {}
        return next(iter(fields.values())) if alone and len(fields) == 1 else fields.get(name)


class Words:
    """Labels that are words, as codes (n,) int64 into ``names``, which are sorted."""

    dtype = np.dtype(np.int64)

    def __init__(self, codes: np.ndarray, names: Sequence[str]) -> None:
        self.codes, self.names, self.shape = codes, tuple(names), codes.shape

    @classmethod
    def read(cls, values: np.ndarray) -> Words:
        """Make it from an array of texts, (n,) or (n, 1)."""
        names, codes = np.unique(values.reshape(-1), return_inverse=True)
        return cls(codes.astype(np.int64), [str(name) for name in names])

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: Any) -> np.ndarray:
        return self.codes[rows]


@dataclass(frozen=True)
class Lookup:
    """A map from values in the data to class numbers. ``values``: sorted; ``numbers``: the class number of each."""

    values: np.ndarray
    numbers: np.ndarray
    ignore: int  # ignore_index, which is not mapped

    @classmethod
    def of(cls, values: Sequence[int] | np.ndarray, numbers: Sequence[int] | np.ndarray, ignore: int) -> Lookup | None:
        """Make a lookup, or return None if every value equals its class number."""
        listed, numbered = np.asarray(values, np.int64), np.asarray(numbers, np.int64)
        if np.array_equal(listed, numbered):
            return None
        order = np.argsort(listed)
        return cls(listed[order], numbered[order], ignore)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Map values to class numbers; unknown values become -1."""
        x = x.astype(np.int64, copy=False)
        at = np.minimum(np.searchsorted(self.values, x), len(self.values) - 1)
        numbers = np.where(self.values[at] == x, self.numbers[at], -1)
        return np.where(x == self.ignore, x, numbers)
