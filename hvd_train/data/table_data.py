"""Open a table as a data set: choose the columns of inputs and labels, and convert them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvd_train.config import DataConfig, TaskConfig, did_you_mean
from hvd_train.data import tables
from hvd_train.data.arrays import Arrays
from hvd_train.data.classes import Known
from hvd_train.data.column import LABEL, is_uint64
from hvd_train.data.dataset import DataRequest, Parts, Whole, existing_path, known
from hvd_train.data.preparation import Facts, Preparation, prepares
from hvd_train.data.ragged import joined_rows
from hvd_train.errors import DataError, listing, noun_and_names
from hvd_train.protocol import Sample

INDEX = re.compile(r"|Unnamed: \d+(\.\d+)*|__index_level_\d+__")  # names that pandas gives to a column of row numbers
MANY = 10  # rows; with fewer, a column may look like row numbers by chance


def open_table(config: DataConfig, task: TaskConfig, request: DataRequest) -> Parts:
    """a .csv, .tsv, .jsonl or .parquet file (split by val_fraction), or a folder of train.*, val.*, test.*; labels"""
    path = existing_path(config)
    files = tables.find_all(path) if path.is_dir() else {"train": path}
    labels = [config.labels] if isinstance(config.labels, str) else config.labels or []
    if not labels and request.labels:
        fix = "name the column to learn"
        raise DataError("a table needs labels", where="data.labels", fix=fix)
    # Without a policy for gaps each line needs all keys, and the first one tells which they are.
    have = tables.names_of(files["train"], every_line=prepares(config) or bool(config.features))
    features, remarks = _features(have, labels, config, request.run)
    labels = labels if request.labels else []
    fitted = config.fitted
    columns = [*features, *labels]
    twice = sorted(name for name, count in Counter(columns).items() if count > 1)
    if twice or not features:
        what = f"{', '.join(twice)} named twice" if twice else "no column is left for the features"
        raise DataError(what, where="data.features, data.labels", fix="a column is a feature or a label")
    parts: dict[str, Arrays] = {}
    classes = known(config, request)
    for part, file in files.items():
        if part == "test" and not request.reads_test:
            continue
        _check_columns(file, features, labels, request.run)
        table = tables.Table.read(file, columns, features if prepares(config) else ())
        if table.late and not parts and not config.features and not request.run and not prepares(config):
            remarks.append(f"{noun_and_names('key', table.late)} of {file} left out, as its first line lacks them")
        listed = [name for name in columns if table.is_list(name)]
        of_part = _of_lists if listed else _of_table
        if listed and prepares(config):
            what = f"column '{listed[0]}' holds lists, and data.categories, missing, scale and dates take none"
            raise DataError(what, where=str(file), fix="leave them out, or leave the column out by data.features")
        lines = [*([] if parts else remarks), *filter(None, [table.joined])]
        if prepares(config):
            made = _prepared(table, features, labels, classes, config, task, lines, fitted, len(files) == 1)
            fitted = made.fitted
            parts[part] = made
        else:
            parts[part] = of_part(table, features, labels, classes, config, task, lines)
        classes = classes.after(parts["train"])
    return {**parts} if "val" in parts else Whole(parts["train"], config.val_fraction)


def _features(
    have: Sequence[str], labels: Sequence[str], config: DataConfig, run: Sample | None
) -> tuple[list[str], list[str]]:
    """Return the names of the input columns, in the order of the trained run if any, and remarks."""
    learned = set(labels)
    others = [name for name in have if name not in learned]
    if config.fitted:  # the inputs of its run have other columns, which were made of these
        names = [facts["column"] for facts in config.fitted]
        if config.features and set(config.features) != set(names):
            what = f"data.features are {listing(config.features)}, and data.fitted has {listing(names)}"
            raise DataError(what, where="data.features", fix="leave it out")
        return names, [] if config.features else _left_out([name for name in others if name not in names])
    if run is None:
        return (config.features, []) if config.features else _without_index(others)
    columns = next(iter(run.inputs.values())).columns
    if not columns and config.lengths:  # each input is named like its column
        columns = tuple(name for name in run.inputs if name != config.lengths.mask)
        if len(columns) == 1 and columns[0] not in others:  # its name may differ in other data
            return config.features or others, []
    if not columns:
        names = config.features or others
        return names, [f"the run has no column names: columns are used in this order: {listing(names)}"]
    if config.features and set(config.features) != set(columns):
        what = f"data.features are {listing(config.features)}, and the run was trained with {listing(columns)}"
        raise DataError(what, where="data.features", fix="leave it out: the run knows its columns")
    return list(columns), [] if config.features else _left_out([name for name in others if name not in columns])


def _left_out(names: Sequence[str]) -> list[str]:
    verb = "is" if len(names) == 1 else "are"
    return [f"{noun_and_names('column', names)} {verb} left out: the run was trained without"] * bool(names)


def _without_index(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Leave out the column of row numbers that pandas writes; return the others, and remarks."""
    # In a file sorted by label, row numbers alone would predict the label.
    index = [name for name in names if INDEX.fullmatch(name)]
    kept = [name for name in names if name not in index]
    if not index or not kept:
        return list(names), []
    verb = "is" if len(index) == 1 else "are"
    columns = noun_and_names("column", [repr(name) for name in index])
    what = f"{columns} {verb} left out, as pandas names row numbers like this"
    return kept, [f"{what} (data.features takes columns by name)"]


def _remarks_on_counters(table: tables.Table, inputs: np.ndarray, features: Sequence[str]) -> list[str]:
    """Return a remark for each column that counts the rows of the file."""
    if len(inputs) < MANY:
        return []
    counters = [name for name, x in zip(features, inputs.T, strict=True) if (np.diff(x) == 1).all()]
    return [
        f"column '{name}' of {table.path} counts the rows: if it is a row number and not a measurement, leave it "
        "out by data.features"
        for name in counters
    ]


def _check_columns(file: Path, features: Sequence[str], labels: Sequence[str], run: Sample | None) -> None:
    """Check that a file has all columns of features and labels."""
    have = tables.names_of(file, every_line=False)
    if not {*features, *labels} <= {*have}:  # reading all lines takes longer
        have = tables.names_of(file)
    there = set(have)
    missing = [name for name in features if name not in there]
    if missing and run and next(iter(run.inputs.values())).columns:
        what = f"{noun_and_names('column', missing)} missing, with which the run was trained"
        raise DataError(what, where=str(file), fix=f"the file has {listing(have)}; give all of the run's columns")
    for key, names in (("features", features), ("labels", labels)):
        for name in names:
            if name not in there:
                if len(have) == 1 and (other := next((one for one in ";|\t" if one in have[0]), "")):
                    what = f"its cells are separated by {other!r}, and it is read as one column"
                    raise DataError(what, where=str(file), fix="separate them by commas, or by tabs in a .tsv file")
                raise DataError(f"no column: {did_you_mean(name, have)}", where=f"{file}, data.{key}")


def _of_table(
    table: tables.Table,
    features: list[str],
    labels: list[str],
    classes: Known,
    config: DataConfig,
    task: TaskConfig,
    remarks: Sequence[str],
) -> Arrays:
    """Make a source from a table: inputs (n, features), labels as ``_labels`` returns them."""
    inputs = np.stack([table.numbers(name) for name in features], axis=1)
    if not config.features and not classes.run:
        remarks = [*remarks, *_remarks_on_counters(table, inputs, features)]
    columns, names = _labels(table, labels, classes, task)
    return Arrays(inputs, columns, str(table.path), classes, task, table.notes, None, remarks, (features, names))


def _labels(table: tables.Table, labels: list[str], classes: Known, task: TaskConfig) -> tuple[Any, Sequence[str]]:
    """Return labels (n,) or (n, labels), or {name: (n,)}, and the names of their columns."""
    if task.loss == "cross_entropy" and len(labels) > 1:
        fix = "name one column, or a loss for each: task.loss: {COLUMN: cross_entropy, ...}"
        raise DataError(f"{len(labels)} columns for one cross_entropy", where="data.labels", fix=fix)
    columns = {name: table.labels(name, name, len(labels) == 1, classes, task) for name in labels}
    if isinstance(task.loss, dict) or not labels:
        return columns, ()
    if len(labels) == 1:
        return columns[labels[0]], ()
    return np.stack([*map(np.asarray, columns.values())], axis=1), labels


def _prepared(
    table: tables.Table,
    features: list[str],
    labels: list[str],
    classes: Known,
    config: DataConfig,
    task: TaskConfig,
    remarks: Sequence[str],
    fitted: Facts | None,
    divided: bool,
) -> Arrays:
    """Make a source whose inputs are prepared; ``divided``: the file holds training and validation samples."""
    preparation = Preparation(table, features, config, fitted)
    columns, names = _labels(table, labels, classes, task)
    rows = np.arange(len(table.columns[features[0]]))  # of the training samples
    if not fitted:
        if classes.run:
            what = "the run was trained without data.categories, missing, scale and dates"
            raise DataError(what, where=str(table.path), fix="leave them out; fill empty cells, or leave the rows out")
        if divided:  # labels decide which samples are held out
            whole = Arrays(rows, columns, str(table.path), classes, task)
            train, _ = whole.fold(*config.fold) if config.fold else whole.split(config.val_fraction)
            rows = np.asarray(train.rows)
        fitted = preparation.fit(rows)
    elif config.fitted and not classes.run:
        what = "data.fitted is given, and nothing is computed from these training samples (leave it out to do so)"
        remarks = [*remarks, what]
    inputs, input_names, told = preparation.inputs()
    lines = [*remarks, *told]
    if not config.features and not classes.run and not isinstance(inputs, dict):
        lines += _remarks_on_counters(table, inputs, input_names)
    source = Arrays(inputs, columns, str(table.path), classes, task, table.notes, False, lines, (input_names, names))
    source.fitted = fitted
    return source


def _of_lists(
    table: tables.Table,
    features: list[str],
    labels: list[str],
    classes: Known,
    config: DataConfig,
    task: TaskConfig,
    remarks: Sequence[str],
) -> Arrays:
    """Make a source from a table with lists: each feature is an input of its own, and lists vary in length."""
    where, lengths = str(table.path), config.lengths
    listed = [name for name in (*features, *labels) if table.is_list(name)]
    if lengths is None:
        fix = "set data.lengths, for example {max_length: 200}"
        raise DataError(f"{noun_and_names('column', listed)} of lists", where=where, fix=fix)
    if len(labels) > 1:
        raise DataError("several labels of a table with lists", where="data.labels", fix="name one column")
    inputs, columns = dict[str, Any](), dict[str, Any]()
    for name in features:
        if name not in listed:
            inputs[name] = table.numbers(name)
            continue
        flat, sizes = table.lists(name)
        before = classes.run or classes.train
        # Numbers with a fraction may be whole in some files.
        if before and name in before.inputs and not before.inputs[name].whole:
            flat = flat.astype(np.float64)
        # uint64 is kept: values too large for int64 are refused when samples are fetched.
        kept = flat if flat.dtype.kind == "f" or is_uint64(flat.dtype) else flat.astype(np.int64)
        inputs[name] = joined_rows(kept, sizes, f"column '{name}'", where, lengths)
    for name in labels:
        if name in listed:
            flat, sizes = table.lists(name, whole=task.classes(name, True))
            columns[LABEL] = joined_rows(flat, sizes, f"column '{name}'", where, lengths, task.ignore_index)
        else:
            columns[LABEL] = table.labels(name, name, True, classes, task)
    return Arrays(inputs, columns, where, classes, task, table.notes, False, remarks)
