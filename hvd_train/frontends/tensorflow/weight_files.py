"""Files of Keras' weights, read as HDF5: what describes the model could name code, and is not looked at."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

import h5py
import numpy as np

from hvd_train.checkpoint.arrays import from_bfloat16

T = TypeVar("T")
SKIPPED = ("optimizer", "seed_generator")


def numbered(model: Any, known: Mapping[str, T]) -> dict[str, T]:
    """Return what ``known`` has by the paths of variables, with dots, by the names of Keras' files."""
    names = {}
    for layer in model._flatten_layers():
        for k, v in enumerate(layer._trainable_variables + layer._non_trainable_variables):
            if (path := v.path.replace("/", ".")) in known:
                names[f"{layer.name}.{k}"] = known[path]
    return names


def _archive(path: Path) -> dict[str, dict[str, np.ndarray]]:
    with zipfile.ZipFile(path) as archive:
        return _weights(io.BytesIO(archive.read("model.weights.h5")))


def _weights(file: Path | IO[bytes]) -> dict[str, dict[str, np.ndarray]]:
    """Return {'': {``LAYER.NUMBER``: array}}, the number being that of the variable in its layer."""
    arrays: dict[str, np.ndarray] = {}
    with h5py.File(file, "r") as opened:

        def take(place: str, group: h5py.Group | h5py.Dataset) -> None:
            folder, _, last = place.rpartition("/")
            if last != "vars" or not isinstance(group, h5py.Group) or any(f in SKIPPED for f in folder.split("/")):
                return
            layer = group.attrs.get("name") or folder.rpartition("/")[2]
            for number, x in group.items():
                name = f"{layer}.{number}"
                if name in arrays:
                    raise ValueError(f"two layers are called {layer}")
                arrays[name] = np.asarray(x)
                if x.attrs.get("dtype") == "bfloat16":
                    arrays[name] = from_bfloat16(arrays[name])

        opened.visititems(take)
    if not arrays:
        raise ValueError("it holds no weights as Keras 3 saves them")
    return {"": arrays}


WEIGHT_FILES = {".keras": _archive, ".weights.h5": _weights, ".h5": _weights}
