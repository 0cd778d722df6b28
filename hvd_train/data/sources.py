"""Data sets by name. A source gives samples by index; images are (height, width, channels), in [0, 1]."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvd_train.config import DataConfig
from hvd_train.data import formats
from hvd_train.data.arrays import Arrays, Synthetic, Text
from hvd_train.errors import DataError
from hvd_train.protocol import Source

RESIZED = ("digits", "idx", "imagefolder")  # what image_size works on
Pair = tuple[Source, Source]


@dataclass(frozen=True)
class DataSet:
    """A training and a validation source of the same kind."""

    name: str
    train: Source
    val: Source

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.train.input_shape

    @property
    def num_classes(self) -> int:
        return max(self.train.num_classes, self.val.num_classes)

    @property
    def fingerprint(self) -> str:
        """Equal for equal data, wherever it lies."""
        return hashlib.sha256(f"{self.train.fingerprint} {self.val.fingerprint}".encode()).hexdigest()[:12]


def _digits(config: DataConfig) -> Pair:
    """handwritten digits, 1 797 images of 8 x 8 (built in; image_size resizes)"""
    images, labels = formats.read_digits()
    images = (images / 16).astype(np.float32)
    if config.image_size:
        images = formats.resize(images, config.image_size)
    return Arrays(images, labels, "digits", config.num_classes or 10).split(0.2)


def _idx(config: DataConfig) -> Pair:
    """MNIST format: path holds train-images-idx3-ubyte, ... and t10k-..., plain or .gz"""
    folder, parts = _folder(config), []
    for part in ("train", "t10k"):
        files = [formats.find_idx(folder, f"{part}-{kind}", axes) for kind, axes in (("images", 3), ("labels", 1))]
        images, labels = formats.read_idx(files[0], 3), formats.read_idx(files[1], 1)
        if len(images) != len(labels):
            raise DataError(f"{len(images)} images in {files[0].name}, {len(labels)} labels", where=str(files[1]))
        if config.image_size and images.shape[1:] != (config.image_size, config.image_size):
            images = formats.resize(images, config.image_size)
        parts.append(Arrays(images, labels, str(files[0]), config.num_classes))
    return parts[0], parts[1]


def _named_arrays(config: DataConfig, read: Callable[[Path], dict[str, Any]]) -> Pair:
    path = _existing(config)
    arrays, classes = read(path), config.num_classes
    held = [name for name in formats.ARRAY_NAMES if name in arrays]
    if held[:4] == list(formats.ARRAY_NAMES[:4]):
        train = Arrays(arrays["train_x"], arrays["train_y"], f"{path}: train", classes)
        return train, Arrays(arrays["val_x"], arrays["val_y"], f"{path}: val", classes)
    for pair in (["train_x", "train_y"], ["x", "y"]):
        if held == pair:
            return Arrays(arrays[pair[0]], arrays[pair[1]], str(path), classes).split(config.val_fraction)
    what = f"{', '.join(held) or 'none of the arrays'} found"
    raise DataError(what, where=str(path), fix="it needs train_x, train_y, val_x, val_y; or x, y")


def _npz(config: DataConfig) -> Pair:
    """one .npz file with train_x, train_y, val_x, val_y (or x, y: split by val_fraction)"""
    return _named_arrays(config, formats.read_npz)


def _npy(config: DataConfig) -> Pair:
    """a folder of train_x.npy, train_y.npy, ... (memory-mapped: may be larger than memory)"""
    _folder(config)
    return _named_arrays(config, formats.read_npy_folder)


def _hdf5(config: DataConfig) -> Pair:
    """one HDF5 file with datasets train_x, train_y, ... (read as needed)"""
    return _named_arrays(config, formats.read_hdf5)


def _imagefolder(config: DataConfig) -> Pair:
    """path/train/CLASS/*.png and path/val/CLASS/* (or path/CLASS/*: split); set image_size"""
    folder = _folder(config)
    top = folder / "train" if (folder / "train").is_dir() else folder
    listed = formats.list_images(top)
    classes = sorted({name for _, name in listed})
    train = _images(listed, classes, config, top)
    if top == folder or not (folder / "val").is_dir():
        return train.split(config.val_fraction)
    return train, _images(formats.list_images(folder / "val"), classes, config, folder / "val")


def _images(files: list[tuple[Path, str]], classes: list[str], config: DataConfig, where: Path) -> Arrays:
    strange = sorted({name for _, name in files} - set(classes))
    if strange:
        raise DataError(f"classes {', '.join(strange)} are not in the training part", where=str(where))
    number = {name: k for k, name in enumerate(classes)}
    inputs = formats.ImageFiles([path for path, _ in files], config.image_size)
    labels = np.array([number[name] for _, name in files], np.int64)
    return Arrays(inputs, labels, str(where), config.num_classes or len(classes))


def _synthetic(config: DataConfig) -> Pair:
    """num_samples made-up samples of input_shape, for timing; needs no memory"""
    n, classes = config.num_samples, config.num_classes or 10
    held = max(1, int(n * config.val_fraction))
    return Synthetic(n, config.input_shape, classes), Synthetic(held, config.input_shape, classes, start=n)


def _text(config: DataConfig) -> Pair:
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
    return Text(found, length, 0, count - held), Text(found, length, count - held, count)


KINDS: dict[str, Callable[[DataConfig], Pair]] = {
    "digits": _digits,
    "idx": _idx,
    "npz": _npz,
    "npy": _npy,
    "hdf5": _hdf5,
    "imagefolder": _imagefolder,
    "synthetic": _synthetic,
    "text": _text,
}


def catalog() -> dict[str, str]:
    """{data.name: one line of help}."""
    return {name: (kind.__doc__ or "").strip() for name, kind in KINDS.items()}


def open_data(config: DataConfig, given: Any = None) -> DataSet:
    """Opens and checks a data set; a DataError names the file or key and the way out.

    ``given``: the user's (train, val), or the function itself that gives it.
    """
    if given is not None or ":" in config.name:
        train, val = _own(config, given)
    elif config.name in KINDS:
        if config.image_size and config.name not in RESIZED:
            fix = f"leave it out; it is for {', '.join(RESIZED)}"
            raise DataError(f"data set '{config.name}' is not resized", where="data.image_size", fix=fix)
        train, val = KINDS[config.name](config)
    else:
        near = difflib.get_close_matches(config.name, KINDS, 1)
        listed = f"there are {', '.join(KINDS)}, or your own 'package.module:function'"
        fix = f"did you mean '{near[0]}'? {listed}" if near else listed
        raise DataError(f"unknown data set '{config.name}'", where="data.name", fix=fix)
    if train.input_shape != val.input_shape:
        what = f"training samples of shape {train.input_shape}, validation samples of {val.input_shape}"
        raise DataError(what, where=config.path or config.name)
    return DataSet(config.name, train, val)


def _own(config: DataConfig, given: Any) -> Pair:
    """The user's function(**options) -> (train, val), each a Source or an (inputs, labels) pair of arrays."""
    where = "data" if given is not None else f"data.name: {config.name}"
    made = given
    if given is None or callable(given):
        made = _called(given or _imported(config.name, where), config, where)
    if not isinstance(made, tuple | list) or len(made) != 2:
        raise DataError(f"gave {_told(made)}", where=where, fix="it must return (train, val)")
    return _source(made[0], config, f"{where}, train"), _source(made[1], config, f"{where}, val")


def _imported(path: str, where: str) -> Callable[..., Any]:
    module_name, _, name = path.partition(":")
    if os.getcwd() not in sys.path:  # a console script does not look where the user stands
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise DataError(f"cannot be imported: {error}", where=where) from error


def _called(function: Callable[..., Any], config: DataConfig, where: str) -> Any:
    try:
        return function(**config.options)
    except DataError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise DataError(f"the function failed: {reason}", where=where, fix="look at data.options too") from error


ATTRIBUTES = ("__len__", "fetch", "input_shape", "num_classes", "fingerprint")
WANTED = (
    "give (inputs, labels), or an object with __len__, fetch(indices) -> (inputs float32, labels int64), input_shape "
    "(of a sample, channels last), num_classes and fingerprint (a text, the same for the same data)"
)


def _source(part: Any, config: DataConfig, where: str) -> Source:
    """Arrays are wrapped; a source of the user's own is tried with one sample, so that faults show here."""
    if isinstance(part, tuple | list | dict):
        if isinstance(part, dict) or len(part) != 2:
            raise DataError(f"gives {_told(part)}", where=where, fix="give (inputs, labels): two arrays")
        labels = _array(part[1], "labels", where)
        inputs = _array(part[0], "inputs", where, len(labels) if labels.ndim else None)
        return Arrays(inputs, labels, where, config.num_classes)
    missing = [name for name in ATTRIBUTES if not hasattr(part, name)]
    if missing:
        raise DataError(f"{type(part).__name__} has no {', '.join(missing)}", where=where, fix=WANTED)
    if len(part) == 0:
        raise DataError("the data set is empty", where=where)
    try:
        fetched = part.fetch(np.zeros(1, np.int64))
    except DataError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise DataError(f"fetch failed: {reason}", where=where) from error
    if not isinstance(fetched, tuple | list) or len(fetched) != 2:
        raise DataError(f"fetch gives {_told(fetched)}", where=where, fix="it must return (inputs, labels)")
    inputs, labels = _array(fetched[0], "inputs of fetch", where), _array(fetched[1], "labels of fetch", where)
    found = (inputs.shape, inputs.dtype.name, labels.shape, labels.dtype.name)
    expected = ((1, *part.input_shape), "float32", (1, *labels.shape[1:]), "int64")
    if found != expected:
        raise DataError(f"fetch gives {found} for one index, not {expected}", where=where)
    return part


def _array(given: Any, name: str, where: str, count: int | None = None) -> np.ndarray:
    """One array of all (``count``) samples; what several of them mean is another thing in each model."""
    several = isinstance(given, dict)
    if isinstance(given, tuple | list) and len(given) != count:
        several = any(np.ndim(one) > 0 and len(one) == count for one in given)
    if several:
        fix = "join them into one array, or use hvd_train.torch or hvd_train.keras in a script of your own"
        raise DataError(f"{name} are {_told(given)}, and fit takes one array", where=where, fix=fix)
    try:
        return np.asarray(given)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise DataError(f"{name} are no array of numbers: {reason}", where=where) from error


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
