"""File formats: IDX, CIFAR-10, NumPy, HDF5, folders of images. Every fault names the file."""

from __future__ import annotations

import ast
import gzip
import math
import os
import struct
import sys
import threading
import zipfile
import zlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from hvd_train.errors import DataError

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
TEXT_SUFFIXES = (".txt", ".md", ".py", ".rst")
ARRAY_NAMES = ("train_x", "train_y", "val_x", "val_y", "x", "y")
PIECE = 1 << 20  # bytes


def unreadable(path: Path | str, error: Exception, kind: str) -> DataError:
    """Libraries' messages may have several lines; the first is kept."""
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return DataError(f"no readable {kind}: {reason}", where=str(path), fix="make or fetch the file again")


# ---- what scikit-learn brings


def _brought(name: str, **options: Any) -> np.ndarray:
    """A file of scikit-learn's, whose import would cost each rank 1.5 s."""
    (package,) = find_spec("sklearn").submodule_search_locations  # type: ignore[union-attr, misc]
    return np.loadtxt(Path(package) / "datasets" / "data" / name, **options)


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Images (1797, 8, 8) from 0 to 16, labels (1797,)."""
    table = _brought("digits.csv.gz", delimiter=",", dtype=np.int64)
    return table[:, :-1].reshape(-1, 8, 8), table[:, -1]


def read_diabetes() -> tuple[np.ndarray, np.ndarray]:
    """Ten measures of each patient (442, 10) as they were taken, how far the disease came in a year (442,), 25 to 346
    (Efron et al. 2004, "Least Angle Regression")."""
    return _brought("diabetes_data_raw.csv.gz"), _brought("diabetes_target.csv.gz")


# ---- IDX


def find_idx(folder: Path, name: str, axes: int) -> Path:
    """The file of an MNIST part: both spellings, plain before .gz."""
    names = [f"{name}{dot}idx{axes}-ubyte{gz}" for gz in ("", ".gz") for dot in ("-", ".")]
    for candidate in names:
        if (folder / candidate).exists():
            return folder / candidate
    raise DataError(f"there is no {names[0]} (or .gz)", where=str(folder))


def read_idx(path: Path, axes: int) -> np.ndarray:
    """An IDX file of unsigned bytes: two zero bytes, type 8, number of axes, big-endian sizes, then the data.

    A plain file is memory-mapped; a .gz file is unpacked only as far as its header promises.
    """
    start = 4 + 4 * axes
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            head = _read(stream, start)
            shape = _idx_shape(path, head, axes)
            expected = start + math.prod(shape)
            if path.suffix == ".gz":
                data = _read(stream, expected - start + 1)
                found = start + len(data)
            else:
                found = path.stat().st_size
    except (OSError, zlib.error) as error:
        raise unreadable(path, error, "IDX file") from error
    if found != expected:
        more = "over " if found > expected and path.suffix == ".gz" else ""
        what = f"{'truncated' if found < expected else 'too long'} IDX file of {shape}: "
        what += f"{expected} bytes expected, {more}{found - bool(more)} found"
        raise DataError(what, where=str(path), fix="fetch the file again")
    if path.suffix == ".gz" or expected == start:
        return np.frombuffer(data if path.suffix == ".gz" else b"", np.uint8).reshape(shape)
    return np.asarray(np.memmap(path, np.uint8, "r", start, shape))


def _idx_shape(path: Path, head: bytes, axes: int) -> tuple[int, ...]:
    expected = bytes([0, 0, 8, axes])
    if head[:4] != expected[: len(head)]:
        what = f"no IDX file of {axes}-dimensional bytes: it begins with {head[:4].hex(' ')}, not {expected.hex(' ')}"
        raise DataError(what, where=str(path))
    if len(head) < 4 + 4 * axes:
        what = f"truncated IDX file: {4 + 4 * axes} bytes of header expected, {len(head)} found"
        raise DataError(what, where=str(path), fix="fetch the file again")
    return struct.unpack(f">{axes}I", head[4:])


def _read(stream: Any, limit: int) -> bytes:
    """At most ``limit`` bytes; a compressed stream that breaks off gives what came before."""
    pieces, left = [], limit
    while left:
        try:
            piece = stream.read1(min(left, PIECE)) if hasattr(stream, "read1") else stream.read(min(left, PIECE))
        except EOFError:
            break
        if not piece:
            break
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


# ---- CIFAR-10

CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR_SIDE, CIFAR_RECORD = 32, 1 + 3 * 32 * 32  # a byte for the label, then red, green, blue


class CifarRows:
    """Images by rows, (n, 32, 32, 3) uint8, of mapped files of records."""

    dtype = np.dtype(np.uint8)

    def __init__(self, files: list[np.ndarray]) -> None:
        self._files, self._ends = files, np.cumsum([len(file) for file in files])
        self.shape = (int(self._ends[-1]), CIFAR_SIDE, CIFAR_SIDE, 3)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        out = np.empty((len(rows), CIFAR_RECORD - 1), np.uint8)
        which = np.searchsorted(self._ends, rows, "right")
        for k in np.unique(which):
            file, here = self._files[k], which == k
            out[here] = file[rows[here] - (self._ends[k] - len(file)), 1:]
        return np.ascontiguousarray(out.reshape(-1, 3, CIFAR_SIDE, CIFAR_SIDE).transpose(0, 2, 3, 1))


def read_cifar10(folder: Path, part: str) -> tuple[CifarRows, np.ndarray]:
    """Images and labels of the files data_batch_*.bin or test_batch.bin."""
    paths = sorted(folder.glob(f"{part}_batch*.bin"))
    if not paths:
        pickled = any(path.suffix != ".bin" for path in folder.glob(f"{part}_batch*"))
        fix = "fetch the binary version, cifar-10-binary.tar.gz" + "; pickled files are not read" * pickled
        raise DataError(f"there is no {part}_batch*.bin", where=str(folder), fix=fix)
    files = []
    for path in paths:
        size = path.stat().st_size
        if not size or size % CIFAR_RECORD:
            what = f"{size:,} bytes are no whole records of {CIFAR_RECORD:,}"
            raise DataError(what, where=str(path), fix="fetch cifar-10-binary.tar.gz again")
        try:
            files.append(np.asarray(np.memmap(path, np.uint8, "r")).reshape(-1, CIFAR_RECORD))
        except OSError as error:
            raise unreadable(path, error, "CIFAR-10 file") from error
        bad = np.flatnonzero(files[-1][:, 0] > 9)
        if len(bad):
            what = f"record {bad[0]} has the label {files[-1][bad[0], 0]}, not 0 to 9"
            raise DataError(what, where=str(path), fix="is it CIFAR-10? CIFAR-100 has two labels a record")
    return CifarRows(files), np.concatenate([file[:, 0] for file in files]).astype(np.int64)


# ---- NumPy


def _load(path: Path, mapped: bool) -> Any:
    try:
        return np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, SyntaxError) as error:
        raise unreadable(path, error, "NumPy file") from error


def read_npz(path: Path) -> dict[str, Any]:
    archive = _load(path, mapped=False)
    if isinstance(archive, np.ndarray):
        raise DataError("a single array, not an .npz file", where=str(path), fix="use data.name: npy with a folder")
    with archive:
        try:
            return {name: archive[name] for name in archive.files if name in ARRAY_NAMES}
        except (OSError, ValueError, zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise unreadable(path, error, "NumPy file") from error


def read_npy_folder(path: Path) -> dict[str, Any]:
    """Mapped; as a plain ndarray view, since indexing np.memmap itself costs more."""
    found = {name: path / f"{name}.npy" for name in ARRAY_NAMES}
    return {name: np.asarray(_load(file, mapped=True)) for name, file in found.items() if file.exists()}


# ---- HDF5


class Hdf5Rows:
    """A dataset of an HDF5 file by rows, for several threads; each process opens the file for itself."""

    def __init__(self, path: Path, name: str, lock: threading.Lock, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self._path, self._name, self._lock, self.shape, self.dtype = path, name, lock, shape, dtype
        self._dataset: Any = None
        self._process = -1

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> np.ndarray:
        """rows (k,) int64 in any order, or a slice; h5py itself wants increasing indices."""
        unique, back = (rows, ...) if isinstance(rows, slice) else np.unique(rows, return_inverse=True)
        try:
            with self._lock:
                if self._process != os.getpid():
                    import h5py

                    self._dataset, self._process = h5py.File(self._path, "r")[self._name], os.getpid()
                return self._dataset[unique][back]
        except (OSError, KeyError) as error:
            raise unreadable(f"{self._path}: {self._name}", error, "HDF5 dataset") from error


def read_hdf5(path: Path) -> dict[str, Any]:
    import h5py

    lock, found = threading.Lock(), {}
    try:
        with h5py.File(path, "r") as file:
            for name in [name for name in ARRAY_NAMES if name in file.keys()]:  # noqa: SIM118 (follows no link)
                _refuse_foreign(path, name, file)
                item = file[name]
                if isinstance(item, h5py.Dataset):
                    found[name] = Hdf5Rows(path, name, lock, item.shape or (), item.dtype)
    except (OSError, KeyError, TypeError) as error:
        raise unreadable(path, error, "HDF5 file") from error
    return found


def _refuse_foreign(path: Path, name: str, file: Any) -> None:
    """A link or a virtual dataset could name any other file of this machine."""
    import h5py

    what = "a link" if not isinstance(file.get(name, getlink=True), h5py.HardLink) else ""
    if not what and isinstance(file[name], h5py.Dataset) and (file[name].is_virtual or file[name].external):
        what = "kept in another file"
    if what:
        raise DataError(f"'{name}' is {what}; only datasets of the file itself are read", where=str(path))


# ---- text


def text_files(path: Path) -> list[Path]:
    """The file, or a folder's text files in the order of their names."""
    if not path.is_dir():
        return [path]
    listed = sorted(file.relative_to(path).parts for file in path.rglob("*") if file.suffix.lower() in TEXT_SUFFIXES)
    files = [path.joinpath(*parts) for parts in listed if not any(part.startswith(".") for part in parts)]
    files = [file for file in files if file.is_file()]
    if not files:
        raise DataError("no text files in this folder", where=str(path), fix=f"known: {' '.join(TEXT_SUFFIXES)}")
    return files


def read_text(path: Path) -> np.ndarray:
    """The bytes of a file (mapped), or of a folder's text files one after the other."""
    files = text_files(path)
    try:
        if len(files) == 1 and files[0].stat().st_size:
            return np.asarray(np.memmap(files[0], np.uint8, "r"))
        return np.concatenate([np.fromfile(file, np.uint8) for file in files])
    except OSError as error:
        raise unreadable(error.filename or path, error, "text file") from error


def read_documents(path: Path) -> list[str]:
    """The text of each file; bytes that are no UTF-8 become U+FFFD."""
    try:
        return [file.read_text(encoding="utf-8", errors="replace") for file in text_files(path)]
    except OSError as error:
        raise unreadable(error.filename or path, error, "text file") from error


def python_documents() -> list[str]:
    """English that each machine has: what ``help`` tells of Python, and the docstrings of each module of its library
    that is one file; read and not imported, in the order of names."""
    from pydoc_data.topics import topics

    files = [path for path in sorted(Path(os.__file__).parent.glob("*.py")) if path.stem in sys.stdlib_module_names]
    return [text for _, text in sorted(topics.items())] + [docstrings(path.read_bytes()) for path in files]


def docstrings(code: bytes) -> str:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(ast.parse(code)) if isinstance(node, documented))
    return "\n\n".join(filter(None, map(ast.get_docstring, nodes)))


# ---- images


def resize(images: np.ndarray, side: int) -> np.ndarray:
    """(n, h, w) -> (n, side, side) of the same type (uint8 or float32), bilinear."""
    from PIL import Image

    out = np.empty((len(images), side, side), images.dtype)
    for k, image in enumerate(images):
        out[k] = np.asarray(Image.fromarray(image).resize((side, side), Image.Resampling.BILINEAR))
    return out


def list_images(folder: Path) -> list[tuple[Path, str]]:
    """(file, class name) in name order; a class is a folder. Hidden names (.ipynb_checkpoints, ._x) are no data."""
    if not folder.is_dir():
        raise DataError("there is no such folder", where=str(folder))
    found = [
        (file, kind.name)
        for kind in sorted(folder.iterdir())
        if kind.is_dir() and not kind.name.startswith(".")
        for file in sorted(kind.iterdir())
        if file.suffix.lower() in IMAGE_SUFFIXES and not file.name.startswith(".")
    ]
    if not found:
        raise DataError("no images in CLASS/ folders", where=str(folder), fix=f"known: {' '.join(IMAGE_SUFFIXES)}")
    return found


class ImageFiles:
    """Decodes files by index to (k, side, side, c) uint8; c is 3 if any of some evenly spread files has colors, else
    1."""

    dtype = np.dtype(np.uint8)

    def __init__(self, paths: list[Path], side: int | None) -> None:
        self._paths, self._side = paths, side
        picked = np.unique(np.linspace(0, len(paths) - 1, 64).astype(np.int64))
        self._mode = "L" if all(self._open(paths[k], decode=False).mode in ("L", "1", "LA") for k in picked) else "RGB"
        self._size = (side, side) if side else self._open(paths[0]).size
        self.shape = (len(paths), self._size[1], self._size[0], 1 if self._mode == "L" else 3)
        self.names = " ".join(f"{path.parent.name}/{path.name}" for path in paths)  # for the fingerprint

    def __len__(self) -> int:
        return len(self._paths)

    def _open(self, path: Path, decode: bool = True) -> Any:
        from PIL import Image

        try:
            with Image.open(path) as image:
                if decode:
                    image.load()
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise unreadable(path, error, "image") from error
        if image.mode.startswith(("I", "F")):  # Pillow would cut their values off at 255
            raise DataError(f"an image of mode {image.mode}", where=str(path), fix="store it with 8 bits per channel")
        return image

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        from PIL import Image

        out = np.empty((len(rows), *self.shape[1:]), np.uint8)
        for k, row in enumerate(rows):
            image = self._open(self._paths[row])
            if image.mode != self._mode:  # else ``convert`` copies
                image = image.convert(self._mode)
            if image.size != self._size:
                if not self._side:
                    what = f"an image of {image.size} pixels, the first one has {self._size}"
                    raise DataError(what, where=str(self._paths[row]), fix="set data.image_size")
                image = image.resize(self._size, Image.Resampling.BILINEAR)
            out[k] = np.asarray(image).reshape(out.shape[1:])
        return out
