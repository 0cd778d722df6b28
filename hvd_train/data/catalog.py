"""Open a data set by name, split it into parts, check it, and pack it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hvd_train.config import DataConfig, TaskConfig, did_you_mean
from hvd_train.data import packing
from hvd_train.data.balanced import Balanced
from hvd_train.data.classes import Known
from hvd_train.data.combined import Concatenated, InputsAsLabels, joined_samples
from hvd_train.data.dataset import NEW_RUN, DataRequest, DataSet, Parts, Whole, known
from hvd_train.data.fitted import as_run, of_one_type, on_normalization
from hvd_train.data.kinds import KINDS
from hvd_train.data.lengths import Lengths, buckets_of
from hvd_train.data.number_labels import check_values
from hvd_train.data.packed_manifest import PackManifest
from hvd_train.data.transforms import transformed
from hvd_train.data.user_data import imported, user_parts
from hvd_train.errors import DataError, listing
from hvd_train.protocol import Source

WITHOUT_PATH = ("digits", "diabetes", "synthetic")  # kinds that read no file of the user
RESIZED = ("digits", "idx", "imagefolder", "webdataset")  # kinds that image_size resizes
TASK = TaskConfig()
TITLES = {"train": "training", "val": "validation"}


def catalog() -> dict[str, str]:
    """Return {data.name: one line of help}."""
    return {name: (kind.__doc__ or "").strip() for name, kind in KINDS.items()}


def open_data(
    config: DataConfig,
    task: TaskConfig = TASK,
    user_data: Any = None,
    request: DataRequest = NEW_RUN,
) -> DataSet:
    """Open and check a data set; a DataError names the file or key, and a fix.

    ``user_data``: (train, val) from the user, or a function that returns it, used instead of ``data.name``.
    """
    if user_data is None and request.run is None:
        check_path(config)
    if config.image_size and (user_data is not None or ":" in config.name):
        fix = f"resize images in your data function; the key is for {', '.join(RESIZED)}"
        raise DataError("data of your own are not resized", where="data.image_size", fix=fix)
    if user_data is not None or ":" in config.name:
        opened = user_parts(config, task, request, user_data)
    elif config.name in KINDS:
        if config.image_size and config.name not in RESIZED:
            fix = f"leave it out; it is for {', '.join(RESIZED)}"
            raise DataError(f"data set '{config.name}' is not resized", where="data.image_size", fix=fix)
        opened = KINDS[config.name](config, task, request)
    else:
        names = (*KINDS, "your own 'package.module:function'")
        raise DataError(did_you_mean(config.name, names), where="data.name")
    first = opened.samples if isinstance(opened, Whole) else next(iter(opened.values()))
    vocabulary = getattr(first, "vocabulary", "")
    _check_vocabulary(config, vocabulary, request.vocabulary)
    parts = _divided(opened, request, config)
    where = config.path or f"data.name: {config.name}"
    if request.run:
        looked_at = request.labels and config.target == "labels"
        run = known(config, request).named_run(request.run)
        if config.lengths and config.lengths.mask:  # it is added below
            run = replace(run, inputs={name: x for name, x in run.inputs.items() if name != config.lengths.mask})
        parts = {name: as_run(part, run, looked_at, where, task.ignore_index) for name, part in parts.items()}
    else:
        _check_names(parts, config)
        _check_several_classes(parts, config, task)
    if config.target == "labels" and request.labels:
        check_values(parts, task, where)
    chosen = None
    if config.sampling and request.split is None:
        parts["train"] = balanced = Balanced(parts["train"], task.ignore_index)
        chosen = balanced.chosen
    if config.transforms:
        parts = transformed(parts, config.transforms, imported, task if config.target == "labels" else None)
    if request.run:
        first = next(iter(parts.values()))
        first.remarks = (*getattr(first, "remarks", ()), *on_normalization(request.run, first.sample))  # type: ignore
    if config.target == "inputs":
        parts = {name: InputsAsLabels(part) for name, part in parts.items()}
        if request.labels:
            check_values(parts, task, where, of_inputs=True)
    if config.lengths:
        parts = _with_lengths(parts, config, chosen)
    return DataSet(config.name, parts, vocabulary, getattr(first, "fitted", None))


def check_path(config: DataConfig) -> None:
    """Refuse a path that this kind of data ignores: the user would get other samples than expected."""
    if config.path is not None and (config.name in WITHOUT_PATH or ":" in config.name):
        fix = "a function gets data.options" if ":" in config.name else "set what reads it, such as data.name: table"
        what = f"data set '{config.name}' reads no path"
        raise DataError(what, where=f"data.path: {config.path}", fix=f"{fix}; or leave it out")


def _check_vocabulary(config: DataConfig, vocabulary: str, of_run: str) -> None:
    """Raise DataError if the text's token ids differ from the run's. A vocabulary is "" if there is none to compare."""
    if vocabulary and of_run and json.loads(vocabulary) != json.loads(of_run):
        what = "the text is numbered by another vocabulary than the run's, with other token ids"
        if config.name == "packed":
            fix = "pack the text with data.vocabulary: vocabulary.json of the run folder"
            raise DataError(what, where=config.path or "data", fix=fix)
        raise DataError(what, where=f"data.vocabulary: {config.vocabulary}", fix="leave it out: the run has its own")


def _with_lengths(parts: Mapping[str, Source], config: DataConfig, chosen: Any) -> dict[str, Source]:
    """Wrap the parts in ``Lengths``, which pads to buckets; ``chosen``: positions of an epoch -> sample indices."""
    lengths = config.lengths
    assert lengths is not None
    made: dict[str, Source] = {}
    for name, part in parts.items():
        fields = getattr(part, "varying", None)
        if fields is None:
            fix = "give inputs as a list of arrays, one a sample; or leave data.lengths out"
            raise DataError(f"{TITLES.get(name, name)} samples do not differ in length", where="data.lengths", fix=fix)
        # Only training uses buckets.
        of_training = name == "train"
        buckets = buckets_of(fields.lengths, lengths) if of_training else np.zeros(0, np.int64)
        one = Lengths(part, fields, lengths, buckets, chosen if of_training else None)
        one.add_note(one.describe() if of_training else "")
        made[name] = one
    return made


def _divided(parts: Parts, request: DataRequest, config: DataConfig) -> dict[str, Source]:
    """Return the requested parts, with the same fields; if the data are one whole, hold out a validation part."""
    where = config.path or f"data.name: {config.name}"
    if isinstance(parts, Whole):
        tests: dict[str, Source] = {"test": parts.test} if parts.test else {}
        if request.split == "all":
            parts = {"train": parts.samples, **tests}
        else:
            train, val = parts.samples.fold(*config.fold) if config.fold else parts.samples.split(parts.fraction)
            parts = {"train": train, "val": val, **tests}
    elif config.fold and request.split != "all":
        fix = "leave it out, or give one file or folder without a validation part"
        raise DataError("the data have a validation part of their own", where="data.fold", fix=fix)
    parts, names = of_one_type(parts), list(parts)
    for name in names[1:]:
        _check_same_fields(parts, names[0], name, where)
    if request.split == "all":
        return {"all": next(iter(parts.values())) if len(parts) == 1 else Concatenated(list(parts.values()))}
    if request.split and request.split not in parts:
        raise DataError(f"there is no part '{request.split}'", where=where, fix=f"there are {', '.join(names)} and all")
    return parts


def _check_names(parts: Mapping[str, Source], config: DataConfig) -> None:
    """Check that the labels got the names of ``data.classes``: some kinds of data ignore that key."""
    labels = joined_samples(parts.values()).labels
    if config.classes == "auto" and labels and not any(field.names or field.classes for field in labels.values()):
        what = "auto numbers classes, but these labels are not classes (with task.loss: cross_entropy they are)"
        raise DataError(what, where="data.classes", fix="leave it out")
    for name, field in labels.items():
        names = Known.of(config).label(name, len(labels) == 1).names
        if names is not None and field.names != names:
            has = f"the data have {listing(field.names)}" if field.names else "labels of these data have no names"
            fix = "set it when packing" if config.name == "packed" else "leave it out"
            raise DataError(f"the classes are {listing(names)}, and {has}", where="data.classes", fix=fix)


def _check_several_classes(parts: Mapping[str, Source], config: DataConfig, task: TaskConfig) -> None:
    """Refuse labels of a single class: the cross-entropy would be 0 and the accuracy 1 from the first step on."""
    labels = joined_samples(parts.values()).labels
    losses = {output: loss for output, (loss, _) in task.terms.items()}
    for name, field in labels.items():
        alone = field.classes == 1 and losses.get(name, losses.get("")) == "cross_entropy"
        if alone and config.target == "labels":
            what = f"all samples are of one class{''.join(f', {one}' for one in field.names)}"
            folders = "give a folder that holds one folder for each class"
            fix = folders if config.name == "imagefolder" else "give labels of two classes or more"
            raise DataError(what, where=config.path or f"data.name: {config.name}", fix=fix)


def _check_same_fields(parts: Mapping[str, Source], first: str, second: str, where: str) -> None:
    """Check that two parts have the same fields; other classes may occur in them, and one may leave columns unnamed."""
    titles = [TITLES.get(name, name) for name in (first, second)]
    for kind in ("inputs", "labels"):
        fields = [getattr(parts[part].sample, kind) for part in (first, second)]
        bare = [
            {name: replace(field, classes=None, names=(), masked=False, columns=()) for name, field in part.items()}
            for part in fields
        ]
        if bare[0] != bare[1]:
            described = (", ".join(f"{name} {field}" for name, field in part.items()) or "none" for part in fields)
            each = (f"of the {title} samples {one}" for title, one in zip(titles, described, strict=True))
            fix = "give both the same names, shapes and types"
            raise DataError(f"the {kind} differ: {', '.join(each)}", where=where, fix=fix)
        for name, field in fields[0].items():
            columns = [field.columns, fields[1][name].columns]
            if all(columns) and columns[0] != columns[1]:
                each = (f"of the {title} samples {listing(one)}" for title, one in zip(titles, columns, strict=True))
                what = f"the columns of {name} differ: {', '.join(each)}"
                raise DataError(what, where=where, fix="give both the same columns in the same order")


def pack(config: DataConfig, task: TaskConfig, folder: Path, world: packing.Processes) -> PackManifest:
    """Pack a data set of any kind into ``folder``, with all ranks of ``world``.

    Transforms are not packed: they are applied when the data are read, with other random numbers in each epoch.
    """
    if config.lengths:
        fix = "leave data.lengths out, with samples of one length; or train on the data as they are"
        raise DataError("samples of different lengths are not packed", where="data.lengths", fix=fix)
    stored = config.model_copy(update={"transforms": [], "target": "labels"})
    data = open_data(stored, task, request=DataRequest(test=True))
    if any(getattr(part, "ordered", False) for part in (data.train, data.val)):
        what = "a stream is read in its own order, which packed data do not keep"
        raise DataError(what, where=f"data.name: {config.name}", fix="give it as it is, or pack what it reads")
    items = getattr(data.train, "items", None)
    if items is not None and (items.random or items.weights is not None):
        what = "training samples are random" if items.random else "the DataLoader's sampler has weights"
        fix = "train on the data as they are; or let random changes be data.transforms"
        raise DataError(f"{what}, which packed data do not keep", where=f"data.name: {config.name}", fix=fix)
    origin = f"{config.name} {config.path or ''}".strip()
    return packing.pack(data.train, data.val, data.parts.get("test"), origin, task, folder, world)
