"""The built-in kinds of data (``data.name``): each function opens the parts of one.

The first line of each docstring is what ``hvd-train data`` lists.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hvd_train.config import DataConfig, TaskConfig
from hvd_train.data import formats, images, masked, packed
from hvd_train.data.arrays import Arrays
from hvd_train.data.classes import Words
from hvd_train.data.column import LABEL, is_class
from hvd_train.data.dataset import DataRequest, Parts, Whole, class_task, existing_folder, existing_path, known
from hvd_train.data.image_data import open_imagefolder, open_webdataset
from hvd_train.data.labeled_text import open_labeled_text
from hvd_train.data.number_labels import check_order
from hvd_train.data.synthetic import Synthetic
from hvd_train.data.table_data import open_table
from hvd_train.data.text import Text
from hvd_train.errors import DataError, listing
from hvd_train.protocol import Source


def _digits(config: DataConfig, task: TaskConfig, request: DataRequest) -> Parts:
    """handwritten digits, 1 797 images of 8 x 8 (built in; image_size resizes)"""
    images, labels = formats.read_digits()
    images = (images / 16).astype(np.float32)
    if config.image_size:
        images = formats.resize(images, config.image_size)
    classes, counted = known(config, request, 10), class_task(task)
    return Whole(Arrays(images, labels, "digits", classes, counted, images=True), 0.2)


def _diabetes(config: DataConfig, task: TaskConfig, request: DataRequest) -> Parts:
    """442 patients, 10 standardized measurements, one number to predict: for regression (built in)"""
    measures, progress = formats.read_diabetes()
    measures = (measures - measures.mean(0)) / measures.std(0)
    return Whole(Arrays(measures.astype(np.float32), progress.astype(np.float32), "diabetes", None, task), 0.2)


def _idx(config: DataConfig, task: TaskConfig, request: DataRequest) -> Parts:
    """MNIST format: path holds train-images-idx3-ubyte, ... and t10k-..., plain or .gz"""
    folder, parts, classes = existing_folder(config), [], known(config, request)
    for part in ("train", "t10k"):
        files = [formats.find_idx(folder, f"{part}-{kind}", axes) for kind, axes in (("images", 3), ("labels", 1))]
        images, labels = formats.read_idx(files[0], 3), formats.read_idx(files[1], 1)
        if len(images) != len(labels):
            raise DataError(f"{len(images)} images in {files[0].name}, {len(labels)} labels", where=str(files[1]))
        if config.image_size and images.shape[1:] != (config.image_size, config.image_size):
            images = formats.resize(images, config.image_size)
        parts.append(Arrays(images, labels, str(files[0]), classes, class_task(task), images=True))
        classes = classes.after(parts[0])
    return {"train": parts[0], "val": parts[1]}


ARRAY_NAMES = ("train_x", "train_y", "val_x", "val_y", "x", "y", "test_x", "test_y")


def _named_arrays(
    config: DataConfig, task: TaskConfig, request: DataRequest, read: Callable[[Path, formats.Choose], dict[str, Any]]
) -> Parts:
    path = existing_path(config)
    part, classes = partial(Arrays, task=task, images=config.images), known(config, request)
    names: dict[str, str] = {}  # {train_x: its name in the file}
    left: list[str] = []

    def choose(listed: list[str]) -> list[str]:
        names.update(_array_names(listed, path))
        left.extend(one for one in listed if one not in names.values())
        wanted = [name for name in names if request.reads_test or not name.startswith("test")]
        return [names[name] for name in wanted if request.labels or name.endswith("x")]

    read_arrays = read(path, choose)
    arrays = {name: read_arrays[names[name]] for name in ARRAY_NAMES if names.get(name) in read_arrays}
    if not request.labels and arrays:
        return {name[:-2] or "all": part(x, {}, f"{path}: {name[:-2]}", classes) for name, x in arrays.items()}
    core, tests = ([name for name in arrays if name.startswith("test") == is_test] for is_test in (False, True))
    if len(tests) != 1 and core in [[*ARRAY_NAMES[:4]], [*ARRAY_NAMES[:2]], [*ARRAY_NAMES[4:6]]]:
        where = f"{path}: train" if len(core) == 4 else str(path)
        train = part(arrays[core[0]], arrays[core[1]], where, classes)
        if left:
            train.remarks += (f"{path}: not read: {listing(left)}",)
        others = {
            name: part(arrays[f"{name}_x"], arrays[f"{name}_y"], f"{path}: {name}", classes.after(train))
            for name in ("val", "test")
            if f"{name}_x" in arrays
        }
        return {"train": train, **others} if "val" in others else Whole(train, config.val_fraction, others.get("test"))
    what = f"the data have {', '.join(names[name] for name in arrays) or 'none of the arrays'}"
    raise DataError(what, where=str(path), fix="it needs train_x, train_y, val_x, val_y; or x, y")


def _array_names(listed: list[str], path: Path) -> dict[str, str]:
    """Return {name such as train_x, val_y, x or y: its name in the file}."""
    names: dict[str, str] = {name: name for name in listed if name in ("x", "y")}
    others = []
    for stored in listed:
        stem, _, kind = stored.rpartition("_")
        part = images.part_of(stem) if kind in ("x", "y") else None
        if part and names.setdefault(name := f"{part}_{kind}", stored) != stored:
            raise DataError(f"{names[name]} and {stored} are the same part, {part}", where=str(path), fix="keep one")
        others += [stored] * (part is None and bool(stem) and kind in ("x", "y"))
    if others and "train_x" in names and "val_x" not in names:
        what = f"{', '.join(others)} beside {names['train_x']}: arrays whose part is not known"
        known_names = ", ".join(f"{name}_x" for name in images.PART_NAMES["val"])
        fix = f"call those of a validation part one of {known_names}, or leave them out"
        raise DataError(what, where=str(path), fix=fix)
    return names


def _npz(config: DataConfig, task: TaskConfig, request: DataRequest) -> Parts:
    """one .npz file with train_x, train_y, val_x, val_y, test_x, test_y (or x, y: split by val_fraction)"""
    return _named_arrays(config, task, request, formats.read_npz)


def _npy(config: DataConfig, task: TaskConfig, request: DataRequest) -> Parts:
    """a folder of train_x.npy, train_y.npy, ... (memory-mapped: may be larger than memory)"""
    existing_folder(config)
    return _named_arrays(config, task, request, formats.read_npy_folder)


def _hdf5(config: DataConfig, task: TaskConfig, request: DataRequest) -> Parts:
    """one HDF5 file with datasets train_x, train_y, ... (read as needed)"""
    return _named_arrays(config, task, request, formats.read_hdf5)


def _cifar10(config: DataConfig, task: TaskConfig, request: DataRequest) -> Parts:
    """CIFAR-10's binary version: path holds data_batch_1.bin, ... and test_batch.bin"""
    folder = existing_folder(config)
    inner = folder / "cifar-10-batches-bin"
    parts: dict[str, Source] = {}
    for part, name in (("train", "data"), ("val", "test")):
        images, numbers = formats.read_cifar10(inner if inner.is_dir() else folder, name)
        labels = numbers if config.classes else Words(numbers, formats.CIFAR_CLASSES)
        if request.labels and config.target == "labels" and not config.classes:
            check_order(formats.CIFAR_CLASSES, task.term(LABEL)[0], str(folder))
        classes = known(config, request, 10)
        parts[part] = Arrays(images, labels, str(folder), classes, class_task(task), images=True)
    return parts


def _synthetic(config: DataConfig, task: TaskConfig, request: DataRequest) -> Parts:
    """num_samples random samples of input_shape, for timing; needs no memory"""
    n, classes = config.num_samples, config.num_classes or 10
    held = max(1, int(n * config.val_fraction))
    masked = is_class(task.ignore_index, classes)
    val = Synthetic(held, config.input_shape, classes, n, masked)
    return {"train": Synthetic(n, config.input_shape, classes, 0, masked), "val": val}


def _text(config: DataConfig, task: TaskConfig, request: DataRequest) -> Parts:
    """a file or a folder of .txt, .md, .py, .rst: predict the next byte; sequence_length; validated on the end"""
    path = existing_path(config)
    length, classes = config.sequence_length, config.num_classes or Text.CLASSES
    if classes != Text.CLASSES:
        fix = f"leave it out; text has {Text.CLASSES} classes, one per byte"
        raise DataError(f"{classes} classes are set", where="data.num_classes", fix=fix)
    data = formats.read_text(path)  # (bytes,) uint8
    count = (len(data) - 1) // length
    if count < 2:
        what = f"{len(data):,} bytes are too few for a training and a validation sample of {length}"
        raise DataError(what, where=str(path), fix=f"give at least {2 * length + 1:,}, or lower data.sequence_length")
    held = min(count - 1, max(1, round(count * config.val_fraction)))
    masked = is_class(task.ignore_index, Text.CLASSES)
    train, val = Text(data, length, 0, count - held, masked), Text(data, length, count - held, count, masked)
    return {"train": train, "val": val}


def _masked_text(config: DataConfig, task: TaskConfig, request: DataRequest) -> Parts:
    """text of path (default: Python's manual): pairs of sentences with masked words, for bert; sequence_length"""
    path, length = existing_path(config) if config.path else None, config.sequence_length
    if length < 8:
        fix = "three of these are [CLS], [SEP] and [SEP]"
        raise DataError(
            f"samples of {length} tokens are too short: 8 are the least", where="data.sequence_length", fix=fix
        )
    documents = [
        masked.sentences(text) for text in (formats.read_documents(path) if path else formats.python_documents())
    ]
    tokenizer = masked.vocabulary(documents, config.vocabulary_size, config.vocabulary, request.vocabulary)
    text = masked.tokenized(documents, tokenizer, length)
    count = len(text)
    if count < 4:
        what = (
            f"too little text: {len(text.ids):,} tokens make {count} samples, and training and validation need two each"
        )
        raise DataError(what, where=str(path or "data.path"), fix="give more, or lower data.sequence_length")
    held = min(count - 2, max(2, round(count * config.val_fraction)))
    parts = (0, count - held), (count - held, count)
    train, val = (masked.Pairs(text, length, *part, task.ignore_index) for part in parts)
    train.vocabulary = val.vocabulary = tokenizer.to_str()
    return {"train": train, "val": val}


def _packed(config: DataConfig, task: TaskConfig, request: DataRequest) -> Parts:
    """a folder written by 'hvd-train data pack': any other kind in a few large files (memory-mapped)"""
    folder = existing_folder(config)
    if request.run or config.fitted:
        packed.check_prepared(folder, config.fitted)
    train, val, test = packed.open_packed(folder, config, task, request.labels)
    parts: dict[str, Source] = {"train": train, "val": val}
    return parts | {"test": test} if test and request.reads_test else parts


KINDS: dict[str, Callable[[DataConfig, TaskConfig, DataRequest], Parts]] = {
    "digits": _digits,
    "diabetes": _diabetes,
    "idx": _idx,
    "npz": _npz,
    "npy": _npy,
    "hdf5": _hdf5,
    "imagefolder": open_imagefolder,
    "webdataset": open_webdataset,
    "cifar10": _cifar10,
    "table": open_table,
    "synthetic": _synthetic,
    "text": _text,
    "masked_text": _masked_text,
    "labeled_text": open_labeled_text,
    "packed": _packed,
}
