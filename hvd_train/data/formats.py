"""Read IDX, CIFAR-10, NumPy, HDF5 and text files. Every error names the file."""

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
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from hvd_train.data.memory import check_free, in_units
from hvd_train.errors import DataError

TEXT_SUFFIXES = (".txt", ".md", ".py", ".rst")
PIECE = 1 << 20  # bytes
LEAST_STORED = 100_000  # above the ratio of any compression
Choose = Callable[[list[str]], list[str]]  # the names of all arrays in a file -> the names to read


def unreadable(path: Path | str, error: Exception, kind: str) -> DataError:
    """Make the error for a damaged file, with the first line of the library's message."""
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return DataError(f"no readable {kind}: {reason}", where=str(path), fix="make or fetch the file again")


# ---- data sets within scikit-learn


def _from_sklearn(name: str, **options: Any) -> np.ndarray:
    """Read a data file of the scikit-learn package."""
    # Without importing it, which would take 1.5 s on each rank.
    (package,) = find_spec("sklearn").submodule_search_locations  # type: ignore[union-attr, misc]
    return np.loadtxt(Path(package) / "datasets" / "data" / name, **options)


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return images (1797, 8, 8) with values 0 to 16, and labels (1797,)."""
    table = _from_sklearn("digits.csv.gz", delimiter=",", dtype=np.int64)
    return table[:, :-1].reshape(-1, 8, 8), table[:, -1]


def read_diabetes() -> tuple[np.ndarray, np.ndarray]:
    """Return ten measurements of each patient (442, 10), and the progression after a year (442,), 25 to 346.

    Efron et al. 2004, "Least Angle Regression".
    """
    return _from_sklearn("diabetes_data_raw.csv.gz"), _from_sklearn("diabetes_target.csv.gz")


# ---- IDX


def find_idx(folder: Path, name: str, axes: int) -> Path:
    """Find an IDX file, spelled "-idx" or ".idx"; a plain file is preferred to a .gz file."""
    names = [f"{name}{dot}idx{axes}-ubyte{gz}" for gz in ("", ".gz") for dot in ("-", ".")]
    for candidate in names:
        if (folder / candidate).exists():
            return folder / candidate
    raise DataError(f"there is no {names[0]} (or .gz)", where=str(folder))


def read_idx(path: Path, axes: int) -> np.ndarray:
    """Read an IDX file of unsigned bytes: two zero bytes, type 8, number of axes, big-endian sizes, then the data.

    A plain file is memory-mapped. A .gz file is unpacked up to the size in its header.
    """
    start = 4 + 4 * axes
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            head = _read(stream, start)
            shape = _idx_shape(path, head, axes)
            expected = start + math.prod(shape)
            if path.suffix == ".gz":
                check_free(expected, f"unpacking {shape}", str(path), "unpack it, gunzip: plain files are mapped")
                data = _read(stream, expected - start + 1)
                size = start + len(data)
            else:
                size = path.stat().st_size
    except (OSError, zlib.error) as error:
        raise unreadable(path, error, "IDX file") from error
    if size != expected:
        more = "over " if size > expected and path.suffix == ".gz" else ""
        what = f"{'truncated' if size < expected else 'too long'} IDX file of {shape}: "
        what += f"{expected} bytes expected, {more}{size - bool(more)} found"
        raise DataError(what, where=str(path), fix="fetch the file again")
    if path.suffix == ".gz" or expected == start:
        return np.frombuffer(data if path.suffix == ".gz" else b"", np.uint8).reshape(shape)
    # A plain view: indexing np.memmap itself costs more.
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
    """Read at most ``limit`` bytes; fewer if a compressed stream is truncated."""
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
    """Images (n, 32, 32, 3) uint8 in memory-mapped CIFAR-10 files, read row by row."""

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
    """Read images (n, 32, 32, 3) and labels (n,) of the files data_batch_*.bin or test_batch.bin."""
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

# What NumPy and zipfile raise for damaged files.
BROKEN_ARRAY = (
    OSError, ValueError, EOFError, SyntaxError, KeyError, TypeError, OverflowError, MemoryError, NotImplementedError,
    RuntimeError, struct.error, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


def _load(path: Path, mapped: bool) -> Any:
    try:
        return np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
    except BROKEN_ARRAY as error:
        raise unreadable(path, error, "NumPy file") from error


def read_npz(path: Path, choose: Choose) -> dict[str, Any]:
    archive = _load(path, mapped=False)
    if isinstance(archive, np.ndarray):
        raise DataError("a single array, not an .npz file", where=str(path), fix="use data.name: npy with a folder")
    with archive:
        wanted = choose(archive.files)
        try:
            members = {info.filename: info.file_size for info in archive.zip.infolist()}
            total = 0
            for name in wanted:
                member = name if name in members else f"{name}.npy"
                with archive.zip.open(member) as stream:
                    _check_header(stream, members[member], f"{path}: {name}")
                total += members[member]
            check_free(total, "reading all arrays", str(path), "use data.name: npy, whose files are mapped, or hdf5")
            return {name: archive[name] for name in wanted}
        except BROKEN_ARRAY as error:
            raise unreadable(path, error, "NumPy file") from error


def _check_header(stream: Any, size: int, where: str) -> None:
    """Check that an .npy file of ``size`` bytes has the length that its header states."""
    # NumPy itself would allocate the memory first.
    version = np.lib.format.read_magic(stream)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        return
    shape, _, dtype = readers[version](stream)
    there, promised = size - stream.tell(), math.prod(shape) * dtype.itemsize
    if not dtype.hasobject and (min(shape, default=0) < 0 or promised != there):
        what = f"its header promises {shape} {dtype}, {promised:,} bytes, and {there:,} are there"
        raise unreadable(where, ValueError(what), "NumPy file")


def read_npy_folder(path: Path, choose: Choose) -> dict[str, Any]:
    """Memory-map the .npy files of a folder."""
    arrays = {}
    for name in choose(sorted(file.stem for file in path.glob("*.npy"))):
        file = path / f"{name}.npy"
        try:
            with open(file, "rb") as stream:
                _check_header(stream, file.stat().st_size, str(file))
        except BROKEN_ARRAY as error:
            raise unreadable(file, error, "NumPy file") from error
        # A plain view: indexing np.memmap itself costs more.
        arrays[name] = np.asarray(_load(file, mapped=True))
    return arrays


# ---- HDF5

# netCDF attributes that change the meaning of stored numbers. With the last one, a byte of -1 means 255.
PACKED = ("scale_factor", "add_offset", "_Unsigned")


class Hdf5Rows:
    """A dataset of an HDF5 file, read row by row; thread-safe, and reopened after a fork."""

    def __init__(self, path: Path, name: str, lock: threading.Lock, dataset: Any) -> None:
        self._path, self._name, self._lock = path, name, lock
        self.shape: tuple[int, ...] = dataset.shape or ()
        self.dtype = dataset.dtype
        # netCDF's markers of missing values; NaN is found when samples are fetched.
        self._missing = [dataset.attrs[key] for key in ("_FillValue", "missing_value") if key in dataset.attrs]
        self._dataset: Any = None
        self._process = -1

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> np.ndarray:
        """Read rows (k,) int64 in any order, or a slice; h5py itself requires increasing indices."""
        unique, back = (rows, ...) if isinstance(rows, slice) else np.unique(rows, return_inverse=True)
        try:
            with self._lock:
                # An open HDF5 file cannot be used after a fork.
                if self._process != os.getpid():
                    import h5py

                    self._dataset, self._process = h5py.File(self._path, "r")[self._name], os.getpid()
                values = self._dataset[unique][back]
        except (OSError, KeyError) as error:
            raise unreadable(f"{self._path}: {self._name}", error, "HDF5 dataset") from error
        for missing in self._missing:
            if np.isin(values, missing).any():
                what = f"'{self._name}' holds {np.ravel(missing)[0]}, which marks a missing value"
                raise DataError(what, where=str(self._path), fix="leave these samples out")
        return values


def read_hdf5(path: Path, choose: Choose) -> dict[str, Any]:
    import h5py

    lock, datasets = threading.Lock(), {}
    try:
        with h5py.File(path, "r") as file:
            for name in choose([*file.keys()]):  # ``keys`` follows no link
                _refuse_foreign(path, name, file)
                item = file[name]
                if isinstance(item, h5py.Dataset):
                    _check_size(path, name, item)
                    if packed := [key for key in PACKED if key in item.attrs]:
                        what = f"'{name}' has a {packed[0]}: its numbers are packed, as by netCDF"
                        raise DataError(what, where=str(path), fix="store the unpacked numbers")
                    datasets[name] = Hdf5Rows(path, name, lock, item)
    except (OSError, KeyError, TypeError) as error:
        raise unreadable(path, error, "HDF5 file") from error
    return datasets


def _check_size(path: Path, name: str, item: Any) -> None:
    """Check sizes first: HDF5 allocates whole chunks, and returns zeros for rows that were never written."""
    import h5py

    where, stored = f"{path}: {name}", item.id.get_storage_size()
    if item.nbytes > max(1 << 26, stored * LEAST_STORED):
        claimed = f"{item.shape} {item.dtype}, {in_units(item.nbytes)}"
        what = f"the dataset claims {claimed}, and only {stored:,} bytes of it were written"
        raise DataError(what, where=where, fix="write the file again")
    if item.size and item.id.get_space_status() != h5py.h5d.SPACE_STATUS_ALLOCATED:
        what = f"part of it, {item.shape} {item.dtype}, was never written, and would be read as {item.fillvalue}"
        raise DataError(what, where=where, fix="write all rows, or make the data set as long as what was written")
    if item.chunks:
        chunk = math.prod(item.chunks) * item.dtype.itemsize
        fix = "write it with smaller chunks, of some samples each: create_dataset(..., chunks=...)"
        check_free(2 * chunk, f"reading a sample, of chunks {item.chunks},", where, fix)


def _refuse_foreign(path: Path, name: str, file: Any) -> None:
    """Refuse a link or a virtual dataset, which could point to any other file of this host."""
    import h5py

    what = "a link" if not isinstance(file.get(name, getlink=True), h5py.HardLink) else ""
    if not what and isinstance(file[name], h5py.Dataset) and (file[name].is_virtual or file[name].external):
        what = "kept in another file"
    if what:
        raise DataError(f"'{name}' is {what}; only datasets of the file itself are read", where=str(path))


# ---- Parquet


def parquet_size(path: Path, names: Sequence[str]) -> int:
    """Return the uncompressed size of these columns in bytes."""
    from pyarrow import parquet

    about, wanted = parquet.ParquetFile(path).metadata, set(names)
    groups = (about.row_group(k) for k in range(about.num_row_groups))
    columns = (group.column(k) for group in groups for k in range(group.num_columns))
    return sum(column.total_uncompressed_size for column in columns if column.path_in_schema in wanted)


# ---- text


def text_files(path: Path) -> list[Path]:
    """Return [path] for a file, or the text files of a folder, sorted by name."""
    if not path.is_dir():
        return [path]
    listed = sorted(file.relative_to(path).parts for file in path.rglob("*") if file.suffix.lower() in TEXT_SUFFIXES)
    files = [path.joinpath(*parts) for parts in listed if not any(part.startswith(".") for part in parts)]
    files = [file for file in files if file.is_file()]
    if not files:
        raise DataError("no text files in this folder", where=str(path), fix=f"known: {' '.join(TEXT_SUFFIXES)}")
    return files


def read_text(path: Path) -> np.ndarray:
    """Return the bytes of a file (memory-mapped), or of the text files of a folder, concatenated."""
    files = text_files(path)
    try:
        if len(files) == 1 and files[0].stat().st_size:
            return np.asarray(np.memmap(files[0], np.uint8, "r"))
        check_free(
            2 * sum(file.stat().st_size for file in files), "joining the files", str(path), "join them in one file"
        )
        return np.concatenate([np.fromfile(file, np.uint8) for file in files])
    except OSError as error:
        raise unreadable(error.filename or path, error, "text file") from error


def read_documents(path: Path) -> list[str]:
    """Return the text of each file; bytes that are not UTF-8 become U+FFFD."""
    files = text_files(path)
    try:
        # Python stores 1 to 4 bytes a character, and the text is split into sentences.
        check_free(4 * sum(file.stat().st_size for file in files), "splitting the text", str(path), "give less text")
        return [file.read_text(encoding="utf-8", errors="replace") for file in files]
    except OSError as error:
        raise unreadable(error.filename or path, error, "text file") from error


def python_documents() -> list[str]:
    """Return English text that every host has: Python's help topics and the docstrings of its standard library."""
    # Of each module that is a single file. The files are parsed, not imported.
    from pydoc_data.topics import topics

    files = [path for path in sorted(Path(os.__file__).parent.glob("*.py")) if path.stem in sys.stdlib_module_names]
    return [text for _, text in sorted(topics.items())] + [docstrings(path.read_bytes()) for path in files]


def docstrings(code: bytes) -> str:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(ast.parse(code)) if isinstance(node, documented))
    return "\n\n".join(filter(None, map(ast.get_docstring, nodes)))


# ---- images


def resize(images: np.ndarray, side: int) -> np.ndarray:
    """Resize images (n, h, w) of uint8 or float32 to (n, side, side), bilinear."""
    from PIL import Image

    out = np.empty((len(images), side, side), images.dtype)
    for k, image in enumerate(images):
        out[k] = np.asarray(Image.fromarray(image).resize((side, side), Image.Resampling.BILINEAR))
    return out
