"""Sources over arrays (in memory, mapped, or read by rows) and made-up samples."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np

from hvd_train.config import TaskConfig
from hvd_train.data.classes import MAX_NAME, Classes, Known, Lookup, Words, by_number, listing, two_meanings, values_of
from hvd_train.data.order import U64, mix, permute, stream
from hvd_train.data.transforms import drawn
from hvd_train.errors import DataError
from hvd_train.protocol import Field, Fields, Sample, Source

SPLIT_SEED = 20200101  # the held-out part is a property of the data, not of a run
SCAN = 1 << 20  # labels looked at together
MARKS = 1 << 20  # labels below this are looked for without sorting
NOISE = 0x5EED  # key of the synthetic noise
INPUT, LABEL = "input", "label"  # names of arrays that came without one
# Types that not every framework computes with travel as the next larger one; all numbers with a fraction in 32 bits.
TRAVEL = {"uint16": "int32", "uint32": "int64", "uint64": "int64"}


@dataclass(frozen=True)
class Column:
    """One named array of all samples: ``values`` needs only ``shape``, ``dtype``, ``len`` and ``[rows]``.

    ``title``: what messages call it; ``lookup``: from values to the numbers of their classes.
    """

    title: str
    values: Any
    field: Field
    where: str
    lookup: Lookup | None = None

    @classmethod
    def of_inputs(
        cls, title: str, values: Any, ids: bool, alone: bool, where: str, images: bool | None = None
    ) -> Column:
        """``ids``: bytes are taken as they are, else they are values between 0 and 1; ``alone``: the only input, of
        which (height, width) gets a channel axis if it is an image; ``images``: as ``is_image``."""
        kind, shape = np.dtype(values.dtype), tuple(int(k) for k in values.shape[1:])
        if kind.kind not in "fuib":
            raise DataError(f"{title} of type {kind}", where=where, fix="store them as uint8 or float32")
        dtype = "float32" if kind.kind == "f" else TRAVEL.get(kind.name, kind.name)
        divisor = 255.0 if kind == np.uint8 and not ids else 1.0
        image = is_image(shape, kind, alone, images)
        field = Field((*shape, 1) if image and len(shape) == 2 else shape, dtype, divisor, image=image)
        return cls(title, values, field, where)

    @classmethod
    def of_numbers(
        cls,
        title: str,
        values: Any,
        where: str,
        as_stored: bool,
        images: bool | None = None,
        beside: Sequence[Field] = (),
    ) -> Column:
        """Labels that are not classes: numbers, or images as inputs are. ``as_stored``: a function of the user's takes
        them; else (n, 1) is (n,). ``beside``: the inputs; a label at each place of an image is an image, too."""
        kind, shape = np.dtype(values.dtype), tuple(int(k) for k in values.shape[1:])
        if len(shape) > (2 if as_stored else 1):
            if images is None and any(field.image and field.shape[:2] == shape[:2] for field in beside):
                images = True
            return cls.of_inputs(title, values, False, True, where, images)
        if kind.kind not in "fuib":
            raise DataError(f"{title} of type {kind}", where=where, fix="store numbers")
        dtype = "float32" if kind.kind == "f" else "bool" if kind.kind == "b" else "int64"
        return cls(title, values, Field(() if shape == (1,) and not as_stored else shape, dtype), where)

    def of(self, taken: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Some samples as the field has them; ``rows``: their places, for messages."""
        if self.lookup:
            taken = self.lookup(taken)
        if self.field.dtype == "float32":
            with np.errstate(over="ignore"):  # what overflows becomes infinite and is found below
                taken = taken.astype(np.float32, copy=False)
                finite = math.isfinite(np.sum(taken))  # cheaper than looking at each; may overflow without a fault
            if not finite:
                self._check(np.isfinite(taken), rows, "NaN or infinity")
        elif taken.dtype == np.uint64:
            self._check(np.less(taken, 1 << 63), rows, "a number of more than 63 bits")
        return taken.astype(self.field.dtype, copy=False).reshape(len(rows), *self.field.shape)

    def _check(self, entries: np.ndarray, rows: np.ndarray, what: str) -> None:
        good = entries.reshape(len(entries), -1).all(axis=1)
        if not good.all():
            if entries.ndim == 2 and len(entries) > 1 and not (columns := entries.any(axis=0)).all():
                what = (
                    f"column {int(np.argmin(columns))} of the {self.title} holds {what} in each of {len(rows)} samples"
                )
                fix = "is it text, as names of rows are, that was read as numbers? leave the column out"
                raise DataError(what, where=self.where, fix=fix)
            bad = int(rows[int(np.argmin(good))])
            raise DataError(f"sample {bad} holds {what}", where=self.where, fix="mend or remove it")

    @property
    def note(self) -> str:
        """What a user should know of the type, for bytes and whole numbers can mean two things."""
        kind = np.dtype(self.values.dtype)
        if self.field.divisor != 1:
            return f"{self.title} are uint8 and are divided by 255 (ids, as of tokens, must be stored as int32)"
        if kind == np.uint8:
            return f"{self.title} are uint8 with a label at each place: taken as ids, not divided by 255"
        if kind.kind in "iu":
            return f"{self.title} are {kind} and reach the model as whole numbers (store quantities as float32)"
        return ""


def is_image(shape: tuple[int, ...], kind: np.dtype, alone: bool, images: bool | None) -> bool:
    """Return whether samples of this shape are images: (height, width), if ``alone`` as an input, or with channels.

    ``images``: what the configuration or the kind of data says; None: bytes are, and what has 1 or 3 channels.
    """
    if len(shape) not in ((2, 3) if alone else (3,)):
        return False
    return (kind == np.uint8 or (len(shape) == 3 and shape[-1] in (1, 3))) if images is None else images


class Arrays:
    """Inputs (n, ...) and labels, each an array or a dict of named ones, in memory or mapped.

    Labels that are classes are (n,) or (n, 1), or one for each place of the inputs: (n, T) for inputs (n, T) or
    (n, T, ...); which are, ``task`` says. uint8
    inputs are divided by 255, unless they are (n, T) with a label at each place: those are ids, as of text. Others are
    taken as they are; images (n, h, w) without a name get a channel axis (``is_image``). ``note`` tells of bytes and
    whole numbers, unless they are known to be ``images``; ``remarks`` tell what else a user should know. Labels are
    checked once, here; inputs when they are fetched. ``num_classes``: the number, or all that is known of the classes.
    Without labels ({}) samples can be predicted alone. ``columns``: names of the entries of the inputs' and of the
    labels' last axis.
    """

    def __init__(
        self,
        inputs: Any,
        labels: Any,
        where: str,
        num_classes: int | None | Known = None,
        task: TaskConfig | None = None,
        notes: Sequence[str] = (),
        images: bool | None = None,
        remarks: Sequence[str] = (),
        columns: tuple[Sequence[str], Sequence[str]] = ((), ()),
    ) -> None:
        self.where, self.rows, self.remarks = where, None, tuple(remarks)
        known = num_classes if isinstance(num_classes, Known) else Known(Classes(num_classes))
        named = isinstance(inputs, Mapping), isinstance(labels, Mapping)
        inputs, labels = inputs if named[0] else {INPUT: inputs}, labels if named[1] else {LABEL: labels}
        titles = {name: f"inputs '{name}'" if named[0] else "inputs" for name in inputs}
        own_titles = {name: f"labels '{name}'" if named[1] else "labels" for name in labels}
        titled = {own_titles[name]: x for name, x in labels.items()} or {titles[name]: x for name, x in inputs.items()}
        first, like = next(iter(titled.items()))
        for title, values in [
            *((titles[name], x) for name, x in inputs.items()),
            *((own_titles[name], x) for name, x in labels.items()),
        ]:
            if not values.shape or not like.shape or len(values) != len(like):
                what = f"{title} {values.shape} and {first} {like.shape} differ in length"
                raise DataError(what, where=where, fix="give one label per input")
        if len(like) == 0:
            raise DataError("the data set is empty", where=where)
        places = {tuple(x.shape[1:]) for x in labels.values()}
        self._inputs = {}
        for name, values in inputs.items():
            shape = tuple(values.shape[1:])
            ids = len(shape) == 1 and shape in places and shape != (1,)
            before, own_images = known.input(name, len(inputs) == 1), images
            if before is not None and images is None:  # a run takes arrays as it was trained with them
                ids = ids if before.dtype != "uint8" else before.divisor == 1
                own_images = before.image
            self._inputs[name] = Column.of_inputs(titles[name], values, ids, not named[0], where, own_images)
            rule = is_image(shape, np.dtype(values.dtype), not named[0], None)
            if images is None and own_images not in (None, rule) and len(shape) in (2, 3):
                self.remarks += (
                    f"{titles[name]} {shape} are {'' if own_images else 'not '}images, as when the run was trained",
                )
        fields = [column.field for column in self._inputs.values()]
        wanted = task or TaskConfig()
        self._labels, self._ignore = {}, wanted.ignore_index
        for name, values in labels.items():
            if wanted.classes(name, len(labels) == 1):
                shapes = None if named[0] else tuple(inputs[INPUT].shape)
                classes = known.label(name, len(labels) == 1)
                found = _classes(own_titles[name], values, where, shapes, classes, wanted.ignore_index)
                self._labels[name] = found[0]
                self.remarks += found[1]
            else:
                as_stored = wanted.asks_user_code(name)
                self._labels[name] = Column.of_numbers(own_titles[name], values, where, as_stored, images, fields)
        self.sample = Sample(
            _with_columns(self._inputs, columns[0]),
            _with_columns(self._labels, columns[1]),
            None if any(column.field.classes for column in self._labels.values()) else known.default.count,
        )
        divided = [column for column in self._labels.values() if column.field.divisor != 1]
        every = (*self._inputs.values(), *divided)
        told = (column.note for column in every if not (images and column.field.image))
        self.note = "\n".join(filter(None, (*notes, *told)))
        self.fingerprint = self._fingerprint()

    rows: np.ndarray | None  # the subset's, None: all
    files: Sequence[str] = ()  # of samples that are files

    def __len__(self) -> int:
        return len(next(iter(self._inputs.values())).values) if self.rows is None else len(self.rows)

    def fetch(self, indices: np.ndarray) -> tuple[Fields, Fields]:
        rows = indices if self.rows is None else self.rows[indices]
        inputs, labels = (
            {name: column.of(column.values[rows], rows) for name, column in columns.items()}
            for columns in (self._inputs, self._labels)
        )
        return inputs, labels

    def taken(self, inputs: Any, labels: Any, rows: np.ndarray) -> tuple[Fields, Fields]:
        """Other samples of the same fields, which came from elsewhere."""
        parts = []
        for given, columns in ((inputs, self._inputs), (labels, self._labels)):
            given = given if isinstance(given, Mapping) else dict.fromkeys(columns, given)
            arrays = {name: np.asarray(given[name]) for name in columns}
            for name, x in arrays.items():
                shape = (len(rows), *columns[name].values.shape[1:])
                if x.shape != shape:
                    what = f"fetch gives {columns[name].title} of shape {x.shape} for {len(rows)} indices, not {shape}"
                    raise DataError(what, where=self.where)
            parts.append({name: columns[name].of(x, rows) for name, x in arrays.items()})
        for name, x in parts[1].items():
            column = self._labels[name]
            if column.field.classes:
                good = (x >= 0) & (x < column.field.classes)
                good = good | (x == self._ignore) if column.field.shape else good
                column._check(good, rows, f"a label out of [0, {column.field.classes})")
        return parts[0], parts[1]

    def _fingerprint(self) -> str:
        """Over shape, types and evenly spread rows, first and last among them: milliseconds for any size."""
        n, digest = len(self), hashlib.sha256()
        for name, column in self._inputs.items():
            own, named = column.values, "" if len(self._inputs) == 1 else f" {name}"
            text = f"{n} {column.field.shape} {np.dtype(own.dtype).str} {getattr(own, 'names', '')}{named}"
            digest.update(text.encode())
        for columns, count in ((self._labels, 1024), (self._inputs, 64)):
            picked = np.unique(np.linspace(0, n - 1, count).astype(np.int64))
            rows = picked if self.rows is None else self.rows[picked]
            for column in columns.values():
                found = np.ascontiguousarray(column.values[rows])
                digest.update(f"{found.dtype.str} {found.shape}".encode() + found.tobytes())
                if column.lookup:
                    digest.update(column.lookup.places.tobytes())
        return digest.hexdigest()[:16]

    def split(self, fraction: float) -> tuple[Arrays, Arrays]:
        """A fixed, stratified split: the same share of each class is held out, whatever the run's seed.

        Samples with many labels, or with none that is a class, are of one class here.
        """
        if not self._labels:
            fix = "take --split all"
            raise DataError("without labels nothing is held out, so there is no such split", where=self.where, fix=fix)
        column = next(iter(self._labels.values()))
        one = not column.field.shape and column.field.classes is not None
        labels = np.asarray(column.values[:]).reshape(-1) if one else np.zeros(len(column.values), np.int64)
        held = np.zeros(len(labels), bool)
        for label in np.unique(labels):
            members = np.flatnonzero(labels == label)
            shuffled = members[permute(np.arange(len(members)), len(members), SPLIT_SEED, int(label))]
            held[shuffled[: min(len(members) - 1, max(1, round(fraction * len(members))))]] = True
        if not held.any():
            fix = "give more samples, or a validation part"
            raise DataError("no class has two samples, so nothing can be held out", where=self.where, fix=fix)
        return self._part(np.flatnonzero(~held)), self._part(np.flatnonzero(held))

    def _part(self, rows: np.ndarray) -> Arrays:
        part = copy.copy(self)
        part.rows, part.files = rows, [self.files[row] for row in rows.tolist()] if self.files else ()
        part.fingerprint = part._fingerprint()
        return part


def _with_columns(own: Mapping[str, Column], names: Sequence[str]) -> dict[str, Field]:
    """The fields; the only one gets the names of its columns."""
    fields = {name: column.field for name, column in own.items()}
    return {name: replace(field, columns=tuple(names)) if names else field for name, field in fields.items()}


def _classes(
    title: str, labels: Any, where: str, inputs: tuple[int, ...] | None, known: Classes, ignore: int
) -> tuple[Column, tuple[str, ...]]:
    """Labels that are classes, and what a user should know of them.

    They are words, values that ``known`` lists, or whole numbers in [0, count), by default the largest + 1; or
    ``ignore``. ``inputs``: the shape of a single array of inputs, whose places may each have a label.
    """
    own = tuple(int(k) for k in labels.shape[1:])
    if inputs and own not in ((), (1,)) and (own != inputs[1 : 1 + len(own)] or 0 in own):
        fix = "store one whole number per sample, or one per place of the inputs; or set another task.loss"
        raise DataError(f"{title} of shape {labels.shape} for inputs {inputs}", where=where, fix=fix)
    kind = np.dtype(labels.dtype)
    if kind.kind == "U" and own in ((), (1,)):
        labels, own, kind = Words.read(np.asarray(labels)), (), np.dtype(np.int64)
    if kind.kind not in "iu":
        fix = "store classes as whole numbers (int64); for regression set task.loss: mse"
        raise DataError(f"{title} of type {kind}, and task.loss: cross_entropy wants classes", where=where, fix=fix)
    distinct, masked = _distinct(labels, ignore)
    remarks: tuple[str, ...] = ()
    field_shape = () if own == (1,) else own
    names, count = known.names, known.count
    values = values_of(names or ())
    lookup = None
    if isinstance(labels, Words):
        names, count, lookup = _of_words(title, labels, known, where, ignore)
    elif known.auto or values is not None:
        names = tuple(map(str, distinct)) if known.auto else names or ()
        values = np.array(distinct, np.int64) if known.auto else values
        strange = sorted(set(distinct) - set(values.tolist()))  # type: ignore[union-attr]
        if strange:
            raise known.strange(strange, _sample(where, labels, strange[0]))
        lookup, count = Lookup.of(values, np.arange(len(names)), ignore), max(count or 0, len(names))  # type: ignore[arg-type]
    else:
        if double := two_meanings(names or (), distinct):
            what = f"{title} are whole numbers, and one of the classes {listing(names or ())} is called '{double}'"
            fix = "store the labels as text, each with the name of its class"
            raise DataError(what, where=_sample(where, labels, int(double)), fix=fix)
        if names and known.whose == "the run":
            remarks = (by_number(title, names),)
        count = max(count or 0, len(names or ())) or None
        low, high = (distinct[0], distinct[-1]) if distinct else (0, 0)
        if low < 0 or (count is not None and high >= count):
            bound = f"[0, {count})" if count is not None else "0, 1, 2, ..."
            bad = low if low < 0 else high
            what = f"label {bad} of sample {_first(labels, bad)} is out of range: {bound} expected"
            raise DataError(what, where=where, fix="mend the labels or data.num_classes")
        # Labels at places are ids of a vocabulary, most of which a small text does not use.
        if count is None and high >= max(len(labels) + known.samples, MARKS if field_shape else 0):
            what = f"labels up to {high:,} are {high + 1:,} classes, and there are {len(labels):,} samples"
            fix = f"set data.classes: auto to number the {len(distinct):,} that occur, or list them"
            raise DataError(what, where=where, fix=f"{fix}; or data.num_classes, if there are so many")
        missing = sorted(set(range(count or high + 1)) - set(distinct)) if not field_shape and high < MARKS else []
        if missing and not known.samples and known.whose != "the run":
            one = len(missing) == 1
            what = f"{title}: class{'' if one else 'es'} {listing(missing)} do{'es' if one else ''} not occur"
            remarks = (f"{what} (data.classes: auto numbers those that do)",)
        untrained = [value for value in distinct if value >= (known.trained or high + 1)]
        if untrained and not field_shape and known.whose != "the run":
            many = "es" * (len(untrained) > 1)
            what = f"{title} of {where}: class{many} {listing(untrained)} occur{'' if many else 's'} only here"
            remarks = (f"{what}, and no sample of the training part is one",)
        count = count or high + 1
    field = Field(field_shape, "int64", classes=count, masked=masked, names=tuple(names or ()))
    long = next((name for name in field.names or () if len(name) > MAX_NAME), None)
    if long:
        raise DataError(f"{title} hold a class of {len(long):,} characters: '{long[:60]}...'", where=where)
    return Column(title, labels, field, where, lookup), remarks


def _of_words(
    title: str, words: Words, known: Classes, where: str, ignore: int
) -> tuple[tuple[str, ...], int, Lookup | None]:
    """(names of the classes, their number, where the words' codes belong)."""
    names = known.names
    if names is None:
        names = words.names
        if known.whose == "the run" and known.count not in (None, len(names)):
            what = f"{title} are {listing(names)}, and the run has {known.count} classes whose names it does not know"
            raise DataError(what, where=where, fix="give data.classes: all its names, in the order of the training")
    numbers = {name: k for k, name in enumerate(names or map(str, range(known.count or 0)))}
    used = np.unique(words.codes).tolist()
    strange = [words.names[code] for code in used if words.names[code] not in numbers]
    if strange and not names:
        what = f"{title} are words, {listing(strange)}, and the classes of {known.whose} are numbers"
        raise DataError(what, where=where, fix="give data.classes: the names in the order of the numbers")
    if strange:
        raise known.strange(strange, _sample(where, words, words.names.index(strange[0])))
    if known.count is not None and known.count < len(names):
        what = f"{title} are {len(names)} classes, {listing(names)}, and data.num_classes is {known.count}"
        raise DataError(what, where=where, fix="leave it out, or mend the labels")
    places = [numbers.get(name, -1) for name in words.names]
    return names, max(known.count or 0, len(numbers)), Lookup.of(range(len(places)), places, ignore)


def _distinct(labels: Any, ignore: int) -> tuple[list[int], bool]:
    """The rising values that occur, and whether ``ignore`` does."""
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
    """The first sample with this label."""
    rows = max(1, SCAN // max(1, math.prod(labels.shape[1:])))
    for start in range(0, len(labels), rows):
        part = np.asarray(labels[start : start + rows])
        if (part == value).any():
            return start + int(np.argmax(part == value)) * len(part) // part.size
    return 0


def _sample(where: str, labels: Any, value: int) -> str:
    return f"{where}, sample {_first(labels, value)}"


class Itself:
    """Another source's samples, whose labels are their inputs."""

    def __init__(self, own: Source) -> None:
        self._own, self.fingerprint = own, hashlib.sha256(f"itself {own.fingerprint}".encode()).hexdigest()[:16]
        self.ordered = getattr(own, "ordered", False)
        self.sample = Sample(own.sample.inputs, self._labels(own.sample.inputs))

    def __len__(self) -> int:
        return len(self._own)

    def fetch(self, indices: np.ndarray) -> tuple[Fields, Fields]:
        inputs, _ = self._own.fetch(indices)
        return inputs, self._labels(inputs)

    def drawn(self, indices: np.ndarray, seed: int, epoch: int) -> tuple[Fields, Fields]:
        inputs, _ = drawn(self._own, indices, seed, epoch)
        return inputs, self._labels(inputs)

    def _labels(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {LABEL if name == INPUT else name: x for name, x in inputs.items()}


def joined_samples(parts: Iterable[Source]) -> Sample:
    """The fields of all parts together."""
    return reduce(Sample.joined, (part.sample for part in parts))


class Joined:
    """Several parts of one data set, one after the other."""

    def __init__(self, parts: Sequence[Source]) -> None:
        self._parts, self._ends = parts, np.cumsum([len(part) for part in parts])
        self.sample, self.note = joined_samples(parts), getattr(parts[0], "note", "")
        self.remarks = tuple(line for part in parts for line in getattr(part, "remarks", ()))
        self.files = [file for part in parts for file in getattr(part, "files", ())]
        self.fingerprint = " ".join(part.fingerprint for part in parts)
        self.ordered = any(getattr(part, "ordered", False) for part in parts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def fetch(self, indices: np.ndarray) -> tuple[Fields, Fields]:
        which = np.searchsorted(self._ends, indices, "right")
        pieces = []
        for k in np.unique(which):
            here = np.flatnonzero(which == k)
            start = self._ends[k] - len(self._parts[k])
            pieces.append((here, self._parts[k].fetch(np.asarray(indices)[here] - start)))
        back = np.argsort(np.concatenate([here for here, _ in pieces]))
        inputs, labels = (
            {name: np.concatenate([taken[kind][name] for _, taken in pieces])[back] for name in pieces[0][1][kind]}
            for kind in (0, 1)
        )
        return inputs, labels


class Synthetic:
    """Sample i is a pure function of i: its class' pattern and noise, halved. Memory does not grow with n.

    ``start`` is the place of the first sample in the endless stream, so that training and validation never overlap.
    """

    def __init__(self, n: int, shape: Sequence[int], num_classes: int, start: int = 0) -> None:
        self._shape, self._classes, self._n, self._start = tuple(shape), num_classes, n, start
        self.sample = Sample({INPUT: Field(self._shape, "float32")}, {LABEL: Field((), "int64", classes=num_classes)})
        self._size = math.prod(self._shape)
        self._patterns = 0.5 * _noise(mix(NOISE, 1), np.arange(num_classes, dtype=U64), self._size)
        text = f"synthetic {n} {self._shape} {num_classes} {start}"
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return self._n

    def fetch(self, indices: np.ndarray) -> tuple[Fields, Fields]:
        places = np.asarray(indices, np.int64) + self._start
        labels = places % self._classes
        inputs = _noise(mix(NOISE, 2), places.astype(U64), self._size)
        inputs *= np.float32(0.5)
        inputs += self._patterns[labels]
        return {INPUT: inputs.reshape(-1, *self._shape)}, {LABEL: labels}


class Text:
    """Samples ``start`` to ``stop`` of text: i holds bytes [i T, i T + T), as numbers; its labels are the next ones."""

    CLASSES = 256  # bytes

    def __init__(self, found: np.ndarray, length: int, start: int, stop: int) -> None:
        self._length = length
        label = Field((length,), "int64", classes=self.CLASSES)
        self.sample = Sample({INPUT: Field((length,), "uint8")}, {LABEL: label})
        self._bytes, self._start, self._n = found, start, stop - start
        picked = np.unique(np.linspace(0, self._n - 1, 64).astype(np.int64))
        digest = hashlib.sha256(f"text {length} {start} {stop}".encode() + self._sample(picked).tobytes())
        self.fingerprint = digest.hexdigest()[:16]

    def __len__(self) -> int:
        return self._n

    def _sample(self, indices: np.ndarray) -> np.ndarray:
        """(k,) -> (k, T + 1) uint8."""
        first = (np.asarray(indices, np.int64) + self._start) * self._length
        return self._bytes[first[:, None] + np.arange(self._length + 1)]

    def fetch(self, indices: np.ndarray) -> tuple[Fields, Fields]:
        taken = self._sample(indices)
        return {INPUT: taken[:, :-1].copy()}, {LABEL: taken[:, 1:].astype(np.int64)}


def _noise(key: int, places: np.ndarray, size: int) -> np.ndarray:
    """(k,) places -> (k, size) float32 in [0, 1]; 8 bits a value, so one hash makes eight."""
    words = -(-size // 8)
    bits = stream(key, places[:, None] * U64(words) + np.arange(words, dtype=U64)).astype("<u8")
    return np.divide(bits.view(np.uint8)[:, :size], np.float32(255), dtype=np.float32)
