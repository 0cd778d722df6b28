"""The classes of labels: their numbers 0, 1, ..., and the words or whole numbers that stand for them in the data.

A run keeps its classes. Whatever is known of them before data are read (``data.classes``, the run whose checkpoint is
used, the training part) decides which number a word gets; a word that is none of them is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hvd_train.config import DataConfig
from hvd_train.errors import DataError
from hvd_train.protocol import Field, Sample, Source

LISTED = 20  # names in a message
TRAINING = "the training part"
MAX_NAME = 1000  # characters that a checkpoint's manifest takes


def listing(names: Sequence[Any]) -> str:
    """List the first names, and how many more there are."""
    more = f" and {len(names) - LISTED:,} more" if len(names) > LISTED else ""
    return ", ".join(map(str, names[:LISTED])) + more


def named(noun: str, names: Sequence[Any]) -> str:
    """Name some things of a kind: ``class cat``, or ``columns age, height``."""
    ending = ("es" if noun.endswith("s") else "s") * (len(names) != 1)
    return f"{noun}{ending} {listing(names)}"


def all_names(names: Sequence[str] | None, count: int) -> list[str]:
    """Return a name for each of ``count`` classes. A class that ``names`` lacks is called by its number."""
    return [*map(str, names or ()), *map(str, range(len(names or ()), count))]


def values_of(names: Sequence[str]) -> np.ndarray | None:
    """Return the whole numbers (k,) int64 that all names are; None: some are words."""
    try:
        values = [int(name) for name in names]
    except ValueError:
        return None
    same = all(str(value) == name and abs(value) < 1 << 63 for value, name in zip(values, names, strict=True))
    return np.array(values, np.int64) if names and same else None


NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)
WHOLE = "^-?[0-9]+$"  # also for pyarrow


def numbers_of(names: Iterable[str]) -> dict[str, float] | None:
    """Return the number that each name is, as it is written in a table; None: some are words."""
    numbers = {name: float(name) if NUMBER.fullmatch(name) else np.inf for name in names}
    return numbers if np.isfinite([*numbers.values()]).all() else None


def two_meanings(names: Sequence[str], numbers: Sequence[int]) -> str | None:
    """Return a name that reads as one of the labels' ``numbers``, but stands for another: '1' of '1', '2', 'none'."""
    present, its = set(numbers), dict[str, int]()
    for name in names:
        with suppress(ValueError):
            its[name] = int(name)
    return next((name for k, name in enumerate(names) if its.get(name, k) != k and its[name] in present), None)


MISSING = ("nan", "na", "n/a", "<na>", "null", "none")  # what programs write where there is no value


def remarks_on_missing(title: str, names: Sequence[str], known: Classes) -> list[str]:
    """Return a line where words that are numbered as classes hold one that may stand for no value."""
    words = [name for name in names if name.casefold() in MISSING and name not in (known.names or ())]
    return [f"{title}: '{name}' is taken for a class (if it stands for no value, leave its rows out)" for name in words]


def by_number(title: str, names: Sequence[str]) -> str:
    """Return the note for a user where whole numbers meet classes that have names."""
    listed = listing([f"{name} {k}" for k, name in enumerate(names)])
    return f"{title} are whole numbers without names: they are taken as {listed}"


def unknown(words: Sequence[Any], whose: str, names: Sequence[str], where: str) -> DataError:
    """Make the error for classes that are none of ``names``, which ``whose`` has."""
    what = f"unknown {named('class', words)}: {whose} has {listing(names)}"
    return DataError(what, where=where, fix="mend the labels, or leave these samples out")


@dataclass(frozen=True)
class Classes:
    """The classes of a label, as far as they are known before it is read.

    count: how many there are. names: in the order of their numbers; (): they have none; None: not known. auto: the
    values that occur are the names. whose: who knows it, for messages. samples: how many other parts of the data hold;
    trained: how many classes the training part has.
    """

    count: int | None = None
    names: tuple[str, ...] | None = None
    auto: bool = False
    whose: str = ""
    samples: int = 0
    trained: int | None = None

    def strange(self, words: Sequence[Any], where: str) -> DataError:
        """Make the error for classes that are none of these."""
        return unknown(words, self.whose, self.names or (), where)


@dataclass(frozen=True)
class Known:
    """The classes of each label, all fields where the data are for a finished run, and those of the training part."""

    default: Classes = Classes()
    each: Mapping[str, Classes] = field(default_factory=dict)
    run: Sample | None = None
    train: Sample | None = None

    @classmethod
    def of(cls, config: DataConfig, run: Sample | None = None) -> Known:
        """Collect what is known of classes; ``run``: the sample of the run whose checkpoint is used."""
        setting = config.classes
        whose = "data.classes" if setting else ""
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
                what = f"{len(names)} names, {listing(names)}, and the run has {stored.classes} classes"
                raise DataError(what, where="data.classes", fix="name these, in the order of their numbers")
            known_labels[name] = Classes(stored.classes or asked.count, names, False, "the run")
        return cls(default, known_labels, run)

    def with_count(self, count: int | None) -> Known:
        """Return the same, with ``count`` classes where no number is known."""

        def one(known: Classes) -> Classes:
            return known if known.names or known.count else replace(known, count=count)

        return Known(one(self.default), {name: one(known) for name, known in self.each.items()}, self.run)

    def after(self, train: Source) -> Known:
        """Return the same for another part of the data, which keeps to the names or numbers of the training part."""
        labels = train.sample.labels
        known_labels = {}
        for name, label_field in labels.items():
            known = self.label(name, len(labels) == 1)
            if label_field.classes and known.whose != "the run":
                # Also (), of numbers: another part's words would be numbered by themselves.
                names = label_field.names
                known = replace(known, names=names, auto=False, whose=known.whose or TRAINING)
            known_labels[name] = replace(known, samples=len(train), trained=label_field.classes)
        return Known(self.default, known_labels, self.run, train.sample)

    def named_run(self, run: Sample) -> Sample:
        """Give ``run`` the names of ``data.classes`` where it has none."""
        labels = {name: replace(field, names=self.each[name].names or ()) for name, field in run.labels.items()}
        return replace(run, labels=labels)

    def label(self, name: str, alone: bool) -> Classes:
        """Return the classes of a label; ``alone``: it is the only one, which other data may call by another name."""
        if name not in self.each and alone and len(self.each) == 1:
            return next(iter(self.each.values()))
        return self.each.get(name, self.default)

    def input(self, name: str, alone: bool) -> Field | None:
        """Return an input's field in the run; None: a new run."""
        fields = self.run.inputs if self.run else {}
        return next(iter(fields.values())) if alone and len(fields) == 1 else fields.get(name)


class Words:
    """Labels that are words: codes (n,) int64 of ``names``, which are in alphabetical order."""

    dtype = np.dtype(np.int64)

    def __init__(self, codes: np.ndarray, names: Sequence[str]) -> None:
        self.codes, self.names, self.shape = codes, tuple(names), codes.shape

    @classmethod
    def read(cls, values: np.ndarray) -> Words:
        """Return the numbers of an array of texts, (n,) or (n, 1)."""
        names, codes = np.unique(values.reshape(-1), return_inverse=True)
        return cls(codes.astype(np.int64), [str(name) for name in names])

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: Any) -> np.ndarray:
        return self.codes[rows]


@dataclass(frozen=True)
class Lookup:
    """Values as the data hold them -> numbers of classes. ``values``: rising; ``places``: the number of each."""

    values: np.ndarray
    places: np.ndarray
    ignore: int  # a value that stays as it is

    @classmethod
    def of(cls, values: Sequence[int] | np.ndarray, places: Sequence[int] | np.ndarray, ignore: int) -> Lookup | None:
        """Make a lookup; None: every value is the number of its class already."""
        listed, numbers = np.asarray(values, np.int64), np.asarray(places, np.int64)
        if np.array_equal(listed, numbers):
            return None
        order = np.argsort(listed)
        return cls(listed[order], numbers[order], ignore)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Return the numbers of the classes; unknown values become -1."""
        x = x.astype(np.int64, copy=False)
        at = np.minimum(np.searchsorted(self.values, x), len(self.values) - 1)
        numbers = np.where(self.values[at] == x, self.places[at], -1)
        return np.where(x == self.ignore, x, numbers)
