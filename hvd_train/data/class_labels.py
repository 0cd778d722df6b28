"""Number and check labels that are classes."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvd_train.data.classes import (
    MAX_NAME,
    TRAINING,
    Classes,
    Lookup,
    Words,
    by_number,
    remarks_on_missing,
    two_meanings,
    values_of,
)
from hvd_train.data.column import Column
from hvd_train.errors import DataError, listing, noun_and_names
from hvd_train.protocol import Field

SCAN = 1 << 20  # labels scanned at once
MARKS = 1 << 20  # labels below this are found without sorting
NO_CODE = -1  # the code of no word
NO_LABEL = 255  # a common ignore_index of masks stored as bytes


def class_column(
    title: str, labels: Any, where: str, inputs: tuple[int, ...] | None, known: Classes, ignore: int
) -> tuple[Column, tuple[str, ...]]:
    """Check labels that are classes and number them; return the column, and remarks for the user.

    Labels are words, values listed in ``known``, or integers in [0, count), where count defaults to the largest + 1;
    or ``ignore``. ``inputs``: the shape of the inputs if they are a single array, which may have a label per position.
    """
    shape = tuple(int(k) for k in labels.shape[1:])
    if inputs and shape not in ((), (1,)) and (shape != inputs[1 : 1 + len(shape)] or 0 in shape):
        fix = "store one whole number per sample, or one per position of the inputs; or set another task.loss"
        raise DataError(f"{title} of shape {labels.shape} for inputs {inputs}", where=where, fix=fix)
    kind, missing = np.dtype(labels.dtype), list[str]()
    if kind.kind == "U" and shape in ((), (1,)):
        labels, shape, kind = Words.read(np.asarray(labels)), (), np.dtype(np.int64)
        missing = remarks_on_missing(title, labels.names, known)
    if kind.kind not in "iu":
        other = "for a model with one output set task.loss: bce"
        if kind.kind != "b":
            other = "for regression set task.loss: mse"
        fix = f"store classes as whole numbers (int64); {other}"
        raise DataError(f"{title} are of type {kind}, and task.loss: cross_entropy wants classes", where=where, fix=fix)
    distinct, masked = _distinct(labels, ignore)
    shape = () if shape == (1,) else shape
    names, remarks = known.names, tuple[str, ...]()
    lookup: Lookup | None = None
    if isinstance(labels, Words):
        names, count, lookup, masked = _word_classes(title, labels, known, where, ignore)
        remarks = (*missing, *_remarks_on_twins(title, names))
    elif known.auto or values_of(names or ()) is not None:
        names, count, lookup = _listed_classes(labels, distinct, known, where, ignore)
    else:
        ignored = ignore if masked else None
        count, remarks = _numbered_classes(title, labels, distinct, known, where, bool(shape), ignored)
    if names and 0 <= ignore < len(names) and names[ignore] != str(ignore) and values_of(names) is not None:
        # Once numbered, labels of that class would equal ignore_index and be left out.
        what = f"class {names[ignore]} gets the number {ignore}, which is task.ignore_index"
        fix = "leave data.classes out; or store missing labels as -100, and leave task.ignore_index out"
        raise DataError(what, where=where, fix=fix)
    long = next((name for name in names or () if len(name) > MAX_NAME), None)
    if long:
        raise DataError(f"{title} hold a class of {len(long):,} characters: '{long[:60]}...'", where=where)
    field = Field(shape, "int64", classes=count, masked=masked, names=tuple(names or ()))
    return Column(title, labels, field, where, lookup), remarks


def _listed_classes(
    labels: Any, distinct: list[int], known: Classes, where: str, ignore: int
) -> tuple[tuple[str, ...], int, Lookup | None]:
    """Number integer labels by a list of values; return names, count of classes, and lookup."""
    names = tuple(map(str, distinct)) if known.auto else known.names or ()
    values = np.array(distinct, np.int64) if known.auto else values_of(names)
    strange = sorted(set(distinct) - set(values.tolist()))  # type: ignore[union-attr]
    if strange:
        raise known.strange(strange, _sample(where, labels, strange[0]))
    lookup = Lookup.of(values, np.arange(len(names)), ignore)  # type: ignore[arg-type]
    return names, max(known.count or 0, len(names)), lookup


def _numbered_classes(
    title: str, labels: Any, distinct: list[int], known: Classes, where: str, per_position: bool, ignored: int | None
) -> tuple[int, tuple[str, ...]]:
    """Check labels that are class numbers already; return the count of classes, and remarks.

    ``per_position``: a sample has a label per token or pixel. ``ignored``: task.ignore_index, if it occurs.
    """
    names, of_run = known.names or (), known.whose == "the run"
    if double := two_meanings(names, distinct):
        what = f"{title} are whole numbers, and one of the classes {listing(names)} is called '{double}'"
        fix = "store the labels as text, each with the name of its class"
        raise DataError(what, where=_sample(where, labels, int(double)), fix=fix)
    count = max(known.count or 0, len(names)) or None
    low, high = (distinct[0], distinct[-1]) if distinct else (0, 0)
    if low < 0 or (count is not None and high >= count):
        bound = f"[0, {count})" if count is not None else "0, 1, 2, ..."
        bad = low if low < 0 else high
        what = f"label {bad} of sample {_first(labels, bad)} is out of range: {bound} expected"
        advice = f"; task.ignore_index: {bad} leaves such labels out" * (per_position and bad in (-1, NO_LABEL))
        raise DataError(what, where=where, fix=f"correct the labels or data.num_classes{advice}")
    # Labels per position may be ids of a large vocabulary, most of which a small text does not use.
    if count is None and high >= max(len(labels) + known.samples, MARKS if per_position else 0):
        what = f"labels up to {high:,} are {high + 1:,} classes, and there are {len(labels):,} samples"
        fix = f"set data.classes: auto to number the {len(distinct):,} that occur, or list them"
        raise DataError(what, where=where, fix=f"{fix}; or data.num_classes, if there are so many")
    if of_run or (names and known.whose == TRAINING):
        return count or high + 1, (by_number(title, names),) if names else ()
    if per_position:
        return count or high + 1, _remark_on_unlabeled(title, distinct) if count is None and not known.samples else ()
    return count or high + 1, _remarks_on_classes(title, distinct, count or high + 1, known, where, ignored)


def _remark_on_unlabeled(title: str, distinct: list[int]) -> tuple[str, ...]:
    """Return a remark on masks whose 255 may mean unlabeled pixels."""
    others = [value for value in distinct if value != NO_LABEL]
    if distinct[-1:] != [NO_LABEL] or not others or others[-1] == NO_LABEL - 1:
        return ()
    what = f"{title}: {NO_LABEL} is treated as one of {NO_LABEL + 1} classes, but the largest other is {others[-1]}"
    return (f"{what} (if it means no label, set task.ignore_index: {NO_LABEL})",)


def _remarks_on_classes(
    title: str, distinct: list[int], count: int, known: Classes, where: str, ignored: int | None
) -> tuple[str, ...]:
    """Return a remark on classes that the training part lacks, or that never occur."""
    high = distinct[-1] if distinct else 0
    untrained = [value for value in distinct if value >= (known.trained or high + 1)]
    if untrained:
        verb = "occurs" if len(untrained) == 1 else "occur"
        what = f"{title} of {where}: {noun_and_names('class', untrained)} {verb} only here"
        return (f"{what}, and no sample of the training part is one",)
    missing = sorted(set(range(count)) - {*distinct, ignored}) if high < MARKS else []
    if missing and not known.samples:
        verb = "does" if len(missing) == 1 else "do"
        what = f"{title}: {noun_and_names('class', missing)} {verb} not occur"
        return (f"{what} (data.classes: auto numbers those that do)",)
    return ()


def _word_classes(
    title: str, words: Words, known: Classes, where: str, ignore: int
) -> tuple[tuple[str, ...], int, Lookup | None, bool]:
    """Number labels that are words; return names, count of classes, lookup, and whether class ``ignore`` occurs."""
    names = known.names
    if names is None:
        names = words.names
        if known.whose == "the run" and known.count not in (None, len(names)):
            what = f"{title} are {listing(names)}, and the run has {known.count} classes without names"
            raise DataError(what, where=where, fix="give data.classes: all its names, in the order of the training")
    numbers = {name: k for k, name in enumerate(names or map(str, range(known.count or known.trained or 0)))}
    used = np.unique(words.codes).tolist()
    strange = [words.names[code] for code in used if words.names[code] not in numbers]
    if strange and not names:
        what = f"{title} are words, {listing(strange)}, and the classes of {known.whose} are numbers"
        raise DataError(what, where=where, fix="give data.classes: the names in the order of the numbers")
    if strange:
        raise known.strange(strange, _sample(where, words, words.names.index(strange[0])))
    if known.count is not None and known.count < len(names):
        what = f"{title} are {len(names)} classes, {listing(names)}, and data.num_classes is {known.count}"
        raise DataError(what, where=where, fix="leave it out, or correct the labels")
    of_codes = [numbers.get(name, -1) for name in words.names]
    masked = any(of_codes[code] == ignore for code in used)
    # A code is not a class number yet, so none may be compared with ignore_index.
    return names, max(known.count or 0, len(numbers)), Lookup.of(range(len(of_codes)), of_codes, NO_CODE), masked


def _look(name: str) -> str:
    """Return what of a name is seen."""
    seen = "".join(one for one in unicodedata.normalize("NFKC", name) if unicodedata.category(one) != "Cf")
    seen = " ".join(seen.split())
    return seen.casefold() if len(seen) > 1 else seen  # single letters may be classes


def _remarks_on_twins(title: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return remarks on names that look alike: they differ in case, Unicode composition, spaces or unseen letters."""
    first: dict[str, str] = {}
    twins = [(first.setdefault(_look(name), name), name) for name in names]
    return tuple(
        f"{title}: classes {ascii(one)} and {ascii(other)} look alike, and are two classes"
        for one, other in twins
        if one != other
    )


def _distinct(labels: Any, ignore: int) -> tuple[list[int], bool]:
    """Return the sorted values that occur, and whether ``ignore`` occurs."""
    # Small values are marked in a table, which is faster than np.unique, as that sorts.
    marks, others, masked = np.zeros(MARKS, bool), set(), False
    rows = max(1, SCAN // max(1, math.prod(labels.shape[1:])))
    for start in range(0, len(labels), rows):
        part = np.asarray(labels[start : start + rows]).reshape(-1)
        left = part == ignore
        if left.any():
            masked, part = True, part[~left]
        small = (part >= 0) & (part < MARKS)
        if not small.all():
            others |= set(np.unique(part[~small]).tolist())
            part = part[small]
        marks[part.astype(np.intp)] = True
    return sorted([*np.flatnonzero(marks).tolist(), *others]), masked


def _first(labels: Any, value: int) -> int:
    """Return the index of the first sample with this label."""
    rows = max(1, SCAN // max(1, math.prod(labels.shape[1:])))
    for start in range(0, len(labels), rows):
        part = np.asarray(labels[start : start + rows])
        if (part == value).any():
            return start + int(np.argmax(part == value)) * len(part) // part.size
    return 0


def _sample(where: str, labels: Any, value: int) -> str:
    return f"{where}, sample {_first(labels, value)}"
