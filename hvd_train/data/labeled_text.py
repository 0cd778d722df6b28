"""Labeled texts, tokenized when they are opened."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hvd_train.config import DataConfig, TaskConfig
from hvd_train.config.keys.lengths import LengthsConfig
from hvd_train.data import tables
from hvd_train.data.arrays import Arrays
from hvd_train.data.classes import Known
from hvd_train.data.column import LABEL
from hvd_train.data.dataset import DataRequest, Parts, Whole, existing_path, known
from hvd_train.data.masked import CLS, SPECIAL, size_of, tokenizer_of, vocabulary
from hvd_train.data.ragged import joined_rows
from hvd_train.errors import DataError, listing, noun_and_names

TOKENS = "tokens"  # the name of the input


def open_labeled_text(config: DataConfig, task: TaskConfig, request: DataRequest) -> Parts:
    """texts with a class: a .csv, .tsv, .jsonl or .parquet file, or a folder of train.*, val.*; features, labels"""
    path = existing_path(config)
    files = tables.find_all(path) if path.is_dir() else {"train": path}
    column, label, remarks = _columns(config, files["train"], request)
    classes, parts, tokenizer = known(config, request), dict[str, Arrays](), None
    for part, file in files.items():
        if part == "test" and not request.reads_test:
            continue
        table = tables.Table.read(file, [column] + [label] * request.labels)
        texts = table.texts(column)
        if tokenizer is None:  # of the first part, which is the training's
            tokenizer = _tokenizer(texts, config, request)
        lines = [*([] if parts else remarks), *filter(None, [table.joined])]
        parts[part] = _part(table, texts, column, tokenizer, label, classes, config, task, request, lines)
        classes = classes.after(parts["train"])
    return {**parts} if "val" in parts else Whole(parts["train"], config.val_fraction)


def _columns(config: DataConfig, file: Path, request: DataRequest) -> tuple[str, str, list[str]]:
    """Return the names of the text column and the label column, and remarks for the user.

    For a trained run the text column is the one of the training, unless data.features names another.
    """
    have = tables.names_of(file, every_line=False)
    if not isinstance(config.labels, str):
        fix = "name the column of the classes"
        raise DataError("texts need one column of labels", where="data.labels", fix=fix)
    others = [name for name in have if name != config.labels]
    of_run = _column_of_run(request)
    if of_run and config.features in (None, [of_run]) and of_run not in have:
        what = f"column {of_run} missing, with which the run was trained"
        raise DataError(what, where=str(file), fix=f"there are {listing(have)}; data.features: [NAME] takes another")
    features = config.features or ([of_run] if of_run else others)
    if len(features) != 1:
        what = f"{len(features)} columns for one text: {', '.join(features[:10])}"
        raise DataError(what, where="data.features", fix="name the column of the text: features: [text]")
    for key, name in (("features", features[0]), ("labels", config.labels)):
        if name not in have and (key == "features" or request.labels):
            raise DataError(f"no column '{name}'", where=f"{file}, data.{key}", fix=f"there are {', '.join(have)}")
    remarks = []
    if request.run and features[0] != of_run:
        its = f"{of_run}, its name in the run" if of_run else "the text: the run has no name for its column"
        remarks.append(f"column {features[0]} is used as {its}")
    if of_run and not config.features and len(others) > 1:
        extra = noun_and_names("column", [name for name in others if name != of_run])
        remarks.append(f"{extra} {'is' if len(others) == 2 else 'are'} left out: the run was trained without")
    return features[0], config.labels, remarks


def _column_of_run(request: DataRequest) -> str:
    """Return the name of the text column in the run, or "" if there is no run or it has no name."""
    field = request.run.inputs.get(TOKENS) if request.run else None
    return (field.columns or ("",))[0] if field else ""


def _tokenizer(texts: list[str], config: DataConfig, request: DataRequest) -> Any:
    """Return a tokenizer from a file or from the run, or train one on the texts of the training file."""
    if config.vocabulary is not None:
        return tokenizer_of(config.vocabulary)
    from tokenizers.processors import TemplateProcessing

    tokenizer = vocabulary([texts], config.vocabulary_size, None, request.vocabulary)
    first = SPECIAL[CLS]  # so that no text is empty
    tokenizer.post_processor = TemplateProcessing(single=f"{first} $A", special_tokens=[(first, CLS)])
    return tokenizer


def _part(
    table: tables.Table,
    texts: list[str],
    column: str,
    tokenizer: Any,
    label: str,
    classes: Known,
    config: DataConfig,
    task: TaskConfig,
    request: DataRequest,
    remarks: list[str],
) -> Arrays:
    where, lengths = str(table.path), config.lengths
    assert lengths is not None  # the configuration wants it
    numbers = _numbered(texts, tokenizer, lengths)
    sizes = np.array([len(one) for one in numbers], np.int64)
    rows = joined_rows(np.concatenate(numbers), sizes, f"column '{column}'", where, lengths)
    labels = {LABEL: table.labels(label, LABEL, True, classes, task)} if request.labels else {}
    part = Arrays({TOKENS: rows}, labels, where, classes, task, table.notes, False, remarks)
    part.note = "\n".join(table.notes)  # without the note on integers, which is obvious for tokens
    columns = (_column_of_run(request) or column,)
    field = replace(part.sample.inputs[TOKENS], classes=size_of(tokenizer), columns=columns)
    part.sample = replace(part.sample, inputs={TOKENS: field})
    part.vocabulary = tokenizer.to_str()
    return part


def _numbered(texts: list[str], tokenizer: Any, lengths: LengthsConfig) -> list[np.ndarray]:
    """Tokenize each text to ids (length,) int32; long texts are truncated so that special tokens still fit."""
    if lengths.truncate:
        marks = tokenizer.num_special_tokens_to_add(False)
        if lengths.max_length <= marks:  # the library would not truncate
            what = f"{lengths.max_length} tokens, but the tokenizer adds {marks} to each text"
            raise DataError(what, where="data.lengths.max_length", fix=f"raise it above {marks}")
        tokenizer.enable_truncation(lengths.max_length)
    numbers = [np.array(one.ids, np.int32) for one in tokenizer.encode_batch(texts)]
    tokenizer.no_truncation()  # truncation is not saved
    return numbers
