"""Small data sets of each format, and how tests open them."""

import gzip
import struct

import h5py
import numpy as np
import pytest
from PIL import Image

from hvd_train.config import DataConfig
from hvd_train.data.catalog import open_data
from hvd_train.data.dataset import DataRequest
from hvd_train.errors import DataError

RNG = np.random.default_rng(0)
IMAGES = "train-images-idx3-ubyte"
DEFAULTS = {"num_samples": 100, "input_shape": [4, 4, 1]}


def config(name, path=None, **keys):
    return DataConfig(**{**DEFAULTS, "name": name, "path": path and str(path), **keys})


def opened(*args, **keys):
    return open_data(config(*args, **keys))


def for_testing(*args, **keys):
    """The test part, as ``eval --split test`` opens it."""
    return open_data(config(*args, **keys), request=DataRequest(split="test")).parts["test"]


def fault(*args, **keys):
    """The one line a user sees."""
    with pytest.raises(DataError) as caught:
        data = opened(*args, **keys)
        for part in (data.train, data.val):  # what only fetching shows
            part.fetch(np.arange(len(part)))
    text = str(caught.value)
    assert "\n" not in text
    return text


def taken(source, indices):
    """(the input as the device makes it of what travels, the label) of a source that has one of each."""
    (inputs,), (labels,) = (named.values() for named in source.fetch(indices))
    divisor = np.float32(source.sample.inputs["input"].divisor)
    return inputs if divisor == 1 else inputs / divisor, labels


def everything(source):
    inputs, labels = taken(source, np.arange(len(source)))
    assert inputs.dtype == np.float32
    assert labels.dtype == np.int64
    assert inputs.shape == (len(source), *source.sample.input_shape)
    assert labels.shape == (len(source),)
    return inputs, labels


def idx(array, code=8):
    return struct.pack(f">HBB{array.ndim}I", 0, code, array.ndim, *array.shape) + array.tobytes()


def mnist(folder, *, dot="-", gz=False, size=(6, 5)):
    """A small MNIST folder; returns {part: (images, labels)}."""
    parts = {}
    for part, n in (("train", 20), ("t10k", 10)):
        images = RNG.integers(0, 256, (n, *size), np.uint8)
        labels = np.arange(n, dtype=np.uint8) % 10
        parts[part] = images, labels
        for kind, array in (("images", images), ("labels", labels)):
            path = folder / f"{part}-{kind}{dot}idx{array.ndim}-ubyte{'.gz' if gz else ''}"
            path.write_bytes(gzip.compress(idx(array)) if gz else idx(array))
    return parts


NAMES = ["train_x", "train_y", "val_x", "val_y"]


def arrays(n=30, held=10, shape=(4, 3), dtype=np.uint8, classes=3):
    made = RNG.integers(0, 256, (n + held, *shape)) if dtype == np.uint8 else RNG.normal(size=(n + held, *shape))
    labels = np.arange(n + held) % classes
    made = made.astype(dtype)
    return {"train_x": made[:n], "train_y": labels[:n], "val_x": made[n:], "val_y": labels[n:]}


def write(kind, folder, named):
    folder.mkdir(exist_ok=True)
    if kind == "npy":
        for name, array in named.items():
            np.save(folder / f"{name}.npy", array)
        return folder
    path = folder / f"data.{kind}"
    if kind == "npz":
        np.savez(path, **named)
        return path
    with h5py.File(path, "w") as file:
        for name, array in named.items():
            file[name] = array
    return path


def pictures(folder, classes=("cat", "dog"), n=5, mode="RGB", size=(9, 7), suffix="png"):
    for k, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(n):
            Image.new(mode, size, (20 * k + i,) * len(mode)).save(folder / name / f"{i}.{suffix}")
    return folder
