# NOTE TO COLLEAGUES (helpers): the lead has written this file already and it is in use. Do not rewrite it or its interface; your job now: WRITE ITS TESTS, fix bugs you find with small edits, commit.
"""Data sets by name. A source gives samples by index; images are (height, width, channels), in [0, 1]."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvd_train.config import DataConfig
from hvd_train.data import formats
from hvd_train.errors import ConfigError, DataError
from hvd_train.protocol import Source

SPLIT_SEED = 20200101  # the held-out part is a property of the data, not of a run


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
        return hashlib.sha256(f"{self.train.fingerprint} {self.val.fingerprint}".encode()).hexdigest()[:12]


class Arrays:
    """Inputs (n, ...) and labels (n,), in memory or mapped; rows may be a subset. uint8 inputs are scaled by 1/255."""

    def __init__(
        self, inputs: Any, labels: Any, where: str, num_classes: int | None = None, rows: np.ndarray | None = None
    ) -> None:
        self.inputs, self.where, self.rows = inputs, where, rows
        if len(inputs) != len(labels):
            raise DataError(f"{len(inputs)} inputs but {len(labels)} labels", where=where)
        if len(labels) == 0:
            raise DataError("the data set is empty", where=where)
        self.labels = _labels(labels, where, num_classes)
        kind = np.dtype(inputs.dtype)
        if kind.kind not in "fuib":
            raise DataError(f"inputs of type {kind} are not numbers", where=where)
        shape = tuple(int(k) for k in inputs.shape[1:])
        self._grey = len(shape) == 2  # images without a channel axis
        self.input_shape = (*shape, 1) if self._grey else shape
        self.num_classes = num_classes or int(self.labels.max()) + 1
        self._scale = np.float32(1 / 255) if kind == np.uint8 else None
        self.fingerprint = _fingerprint(inputs, self.labels, rows)

    def __len__(self) -> int:
        return len(self.labels) if self.rows is None else len(self.rows)

    def fetch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = indices if self.rows is None else self.rows[indices]
        inputs = self.inputs[rows].astype(np.float32)
        if self._scale is not None:
            inputs *= self._scale
        elif not np.isfinite(np.sum(inputs)) and not np.isfinite(inputs).all():
            bad = int(rows[int(np.argmin(np.isfinite(inputs).reshape(len(inputs), -1).all(1)))])
            raise DataError(f"sample {bad} holds NaN or infinity", where=self.where)
        return inputs[..., None] if self._grey else inputs, self.labels[rows]

    def split(self, fraction: float) -> tuple[Arrays, Arrays]:
        """A fixed, stratified split: the same share of each class is held out, whatever the run's seed."""
        held = np.zeros(len(self.labels), bool)
        rng = np.random.default_rng(SPLIT_SEED)
        for label in np.unique(self.labels):
            members = np.flatnonzero(self.labels == label)
            held[rng.permutation(members)[: max(1, round(fraction * len(members)))]] = True
        parts = [np.flatnonzero(~held), np.flatnonzero(held)]
        train, val = (Arrays(self.inputs, self.labels, self.where, self.num_classes, rows) for rows in parts)
        return train, val


def _labels(labels: Any, where: str, num_classes: int | None) -> np.ndarray:
    values = np.asarray(labels)
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise DataError(f"labels must be whole numbers, one per sample, not {values.dtype} {values.shape}", where=where)
    low, high = int(values.min()), int(values.max())
    if low < 0 or (num_classes is not None and high >= num_classes):
        bound = f"0..{num_classes - 1}" if num_classes else "0 and up"
        bad = low if low < 0 else high
        at = int(np.argmax(values == bad))
        raise DataError(f"label {bad} of sample {at} is out of range ({bound})", where=where, fix="see data.num_classes")
    return values.astype(np.int64)


def _fingerprint(inputs: Any, labels: np.ndarray, rows: np.ndarray | None) -> str:
    """Over shape, type, all labels and 64 samples spread over the set: differs where data differs, in milliseconds."""
    chosen = np.arange(len(labels)) if rows is None else rows
    picked = chosen[np.unique(np.linspace(0, len(chosen) - 1, 64).astype(np.int64))]
    digest = hashlib.sha256(f"{inputs.shape} {inputs.dtype} {len(chosen)}".encode())
    digest.update(np.ascontiguousarray(labels[chosen]).tobytes())
    digest.update(np.ascontiguousarray(np.asarray(inputs[picked])).tobytes())
    return digest.hexdigest()[:16]


class Synthetic:
    """Sample i is a pure function of i: class i mod k, its class' pattern plus noise. Memory does not grow with n."""

    def __init__(self, n: int, shape: Sequence[int], num_classes: int, offset: int) -> None:
        self.input_shape, self.num_classes, self._n, self._offset = tuple(shape), num_classes, n, offset
        self._patterns = np.random.default_rng(1).random((num_classes, *shape), np.float32)
        self.fingerprint = f"synthetic {n} {tuple(shape)} {num_classes} {offset}"

    def __len__(self) -> int:
        return self._n

    def fetch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        labels = indices % self.num_classes
        noise = np.stack([np.random.default_rng([self._offset, i]).random(self.input_shape, np.float32) for i in indices])
        return 0.5 * (self._patterns[labels] + noise), labels.astype(np.int64)


def _digits(config: DataConfig) -> tuple[Source, Source]:
    """handwritten digits, 1 797 images of 8 x 8 (built in; image_size resizes)"""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = (bunch.images / 16).astype(np.float32)[..., None]
    if config.image_size:
        images = np.stack([formats.resize(image, config.image_size) for image in images])
    return Arrays(images, bunch.target.astype(np.int64), "digits", 10).split(0.2)


def _idx(config: DataConfig) -> tuple[Source, Source]:
    """MNIST format: path holds train-images-idx3-ubyte, ... and t10k-..., plain or .gz"""
    folder = _folder(config)
    parts = []
    for part in ("train", "t10k"):
        images = formats.read_idx(formats.find_idx(folder, f"{part}-images", 3), 3)
        labels = formats.read_idx(formats.find_idx(folder, f"{part}-labels", 1), 1)
        if config.image_size:
            images = np.stack([formats.resize(image[..., None], config.image_size) for image in images])
        parts.append(Arrays(images, labels, str(folder), config.num_classes))
    return parts[0], parts[1]


def _named_arrays(config: DataConfig, read: Callable[[Path], dict[str, Any]]) -> tuple[Source, Source]:
    path = _existing(config)
    arrays = read(path)
    if {"train_x", "train_y"} <= arrays.keys():
        train = Arrays(arrays["train_x"], arrays["train_y"], f"{path}: train", config.num_classes)
        if {"val_x", "val_y"} <= arrays.keys():
            return train, Arrays(arrays["val_x"], arrays["val_y"], f"{path}: val", config.num_classes)
        return train.split(config.val_fraction)
    if {"x", "y"} <= arrays.keys():
        return Arrays(arrays["x"], arrays["y"], str(path), config.num_classes).split(config.val_fraction)
    raise DataError(
        f"holds {sorted(arrays) or 'nothing'}", where=str(path), fix="it needs train_x, train_y, val_x, val_y, or x, y"
    )


def _npz(config: DataConfig) -> tuple[Source, Source]:
    """one .npz file with train_x, train_y, val_x, val_y (or x, y: split by val_fraction)"""
    return _named_arrays(config, formats.read_npz)


def _npy(config: DataConfig) -> tuple[Source, Source]:
    """a folder of train_x.npy, train_y.npy, ... (memory-mapped: may be larger than memory)"""
    _folder(config)
    return _named_arrays(config, formats.read_npy_folder)


def _hdf5(config: DataConfig) -> tuple[Source, Source]:
    """one HDF5 file with datasets train_x, train_y, ... (read as needed)"""
    return _named_arrays(config, formats.read_hdf5)


def _imagefolder(config: DataConfig) -> tuple[Source, Source]:
    """path/train/CLASS/*.png and path/val/CLASS/* (or path/CLASS/*: split); set image_size"""
    folder = _folder(config)
    if (folder / "train").is_dir():
        train = formats.list_images(folder / "train")
        classes = sorted({name for _, name in train})
        files = {"train": train, "val": formats.list_images(folder / "val")}
        sources = [_images(f, classes, config, folder / part) for part, f in files.items()]
        return sources[0], sources[1]
    listed = formats.list_images(folder)
    classes = sorted({name for _, name in listed})
    return _images(listed, classes, config, folder).split(config.val_fraction)


def _images(files: list[tuple[Path, str]], classes: list[str], config: DataConfig, where: Path) -> Arrays:
    strange = sorted({name for _, name in files} - set(classes))
    if strange:
        raise DataError(f"classes {strange} are not in the training part", where=str(where))
    inputs = formats.ImageFiles([path for path, _ in files], config.image_size)
    labels = np.array([classes.index(name) for _, name in files], np.int64)
    return Arrays(inputs, labels, str(where), config.num_classes or len(classes))


def _synthetic(config: DataConfig) -> tuple[Source, Source]:
    """num_samples made-up samples of input_shape, for timing; needs no memory"""
    n, classes = config.num_samples, config.num_classes or 10
    held = max(1, int(n * config.val_fraction))
    return Synthetic(n, config.input_shape, classes, 2), Synthetic(held, config.input_shape, classes, 3)


KINDS: dict[str, Callable[[DataConfig], tuple[Source, Source]]] = {
    "digits": _digits,
    "idx": _idx,
    "npz": _npz,
    "npy": _npy,
    "hdf5": _hdf5,
    "imagefolder": _imagefolder,
    "synthetic": _synthetic,
}


def catalog() -> dict[str, str]:
    """{data.name: one line of help}."""
    return {name: (kind.__doc__ or "").strip() for name, kind in KINDS.items()}


def open_data(config: DataConfig) -> DataSet:
    """Opens and checks a data set; raises DataError or ConfigError naming the file and the way out."""
    if ":" in config.name:
        train, val = _own(config)
    elif config.name in KINDS:
        train, val = KINDS[config.name](config)
    else:
        near = difflib.get_close_matches(config.name, KINDS, 1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(KINDS)}, or 'package.module:function'"
        raise ConfigError(f"there is no data set '{config.name}'", where="data.name", fix=hint)
    if train.input_shape != val.input_shape:
        raise DataError(f"training samples are {train.input_shape}, validation samples {val.input_shape}", where=config.name)
    return DataSet(config.name, train, val)


def _own(config: DataConfig) -> tuple[Source, Source]:
    """The user's function(**options) -> (train, val), each a Source or an (inputs, labels) pair of arrays."""
    module_name, _, function = config.name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        made = getattr(importlib.import_module(module_name), function)(**config.options)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ConfigError(f"cannot be used: {error}", where=f"data.name: {config.name}") from error
    if not isinstance(made, tuple) or len(made) != 2:
        raise ConfigError("must return (train, val)", where=f"data.name: {config.name}")
    return tuple(_source(part, config) for part in made)  # type: ignore[return-value]


def _source(part: Any, config: DataConfig) -> Source:
    if isinstance(part, tuple):
        return Arrays(np.asarray(part[0]), np.asarray(part[1]), config.name, config.num_classes)
    return part


def _existing(config: DataConfig) -> Path:
    if config.path is None:
        raise ConfigError(f"data set '{config.name}' needs a path", where="data.path")
    path = Path(config.path).expanduser()
    if not path.exists():
        raise DataError("there is no such file or folder", where=f"data.path: {path}")
    return path


def _folder(config: DataConfig) -> Path:
    path = _existing(config)
    if not path.is_dir():
        raise DataError("is not a folder", where=f"data.path: {path}")
    return path
