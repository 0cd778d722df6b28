"""A data source over arrays that are in memory, memory-mapped, or read row by row."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hvd_train.config import TaskConfig
from hvd_train.data.class_labels import class_column
from hvd_train.data.classes import Classes, Known
from hvd_train.data.column import INPUT, LABEL, Column, check_no_mask, is_image
from hvd_train.data.held_out import fold_held_out, share_held_out
from hvd_train.data.ragged import RaggedRows, Varying
from hvd_train.errors import DataError
from hvd_train.protocol import Field, Fields, Sample

FEW = 64  # samples inspected for a remark
Columns = Sequence[str] | Mapping[str, Sequence[str]]  # names of columns, or {name of an array: those of its columns}


class Arrays:
    """A source of samples from arrays: inputs (n, ...) and labels, each one array or a dict of arrays.

    ``task`` says which labels are classes. These are (n,) or (n, 1), or one per position of the inputs: (n, T) for
    inputs (n, T) or (n, T, ...). uint8 inputs are divided by 255, unless they are (n, T) with labels (n, T): those are
    token ids. Other inputs are not scaled. A single unnamed input of images (n, h, w) gets a channel axis
    (``is_image``). Labels are checked once, here; inputs when they are fetched. Without labels ({}) the samples are
    for prediction only.

    ``num_classes``: the number of classes, or all that is known of them. ``columns``: column names of the last axis of
    the inputs and of the labels, by their names where each has its own. ``note``: how bytes and integers are
    interpreted, left out for known ``images``; ``remarks``: further lines for the user.
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
        columns: tuple[Columns, Columns] = ((), ()),
    ) -> None:
        self.where, self.rows, self.remarks = where, None, tuple(remarks)
        known = num_classes if isinstance(num_classes, Known) else Known(Classes(num_classes))
        unnamed = not isinstance(inputs, Mapping), not isinstance(labels, Mapping)
        inputs, labels = {INPUT: inputs} if unnamed[0] else inputs, {LABEL: labels} if unnamed[1] else labels
        titles = {name: "inputs" if unnamed[0] else f"inputs '{name}'" for name in inputs}
        label_titles = {name: "labels" if unnamed[1] else f"labels '{name}'" for name in labels}
        titled_inputs = [(titles[name], x) for name, x in inputs.items()]
        titled_labels = [(label_titles[name], x) for name, x in labels.items()]
        _check_lengths(titled_inputs, titled_labels, where)
        label_shapes = {tuple(x.shape[1:]) for x in labels.values()}
        self._inputs = {}
        for name, values in inputs.items():
            before = known.input(name, len(inputs) == 1)
            column, remarks = _input_column(titles[name], values, label_shapes, before, unnamed[0], where, images)
            self._inputs[name] = column
            self.remarks += tuple(remarks)
        fields = [column.field for column in self._inputs.values()]
        task = task or TaskConfig()
        self._labels, self._ignore = {}, task.ignore_index
        self.varying = _varying(inputs, labels, titles | label_titles, where)
        for name, values in labels.items():
            if task.classes(name, len(labels) == 1):
                shape = tuple(inputs[INPUT].shape) if unnamed[0] else None
                classes = known.label(name, len(labels) == 1)
                column, remarks = class_column(label_titles[name], values, where, shape, classes, task.ignore_index)
                self.remarks += tuple(remarks)
            elif isinstance(values, RaggedRows):
                fix = "give one number for each sample, or classes (task.loss: cross_entropy)"
                raise DataError(f"{label_titles[name]} are numbers of different lengths", where=where, fix=fix)
            else:
                as_stored = task.asks_user_code(name)
                column = Column.of_numbers(label_titles[name], values, where, as_stored, images, fields)
            self._labels[name] = column
        self.sample = Sample(
            _with_columns(self._inputs, columns[0]),
            _with_columns(self._labels, columns[1]),
            None if any(column.field.classes for column in self._labels.values()) else known.default.count,
        )
        divided = [column for column in self._labels.values() if column.field.divisor != 1]
        every = (*self._inputs.values(), *divided)
        described = _described(column for column in every if not (images and column.field.image))
        self.note = "\n".join(filter(None, (*notes, *described)))
        self.remarks += tuple(filter(None, map(_remark_on_rounding, self._inputs.values())))
        for name, column in self._labels.items():
            # Integers reach a user's loss unchanged, and the built-in losses as float32.
            rounded = not column.field.classes and ":" not in task.term(name)[0]
            self.remarks += tuple(filter(None, [_remark_on_rounding(column, rounded)]))
        self.fingerprint = self._fingerprint()

    rows: np.ndarray | None  # the rows of this subset; None: all
    files: Sequence[str] = ()  # one per sample, if samples are files
    vocabulary = ""  # the tokenizer of texts, as JSON
    fitted: list[dict[str, Any]] | None = None  # how columns of a table were prepared

    def rounding(self, inputs: Any, labels: Any) -> tuple[str, ...]:
        """Return remarks if float32 rounds float64 values of other samples: arrays (n, ...) or dicts of them."""
        sides = (self._inputs, float64_arrays(inputs, INPUT)), (self._labels, float64_arrays(labels, LABEL))
        pairs = [(columns[name], x) for columns, arrays in sides for name, x in arrays.items() if name in columns]
        told = (column.remark_on_rounding(x) for column, x in pairs if not column.field.classes)
        return tuple(filter(None, told))

    def __len__(self) -> int:
        return len(next(iter(self._inputs.values())).values) if self.rows is None else len(self.rows)

    def fetch(self, indices: np.ndarray) -> tuple[Fields, Fields]:
        rows = indices if self.rows is None else self.rows[indices]
        inputs, labels = (
            {name: column.of(column.values[rows], rows) for name, column in columns.items()}
            for columns in (self._inputs, self._labels)
        )
        return inputs, labels

    def convert(self, inputs: Any, labels: Any, rows: np.ndarray) -> tuple[Fields, Fields]:
        """Check and convert values that a user's ``fetch`` returned for the samples ``rows``."""
        parts = []
        for values, columns in ((inputs, self._inputs), (labels, self._labels)):
            named = values if isinstance(values, Mapping) else dict.fromkeys([*columns][:1], values)
            if missing := [name for name in columns if name not in named]:
                what = f"fetch gives no {', '.join(columns[name].title for name in missing)} for sample {rows[0]}"
                raise DataError(what, where=self.where, fix="give all samples the same names")
            for name in columns:
                check_no_mask(named[name], columns[name].title, self.where)
            arrays = {name: np.asarray(named[name]) for name in columns}
            for name, x in arrays.items():
                shape = (len(rows), *columns[name].values.shape[1:])
                if x.shape != shape:
                    what = f"fetch gives {columns[name].title} of shape {x.shape} for {len(rows)} indices, not {shape}"
                    raise DataError(what, where=self.where)
                columns[name].check_kept(x, rows, columns is self._inputs)
            parts.append({name: columns[name].of(x, rows) for name, x in arrays.items()})
        for name, x in parts[1].items():
            column = self._labels[name]
            if column.field.classes:
                good = (x >= 0) & (x < column.field.classes)
                good = good | (x == self._ignore) if column.field.shape else good
                column.check(good, rows, f"a label out of [0, {column.field.classes})")
        return parts[0], parts[1]

    def watch(self, task: TaskConfig) -> None:
        """Check at each fetch that the labels of a bce loss lie within 0 to 1."""
        for name, column in self._labels.items():
            self._labels[name] = replace(column, yes_or_no=task.term(name)[0] == "bce")

    def label(self, name: str, indices: np.ndarray) -> np.ndarray:
        """Return label ``name`` (k, ...) of the samples ``indices`` (k,) without reading their inputs."""
        rows = indices if self.rows is None else self.rows[indices]
        column = self._labels[name]
        return column.of(np.asarray(column.values[rows]), rows)

    def _fingerprint(self) -> str:
        """Hash shapes, types and evenly spaced rows, including the first and the last; takes milliseconds."""
        n, digest = len(self), hashlib.sha256()
        for name, column in self._inputs.items():
            values, named = column.values, "" if len(self._inputs) == 1 else f" {name}"
            text = f"{n} {column.field.shape} {np.dtype(values.dtype).str} {getattr(values, 'names', '')}{named}"
            digest.update(text.encode())
        if self.varying:
            digest.update(self.varying.lengths.tobytes())
        for columns, count in ((self._labels, 1024), (self._inputs, 64)):
            # Inputs may be mapped files, so fewer of their rows are read.
            picked = np.unique(np.linspace(0, n - 1, count).astype(np.int64))
            rows = picked if self.rows is None else self.rows[picked]
            for column in columns.values():
                values = np.ascontiguousarray(column.values[rows])
                digest.update(f"{values.dtype.str} {values.shape}".encode() + values.tobytes())
                if column.lookup:
                    digest.update(column.lookup.numbers.tobytes())
        return digest.hexdigest()[:16]

    def split(self, fraction: float) -> tuple[Arrays, Arrays]:
        """Hold out ``fraction`` of each class, independently of the seed; return (training, held out).

        If a sample has a label per position, or no label is a class, all samples count as one class.
        """
        return self._without(share_held_out(self._one_label(), fraction, self.where))

    def fold(self, part: int, parts: int) -> tuple[Arrays, Arrays]:
        """Hold out fold ``part`` of ``parts`` of each class; return (training, held out)."""
        return self._without(fold_held_out(self._one_label(), part, parts, self.where))

    def _one_label(self) -> np.ndarray:
        """Return the class of each sample (n,), or 0 for all."""
        if not self._labels:
            fix = "take --split all"
            raise DataError("without labels nothing is held out, so there is no such split", where=self.where, fix=fix)
        column = next(iter(self._labels.values()))
        one = not column.field.shape and column.field.classes is not None
        return np.asarray(column.values[:]).reshape(-1) if one else np.zeros(len(column.values), np.int64)

    def _without(self, held: np.ndarray) -> tuple[Arrays, Arrays]:
        return self._part(np.flatnonzero(~held)), self._part(np.flatnonzero(held))

    def _part(self, rows: np.ndarray) -> Arrays:
        part = copy.copy(self)
        part.varying = self.varying.part(rows) if self.varying else None
        part.rows, part.files = rows, [self.files[row] for row in rows.tolist()] if self.files else ()
        part.fingerprint = part._fingerprint()
        return part


def float64_arrays(part: Any, unnamed: str = "") -> dict[str, np.ndarray]:
    """Return the float64 arrays of a dict, or a single float64 array as ``unnamed``."""
    named = part if isinstance(part, Mapping) else {unnamed: part}
    return {name: x for name, x in named.items() if isinstance(x, np.ndarray) and x.dtype == np.float64}


def _described(columns: Iterable[Column]) -> list[str]:
    """Return the notes about dtypes, one line for all columns that share a note."""
    titles: dict[str, list[str]] = {}
    for column in columns:
        if column.note:
            titles.setdefault(column.note, []).append(column.title)
    return [f"{', '.join(said)} {note}" for note, said in titles.items()]


def _remark_on_rounding(column: Column, whole: bool = False) -> str:
    """Return a remark if float32 rounds values of a few samples; ``whole``: integers become float32, too."""
    kind = np.dtype(column.values.dtype)
    if kind != np.float64 and not (whole and kind.kind in "iu" and kind.itemsize > 2):  # avoids reading them
        return ""
    few = np.unique(np.linspace(0, len(column.values) - 1, FEW).astype(np.int64))
    return column.remark_on_rounding(np.asarray(column.values[few]))


def _check_lengths(inputs: Sequence[tuple[str, Any]], labels: Sequence[tuple[str, Any]], where: str) -> None:
    """Check that all inputs and labels, (title, array) each, have the same number of samples, above 0."""
    first, like = (*labels, *inputs)[0]
    for title, values in (*inputs, *labels):
        if not values.shape or not like.shape or len(values) != len(like):
            what = f"{title} {values.shape} and {first} {like.shape} differ in length"
            raise DataError(what, where=where, fix="give one label per input")
    if len(like) == 0:
        raise DataError("the data set is empty", where=where)


def _varying(inputs: Mapping[str, Any], labels: Mapping[str, Any], titles: Mapping[str, str], where: str) -> Any:
    """Return the fields whose samples differ in length, or None."""
    names, label_names = ([n for n, x in part.items() if isinstance(x, RaggedRows)] for part in (inputs, labels))
    if not names:
        if label_names:
            what = f"{titles[label_names[0]]} have different lengths, but the inputs do not"
            raise DataError(what, where=where, fix="give the inputs as a list of arrays, too")
        return None
    first = inputs[names[0]].lengths
    for name, x in [(n, inputs[n]) for n in names[1:]] + [(n, labels[n]) for n in label_names]:
        if not np.array_equal(x.lengths, first):
            bad = int(np.argmax(x.lengths != first))
            has = [f"{n[bad]:,} positions in {titles[key]}" for n, key in ((first, names[0]), (x.lengths, name))]
            raise DataError(f"sample {bad} has {' and '.join(has)}", where=where, fix="give them the same length")
    return Varying(first, tuple(names), tuple(label_names))


def _input_column(
    title: str,
    values: Any,
    label_shapes: set[tuple[int, ...]],
    before: Field | None,
    alone: bool,
    where: str,
    images: bool | None,
) -> tuple[Column, Sequence[str]]:
    """Make the column of an input, and a remark if the trained run decides whether it is an image.

    ``before``: its field in the run whose checkpoint is used; ``alone``: it is the only input and has no name.
    """
    shape = tuple(values.shape[1:])
    images = False if isinstance(values, RaggedRows) else images
    ids = len(shape) == 1 and shape in label_shapes and shape != (1,)
    as_images = images
    if before is not None and images is None:  # interpret arrays as in the training
        ids = ids if before.dtype != "uint8" else before.divisor == 1
        as_images = before.image
    column = Column.of_inputs(title, values, ids, alone, where, as_images)
    by_itself = is_image(shape, np.dtype(values.dtype), alone, None)
    if images is None and as_images not in (None, by_itself) and len(shape) in (2, 3):
        return column, [f"{title} {shape} are {'' if as_images else 'not '}images, as when the run was trained"]
    return column, []


def _with_columns(columns: Mapping[str, Column], names: Columns) -> dict[str, Field]:
    """Return the fields of the columns, with the column ``names`` of their last axis."""
    fields = {name: column.field for name, column in columns.items()}
    each = names if isinstance(names, Mapping) else dict.fromkeys(fields, names)
    return {name: replace(field, columns=tuple(each[name])) if each[name] else field for name, field in fields.items()}
