"""Data sets by name. A source gives samples by index; images are (height, width, channels), in [0, 1]."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hvd_train.config import DataConfig, TaskConfig, did_you_mean
from hvd_train.config.own import own_function
from hvd_train.data import formats, images, masked, packing, tables
from hvd_train.data.arrays import LABEL, Arrays, Itself, Joined, Synthetic, Text, joined_samples
from hvd_train.data.classes import Known, Words, listing
from hvd_train.data.fitted import as_run
from hvd_train.data.streams import Stream
from hvd_train.data.transforms import transformed
from hvd_train.errors import DataError
from hvd_train.protocol import Fields, Sample, Source

RESIZED = ("digits", "idx", "imagefolder")  # what image_size works on
SPLITS = ("train", "val", "test", "all")
TASK = TaskConfig()


@dataclass(frozen=True)
class Asked:
    """The request for which data are opened.

    run: the fields of the run whose checkpoint is used; None: a new run. split: one of SPLITS; None: the training part
    and the validation part. labels: whether they are looked at. test: a test part is wanted, too.
    vocabulary: the run's, of a text.
    """

    run: Sample | None = None
    split: str | None = None
    labels: bool = True
    test: bool = False
    vocabulary: str = ""

    @property
    def reads_test(self) -> bool:
        """Return whether a test part is opened; training does not look at it."""
        return self.test or self.split in ("test", "all")


@dataclass(frozen=True)
class Whole:
    """Samples of which ``fraction`` is held out for validation, and a test part, if there is one."""

    samples: Arrays
    fraction: float
    test: Source | None = None


Parts = dict[str, Source] | Whole  # the parts by their names, of SPLITS without all; or what is to be divided


@dataclass(frozen=True)
class DataSet:
    """Sources of the same kind by the names of SPLITS. A training has at least train and val. ``vocabulary``: of a text
    whose words are numbered, JSON."""

    name: str
    parts: Mapping[str, Source]
    vocabulary: str = ""

    @property
    def train(self) -> Source:
        return self.parts["train"]

    @property
    def val(self) -> Source:
        return self.parts["val"]

    @property
    def sample(self) -> Sample:
        return joined_samples(self.parts.values())

    @property
    def remarks(self) -> list[str]:
        """Return the notes for a user of all parts, each line once."""
        return list(dict.fromkeys(line for part in self.parts.values() for line in getattr(part, "remarks", ())))

    @property
    def fingerprint(self) -> str:
        """Equal for equal data, wherever it lies."""
        told = " ".join(part.fingerprint for part in self.parts.values())
        return hashlib.sha256(told.encode()).hexdigest()[:12]


def _digits(config: DataConfig, task: TaskConfig, asked: Asked) -> Parts:
    """handwritten digits, 1 797 images of 8 x 8 (built in; image_size resizes)"""
    images, labels = formats.read_digits()
    images = (images / 16).astype(np.float32)
    if config.image_size:
        images = formats.resize(images, config.image_size)
    return Whole(Arrays(images, labels, "digits", known(config, asked, 10), images=True), 0.2)


def _diabetes(config: DataConfig, task: TaskConfig, asked: Asked) -> Parts:
    """442 patients, 10 standardized measures, one number to predict: for regression (built in)"""
    measures, progress = formats.read_diabetes()
    measures = (measures - measures.mean(0)) / measures.std(0)
    return Whole(Arrays(measures.astype(np.float32), progress.astype(np.float32), "diabetes", None, task), 0.2)


def _idx(config: DataConfig, task: TaskConfig, asked: Asked) -> Parts:
    """MNIST format: path holds train-images-idx3-ubyte, ... and t10k-..., plain or .gz"""
    folder, parts, classes = _folder(config), [], known(config, asked)
    for part in ("train", "t10k"):
        files = [formats.find_idx(folder, f"{part}-{kind}", axes) for kind, axes in (("images", 3), ("labels", 1))]
        images, labels = formats.read_idx(files[0], 3), formats.read_idx(files[1], 1)
        if len(images) != len(labels):
            raise DataError(f"{len(images)} images in {files[0].name}, {len(labels)} labels", where=str(files[1]))
        if config.image_size and images.shape[1:] != (config.image_size, config.image_size):
            images = formats.resize(images, config.image_size)
        parts.append(Arrays(images, labels, str(files[0]), classes, images=True))
        classes = classes.after(parts[0])
    return {"train": parts[0], "val": parts[1]}


ARRAY_NAMES = ("train_x", "train_y", "val_x", "val_y", "x", "y", "test_x", "test_y")


def _named_arrays(
    config: DataConfig, task: TaskConfig, asked: Asked, read: Callable[[Path, formats.Choose], dict[str, Any]]
) -> Parts:
    path = _existing(config)
    part, classes = partial(Arrays, task=task, images=config.images), known(config, asked)
    names: dict[str, str] = {}  # {train_x: as the file calls it}

    def choose(found: list[str]) -> list[str]:
        names.update(_array_names(found, path))
        wanted = [name for name in names if asked.reads_test or not name.startswith("test")]
        return [names[name] for name in wanted if asked.labels or name.endswith("x")]

    read_arrays = read(path, choose)
    arrays = {name: read_arrays[names[name]] for name in ARRAY_NAMES if names.get(name) in read_arrays}
    if not asked.labels and arrays:
        return {name[:-2] or "all": part(x, {}, f"{path}: {name[:-2]}", classes) for name, x in arrays.items()}
    core, tests = ([name for name in arrays if name.startswith("test") == is_test] for is_test in (False, True))
    if len(tests) != 1 and core in [[*ARRAY_NAMES[:4]], [*ARRAY_NAMES[:2]], [*ARRAY_NAMES[4:6]]]:
        where = f"{path}: train" if len(core) == 4 else str(path)
        train = part(arrays[core[0]], arrays[core[1]], where, classes)
        others = {
            name: part(arrays[f"{name}_x"], arrays[f"{name}_y"], f"{path}: {name}", classes.after(train))
            for name in ("val", "test")
            if f"{name}_x" in arrays
        }
        return {"train": train, **others} if "val" in others else Whole(train, config.val_fraction, others.get("test"))
    what = f"{', '.join(names[name] for name in arrays) or 'none of the arrays'} found"
    raise DataError(what, where=str(path), fix="it needs train_x, train_y, val_x, val_y; or x, y")


def _array_names(found: list[str], path: Path) -> dict[str, str]:
    """{train_x, train_y, val_x, ... or x, y: as the file calls it}."""
    names: dict[str, str] = {name: name for name in found if name in ("x", "y")}
    others = []
    for own in found:
        stem, _, kind = own.rpartition("_")
        part = images.part_of(stem) if kind in ("x", "y") else None
        if part and names.setdefault(name := f"{part}_{kind}", own) != own:
            raise DataError(f"{names[name]} and {own} are the same part, {part}", where=str(path), fix="keep one")
        others += [own] * (part is None and bool(stem) and kind in ("x", "y"))
    if others and "train_x" in names and "val_x" not in names:
        what = f"{', '.join(others)} beside {names['train_x']}: arrays whose part is not known"
        listed = ", ".join(f"{name}_x" for name in images.PART_NAMES["val"])
        raise DataError(
            what, where=str(path), fix=f"call those of a validation part one of {listed}, or leave them out"
        )
    return names


def _npz(config: DataConfig, task: TaskConfig, asked: Asked) -> Parts:
    """one .npz file with train_x, train_y, val_x, val_y, test_x, test_y (or x, y: split by val_fraction)"""
    return _named_arrays(config, task, asked, formats.read_npz)


def _npy(config: DataConfig, task: TaskConfig, asked: Asked) -> Parts:
    """a folder of train_x.npy, train_y.npy, ... (memory-mapped: may be larger than memory)"""
    _folder(config)
    return _named_arrays(config, task, asked, formats.read_npy_folder)


def _hdf5(config: DataConfig, task: TaskConfig, asked: Asked) -> Parts:
    """one HDF5 file with datasets train_x, train_y, ... (read as needed)"""
    return _named_arrays(config, task, asked, formats.read_hdf5)


def _imagefolder(config: DataConfig, task: TaskConfig, asked: Asked) -> Parts:
    """path/train/CLASS/*.png, path/val/CLASS/* and path/test/CLASS/* (or path/CLASS/*: split); set image_size"""
    folder = _folder(config)
    places, others = images.find_parts(folder)
    read = {part: place for part, place in places.items() if part != "test" or asked.reads_test} or {"train": folder}
    listed = {part: images.list_images(place, asked.labels) for part, place in read.items()}
    if asked.run:  # its classes and channels are known
        colored = next(iter(asked.run.inputs.values())).shape[-1:] == (3,)
    else:
        images.check_no_class_is_empty(listed["train"])
        # One of colors in any part makes all of them colored.
        colored = any(listing.colored for part, listing in listed.items() if part != "test")
    remarks = [f"not read in {folder}: {', '.join(others)}"] * bool(others)
    classes = known(config, asked)
    train = _images(listed["train"], classes, colored, config, asked, remarks)
    made = {
        part: _images(listing, classes.after(train), colored, config, asked)
        for part, listing in listed.items()
        if part != "train"
    }
    return {"train": train, **made} if "val" in made else Whole(train, config.val_fraction, made.get("test"))


def _images(
    listing: images.Listing,
    classes: Known,
    colored: bool,
    config: DataConfig,
    asked: Asked,
    remarks: Sequence[str] = (),
) -> Arrays:
    inputs = images.ImageFiles(listing, config.image_size, colored)
    labels: Any = Words.read(np.array(listing.names)) if asked.labels else {}
    remarks = [*remarks, *filter(None, [listing.note])]
    if listing.colored and not colored:
        remarks.append(f"{listing.where} holds images in color, which are read as gray: those of the training are")
    found = Arrays(inputs, labels, str(listing.where), classes, images=True, remarks=remarks)
    found.files = [str(path) for path in listing.files]
    return found


def _cifar10(config: DataConfig, task: TaskConfig, asked: Asked) -> Parts:
    """CIFAR-10's binary version: path holds data_batch_1.bin, ... and test_batch.bin"""
    folder = _folder(config)
    inner = folder / "cifar-10-batches-bin"
    parts: dict[str, Source] = {}
    for part, name in (("train", "data"), ("val", "test")):
        images, numbers = formats.read_cifar10(inner if inner.is_dir() else folder, name)
        labels = numbers if config.classes else Words(numbers, formats.CIFAR_CLASSES)
        parts[part] = Arrays(images, labels, str(folder), known(config, asked, 10), images=True)
    return parts


def _table(config: DataConfig, task: TaskConfig, asked: Asked) -> Parts:
    """a .csv, .tsv or .parquet file (split by val_fraction), or a folder of train.*, val.*, test.*; labels: columns"""
    path = _existing(config)
    files = tables.find_all(path) if path.is_dir() else {"train": path}
    labels = [config.labels] if isinstance(config.labels, str) else config.labels or []
    if not labels and asked.labels:
        fix = "name the column to learn"
        raise DataError("a table needs labels", where="data.labels", fix=fix)
    have = tables.names_of(files["train"])
    features, remarks = _features(have, labels, config, asked.run)
    labels = labels if asked.labels else []
    named = [*features, *labels]
    twice = sorted(name for name, count in Counter(named).items() if count > 1)
    if twice or not features:
        what = f"{', '.join(twice)} named twice" if twice else "no column is left for the features"
        raise DataError(what, where="data.features, data.labels", fix="a column is a feature or a label")
    parts: dict[str, Arrays] = {}
    classes = known(config, asked)
    for part, file in files.items():
        if part == "test" and not asked.reads_test:
            continue
        _check_columns(file, features, labels, asked.run)
        table = tables.Table.read(file, named)
        parts[part] = _of_table(table, features, labels, classes, task, [] if parts else remarks)
        classes = classes.after(parts["train"])
    return {**parts} if "val" in parts else Whole(parts["train"], config.val_fraction)


def _features(
    have: Sequence[str], labels: Sequence[str], config: DataConfig, run: Sample | None
) -> tuple[list[str], list[str]]:
    """The columns of the inputs, in the order that the run knows, and what a user should know of them."""
    learned = set(labels)
    others = [name for name in have if name not in learned]
    if run is None:
        return config.features or others, []
    columns = next(iter(run.inputs.values())).columns
    if not columns:
        why = "the checkpoint is of an older version and does not tell its columns" if columns is None else ""
        taken = config.features or others
        told = f"{why or 'the run was trained without columns'}: they are taken as they stand, {listing(taken)}"
        return taken, [told]
    if config.features and set(config.features) != set(columns):
        what = f"data.features are {listing(config.features)}, and the run was trained with {listing(columns)}"
        raise DataError(what, where="data.features", fix="leave it out: the run knows its columns")
    extra = [] if config.features else [name for name in others if name not in columns]
    if not extra:
        return list(columns), []
    many = len(extra) > 1
    told = f"column{'s' * many} {listing(extra)} {'are' if many else 'is'} left out: the run was trained without"
    return list(columns), [told]


def _check_columns(file: Path, features: Sequence[str], labels: Sequence[str], run: Sample | None) -> None:
    have = tables.names_of(file)
    there = set(have)
    missing = [name for name in features if name not in there]
    if missing and run and next(iter(run.inputs.values())).columns:
        what = f"column{'s' * (len(missing) > 1)} {listing(missing)} missing, with which the run was trained"
        raise DataError(what, where=str(file), fix=f"the file has {listing(have)}; give all of the run's columns")
    for key, names in (("features", features), ("labels", labels)):
        for name in names:
            if name not in there:
                raise DataError(f"no column: {did_you_mean(name, have)}", where=f"{file}, data.{key}")


def _of_table(
    table: tables.Table,
    features: list[str],
    labels: list[str],
    classes: Known,
    task: TaskConfig,
    remarks: Sequence[str],
) -> Arrays:
    inputs = np.stack([table.numbers(name) for name in features], axis=1)
    several, found = isinstance(task.loss, dict), dict[str, Any]()
    for name in labels:
        if task.classes(name, not several):
            known = classes.label(name if several else LABEL, len(labels) == 1)
            found[name] = table.classes(name, known, task.ignore_index)
        else:
            loss, _ = task.terms.get(name) or task.terms.get("") or ("", ())
            found[name] = table.numbers(name, keep_whole=":" in loss)
    if several or not labels:
        return Arrays(inputs, found, str(table.path), classes, task, table.notes, None, remarks, (features, ()))
    if task.loss == "cross_entropy" and len(labels) > 1:
        fix = "name one column, or a loss for each: task.loss: {COLUMN: cross_entropy, ...}"
        raise DataError(f"{len(labels)} columns for one cross_entropy", where="data.labels", fix=fix)
    stacked = np.stack(list(found.values()), axis=1) if len(labels) > 1 else found[labels[0]]
    columns = features, labels if len(labels) > 1 else ()
    return Arrays(inputs, stacked, str(table.path), classes, task, table.notes, None, remarks, columns)


def _synthetic(config: DataConfig, task: TaskConfig, asked: Asked) -> Parts:
    """num_samples made-up samples of input_shape, for timing; needs no memory"""
    n, classes = config.num_samples, config.num_classes or 10
    held = max(1, int(n * config.val_fraction))
    val = Synthetic(held, config.input_shape, classes, start=n)
    return {"train": Synthetic(n, config.input_shape, classes), "val": val}


def _text(config: DataConfig, task: TaskConfig, asked: Asked) -> Parts:
    """a file or a folder of .txt, .md, .py, .rst: the next byte after each of sequence_length; the end validates"""
    path = _existing(config)
    length, classes = config.sequence_length, config.num_classes or Text.CLASSES
    if classes != Text.CLASSES:
        fix = f"leave it out; text has {Text.CLASSES} classes, one per byte"
        raise DataError(f"{classes} classes", where="data.num_classes", fix=fix)
    found = formats.read_text(path)
    count = (len(found) - 1) // length
    if count < 2:
        what = f"{len(found):,} bytes are too few for a training and a validation sample of {length}"
        raise DataError(what, where=str(path), fix=f"give at least {2 * length + 1:,}, or lower data.sequence_length")
    held = min(count - 1, max(1, round(count * config.val_fraction)))
    return {"train": Text(found, length, 0, count - held), "val": Text(found, length, count - held, count)}


def _masked_text(config: DataConfig, task: TaskConfig, asked: Asked) -> Parts:
    """text of path (left out: Python's own), for bert: pairs of sentences with masked words; sequence_length"""
    path, length = _existing(config) if config.path else None, config.sequence_length
    if length < 8:
        fix = "of these, three are [CLS] and two [SEP]"
        raise DataError(f"samples of {length} tokens; at least 8", where="data.sequence_length", fix=fix)
    documents = [
        masked.sentences(text) for text in (formats.read_documents(path) if path else formats.python_documents())
    ]
    tokenizer = masked.vocabulary(documents, config.vocabulary_size, config.vocabulary, asked.vocabulary)
    if asked.vocabulary and json.loads(tokenizer.to_str()) != json.loads(asked.vocabulary):
        what = "is another vocabulary than the run's, whose numbers stand for other tokens"
        raise DataError(what, where=f"data.vocabulary: {config.vocabulary}", fix="leave it out: the run has its own")
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


def _packed(config: DataConfig, task: TaskConfig, asked: Asked) -> Parts:
    """a folder that 'hvd-train data pack' wrote: any of the others in a few large files (memory-mapped)"""
    train, val, test = packing.open_packed(_folder(config), config, task, asked.labels)
    parts: dict[str, Source] = {"train": train, "val": val}
    return parts | {"test": test} if test and asked.reads_test else parts


def pack(config: DataConfig, task: TaskConfig, folder: Path, world: packing.World) -> packing.Manifest:
    """A data set of any kind into ``folder``, by all ranks of ``world``; transforms are left to the reading."""
    data = open_data(config.model_copy(update={"transforms": [], "target": "labels"}), task, asked=Asked(test=True))
    if any(getattr(part, "ordered", False) for part in (data.train, data.val)):
        what = "a stream is read in its own order, which packed data do not keep"
        raise DataError(what, where=f"data.name: {config.name}", fix="give it as it is, or pack what it reads")
    told = f"{config.name} {config.path or ''}".strip()
    return packing.pack(data.train, data.val, data.parts.get("test"), told, task, folder, world)


def known(config: DataConfig, asked: Asked, count: int | None = None) -> Known:
    """Return the classes known before the data are read; ``count``: of a data set that always has so many."""
    return Known.of(config, asked.run).counted(count)


KINDS: dict[str, Callable[[DataConfig, TaskConfig, Asked], Parts]] = {
    "digits": _digits,
    "diabetes": _diabetes,
    "idx": _idx,
    "npz": _npz,
    "npy": _npy,
    "hdf5": _hdf5,
    "imagefolder": _imagefolder,
    "cifar10": _cifar10,
    "table": _table,
    "synthetic": _synthetic,
    "text": _text,
    "masked_text": _masked_text,
    "packed": _packed,
}


def catalog() -> dict[str, str]:
    """{data.name: one line of help}."""
    return {name: (kind.__doc__ or "").strip() for name, kind in KINDS.items()}


def open_data(
    config: DataConfig,
    task: TaskConfig = TASK,
    given: Any = None,
    asked: Asked = Asked(),
) -> DataSet:
    """Opens and checks a data set; a DataError names the file or key and the way out.

    ``given``: the user's (train, val), or the function itself that gives it.
    """
    if given is not None or ":" in config.name:
        found = _own(config, task, asked, given)
    elif config.name in KINDS:
        if config.image_size and config.name not in RESIZED:
            fix = f"leave it out; it is for {', '.join(RESIZED)}"
            raise DataError(f"data set '{config.name}' is not resized", where="data.image_size", fix=fix)
        found = KINDS[config.name](config, task, asked)
    else:
        near = difflib.get_close_matches(config.name, KINDS, 1)
        listed = f"there are {', '.join(KINDS)}, or your own 'package.module:function'"
        fix = f"did you mean '{near[0]}'? {listed}" if near else listed
        raise DataError(f"unknown data set '{config.name}'", where="data.name", fix=fix)
    vocabulary = "" if isinstance(found, Whole) else getattr(next(iter(found.values())), "vocabulary", "")
    parts = _divided(found, asked, config)
    if asked.run:
        where = config.path or f"data.name: {config.name}"
        looked_at = asked.labels and config.target == "labels"
        run = known(config, asked).named_run(asked.run)
        parts = {name: as_run(part, run, looked_at, where, task.ignore_index) for name, part in parts.items()}
    else:
        _check_names(parts, config)
    if config.transforms:
        parts = transformed(parts, config.transforms, _imported)
    if config.target == "inputs":
        parts = {name: Itself(part) for name, part in parts.items()}
    return DataSet(config.name, parts, vocabulary)


def _divided(found: Parts, asked: Asked, config: DataConfig) -> dict[str, Source]:
    """The parts that are asked for."""
    where = config.path or f"data.name: {config.name}"
    if isinstance(found, Whole):
        tests: dict[str, Source] = {"test": found.test} if found.test else {}
        if asked.split == "all":
            found = {"train": found.samples, **tests}
        else:
            train, val = found.samples.split(found.fraction)
            found = {"train": train, "val": val, **tests}
    names = list(found)
    for name in names[1:]:
        _check_alike(found, names[0], name, where)
    if asked.split == "all":
        return {"all": next(iter(found.values())) if len(found) == 1 else Joined(list(found.values()))}
    if asked.split and asked.split not in found:
        raise DataError(f"there is no part '{asked.split}'", where=where, fix=f"there are {', '.join(names)} and all")
    return found


def _check_names(parts: Mapping[str, Source], config: DataConfig) -> None:
    """``data.classes`` are what the labels have, or the kind of data does not take them."""
    labels = joined_samples(parts.values()).labels
    if config.classes == "auto" and labels and not any(field.names or field.classes for field in labels.values()):
        what = "auto numbers classes, and labels of these data are not classes (task.loss: cross_entropy makes them so)"
        raise DataError(what, where="data.classes", fix="leave it out")
    for name, field in labels.items():
        names = Known.of(config).label(name, len(labels) == 1).names
        if names is not None and field.names != names:
            has = f"the data have {listing(field.names or ())}" if field.names else "labels of these data have no names"
            fix = "set it when packing" if config.name == "packed" else "leave it out"
            raise DataError(f"names {listing(names)}, and {has}", where="data.classes", fix=fix)


TITLES = {"train": "training", "val": "validation"}


def _check_alike(parts: Mapping[str, Source], first: str, second: str, where: str) -> None:
    fields = [
        {
            name: replace(field, classes=None, names=(), masked=False)
            for name, field in (*parts[part].sample.inputs.items(), *parts[part].sample.labels.items())
        }
        for part in (first, second)
    ]
    if fields[0] != fields[1]:
        told = (", ".join(f"{name} {field}" for name, field in part.items()) for part in fields)
        titles = (TITLES.get(name, name) for name in (first, second))
        what = ", ".join(f"{title} samples of {one}" for title, one in zip(titles, told, strict=True))
        raise DataError(what, where=where, fix="give both the same names, shapes and types")


def _own(config: DataConfig, task: TaskConfig, asked: Asked, given: Any) -> Parts:
    """The user's function(**options) -> (train, val), or with a test part: each a Source or a pair of arrays."""
    where = "data" if given is not None else f"data.name: {config.name}"
    made = given
    if given is None or callable(given):
        made = _called(given or _imported(config.name, where), config, where)
    listed = isinstance(made, tuple | list) and len(made) in (2, 3)
    if not listed or (len(made) == 3 and any(hasattr(part, "__array__") for part in made)):
        raise DataError(f"gave {_told(made)}", where=where, fix="it must return (train, val), or (train, val, test)")
    classes, parts = known(config, asked), dict[str, Source]()
    for name, part in zip(("train", "val", "test"), made, strict=False):
        if name == "test" and not asked.reads_test:
            continue
        if part is None and asked.split:  # there is none
            continue
        parts[name] = _source(part, config, task, f"{where}, {name}", classes, asked.labels)
        classes = classes.after(parts[name]) if name == "train" else classes
    if not parts:
        raise DataError("gave no samples", where=where, fix="it must return (train, val)")
    return parts


def _imported(name: str, where: str) -> Callable[..., Any]:
    return own_function(name, where, DataError)


def _called(function: Callable[..., Any], config: DataConfig, where: str) -> Any:
    try:
        return function(**config.options)
    except DataError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise DataError(f"the function failed: {reason}", where=where, fix="look at data.options too") from error


ATTRIBUTES = ("__len__", "fetch", "fingerprint", "num_classes")
WANTED = (
    "give (inputs, labels), or an object with __len__, fetch(indices) -> (inputs, labels), num_classes and fingerprint "
    "(a text, the same for the same data)"
)
STREAMED = (
    "a stream has __iter__ (or iterate(epoch, start)), __len__ (samples of an epoch), num_classes and fingerprint"
)


class Fetched:
    """A source of the user's own. One sample tells its fields, so that faults show at once."""

    def __init__(
        self,
        own: Any,
        task: TaskConfig,
        where: str,
        classes: Known,
        images: bool | None = None,
        labelled: bool = True,
    ) -> None:
        wanted = ATTRIBUTES if "cross_entropy" in [loss for loss, _ in task.terms.values()] else ATTRIBUTES[:-1]
        missing = [name for name in wanted if not hasattr(own, name)]
        if missing:
            raise DataError(f"{type(own).__name__} has no {', '.join(missing)}", where=where, fix=WANTED)
        if len(own) == 0:
            raise DataError("the data set is empty", where=where)
        self._own, self._where, self.fingerprint = own, where, own.fingerprint
        fetched = self._given(np.zeros(1, np.int64))
        if not isinstance(fetched, tuple | list) or len(fetched) != 2:
            raise DataError(f"fetch gives {_told(fetched)}", where=where, fix="it must return (inputs, labels)")
        inputs = _arrays(fetched[0], "inputs of fetch", where)
        labels = _arrays(fetched[1], "labels of fetch", where) if labelled else {}
        if classes.default.auto:
            fix = "list the values in the order of their numbers"
            raise DataError("data.classes: auto looks at all labels, and fetch gives some", where=where, fix=fix)
        classes = classes.counted(getattr(own, "num_classes", None))
        self._like = Arrays(inputs, labels, where, classes, task, images=images)
        # One sample does not tell whether others have places without a label.
        fields = self._like.sample.labels
        labels = {name: replace(field, masked=bool(field.classes and field.shape)) for name, field in fields.items()}
        self.sample, self.note = replace(self._like.sample, labels=labels), self._like.note

    def __len__(self) -> int:
        return len(self._own)

    def fetch(self, indices: np.ndarray) -> tuple[Fields, Fields]:
        inputs, labels = self._given(indices)
        return self._like.taken(inputs, labels, indices)

    def _given(self, indices: np.ndarray, *epoch: int) -> Any:
        try:
            return self._own.fetch(indices, *epoch)
        except DataError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise DataError(f"fetch failed: {reason}", where=self._where) from error


class Streamed(Fetched):
    """A stream of the user's own, whose order is that of its samples."""

    ordered = True

    def __init__(self, own: Any, task: TaskConfig, where: str, classes: Known, images: bool | None = None) -> None:
        missing = [name for name in ("__len__", "fingerprint") if not hasattr(own, name)]
        if missing:
            raise DataError(f"{type(own).__name__} has no {', '.join(missing)}", where=where, fix=STREAMED)
        try:
            if len(own) == 0:
                raise DataError("the data set is empty", where=where)
            stream = Stream(own, where)
        except DataError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise DataError(f"the stream failed: {reason}", where=where) from error
        super().__init__(stream, task, where, classes, images)

    def drawn(self, indices: np.ndarray, seed: int, epoch: int) -> tuple[Fields, Fields]:
        inputs, labels = self._given(indices, epoch)
        return self._like.taken(inputs, labels, indices)


def _source(
    part: Any, config: DataConfig, task: TaskConfig, where: str, classes: Known, labelled: bool = True
) -> Source:
    """What one part of the user's pair is: arrays, an object with ``fetch``, or a stream."""
    if not isinstance(part, tuple | list | dict):
        iterated = hasattr(part, "__iter__") and not hasattr(part, "__array__")
        if hasattr(part, "fetch") or not (iterated or hasattr(part, "iterate")):
            return Fetched(part, task, where, classes, config.images, labelled)
        if config.workers > 1:
            raise DataError("a stream is read by one thread, in order", where="data.workers", fix="set it to 1")
        return Streamed(part, task, where, classes, config.images)
    if isinstance(part, dict) or len(part) != 2:
        raise DataError(
            f"gives {_told(part)}", where=where, fix="give (inputs, labels): two arrays, or dicts of arrays"
        )
    if not labelled:
        return Arrays(_arrays(part[0], "inputs", where), {}, where, classes, task, images=config.images)
    labels = _arrays(part[1], "labels", where)
    count = np.shape(labels if isinstance(labels, np.ndarray) else next(iter(labels.values())))[:1]
    inputs = _arrays(part[0], "inputs", where, *count)
    return Arrays(inputs, labels, where, classes, task, images=config.images)


def _arrays(given: Any, name: str, where: str, count: int | None = None) -> Any:
    """One array, or a dict of them; their names are the model's."""
    if not isinstance(given, dict):
        return _array(given, name, where, count)
    strange = [key for key in given if not (isinstance(key, str) and key.isidentifier())]
    if strange or not given:
        fix = "name them as the model's arguments are"
        raise DataError(f"{name} are {_told(given)}: {strange or given} names no argument", where=where, fix=fix)
    return {key: _array(values, f"{name} '{key}'", where, count) for key, values in given.items()}


def _array(given: Any, name: str, where: str, count: int | None = None) -> np.ndarray:
    """One array of all (``count``) samples; several without names mean another thing in each model."""
    several = isinstance(given, dict)
    if isinstance(given, tuple | list) and len(given) != count:
        several = any(np.ndim(one) > 0 and len(one) == count for one in given)
    if several:
        raise DataError(f"{name} are {_told(given)}", where=where, fix="give one array, or a dict of named inputs")
    try:
        found = np.asarray(given)
    except Exception as error:
        if lengths := _lengths(given):
            raise _ragged(name, lengths, where) from error
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise DataError(f"{name} are not an array of numbers: {reason}", where=where) from error
    if found.dtype == object and (lengths := _lengths(found)):
        raise _ragged(name, lengths, where)
    return found


def _lengths(given: Any) -> list[int]:
    """The different lengths of samples; empty: they have none, or one alone."""
    try:
        found = sorted({len(sample) for sample in given if not isinstance(sample, str | bytes)})
    except TypeError:
        return []
    return found if len(found) > 1 else []


def _ragged(name: str, lengths: list[int], where: str) -> DataError:
    what = f"{name} have samples of different lengths, {lengths[0]} to {lengths[-1]}"
    fix = "pad them to one length, and tell the model which places are padding by a second input, a mask"
    return DataError(what, where=where, fix=fix)


def _told(given: Any) -> str:
    """A dict with x, y; a tuple of 3; an int."""
    if isinstance(given, dict):
        return f"a dict with {', '.join(map(str, list(given)[:8])) or 'nothing'}"
    if isinstance(given, tuple | list):
        return f"a {type(given).__name__} of {len(given)}"
    return type(given).__name__


def _existing(config: DataConfig) -> Path:
    if config.path is None:
        raise DataError(f"data set '{config.name}' needs a path", where="data.path", fix="say where the data lies")
    path = Path(config.path).expanduser()
    if not path.exists():
        raise DataError("there is no such file or folder", where=f"data.path: {path}")
    return path


def _folder(config: DataConfig) -> Path:
    path = _existing(config)
    if not path.is_dir():
        raise DataError("a folder is needed, this is a file", where=f"data.path: {path}")
    return path
