"""Guess the kind of data of a file or folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hvd_train.data.images import holds_images, part_of
from hvd_train.data.webdataset import tar_files
from hvd_train.errors import DataError

MARKS: Mapping[str, str] = {"*.npy": "npy", "*-images*idx3-ubyte*": "idx", "data_batch_1.bin": "cifar10"}
SUFFIXES = {
    ".npz": "npz", ".h5": "hdf5", ".hdf5": "hdf5", ".csv": "table", ".tsv": "table", ".parquet": "table",
    ".jsonl": "table", ".tar": "webdataset",
}  # fmt: skip


def kind_of(path: Path) -> str:
    """Guess data.name from the name and the contents of a file or folder."""
    if path.is_dir():
        listed = [name for pattern, name in MARKS.items() if next(path.glob(pattern), None)]
        files = (file for file in path.iterdir() if SUFFIXES.get(file.suffix.lower()) == "table")
        tables = any(part_of(file.stem) == "train" for file in files)
        if listed or tables:
            return listed[0] if listed else "table"
        # The archive of unpacked images may lie beside them.
        return "webdataset" if tar_files(path) and not holds_images(path) else "imagefolder"
    if not path.exists():
        raise DataError("there is no such file or folder", where=str(path))
    if path.suffix.lower() not in SUFFIXES:
        fix = "give -c FILE, or --set data.name=..."
        raise DataError("the name of the file does not say what kind of data it holds", where=str(path), fix=fix)
    return SUFFIXES[path.suffix.lower()]
