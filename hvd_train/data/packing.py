"""A data set as a few large files: each field of a part (train, val) in .npy shards, which are mapped, not read.

Samples keep their order and their split, so training gives the same weights as from the files they came from. The
manifest is written last: a folder without one was not finished.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from hvd_train.config import DataConfig, TaskConfig
from hvd_train.data.arrays import is_image
from hvd_train.data.images import part_of
from hvd_train.errors import ConfigError, DataError, TrainError
from hvd_train.files import LEFT, Aside
from hvd_train.protocol import Field, Fields, Sample, Source

MANIFEST, VERSION = "manifest.json", 1
SHARD_BYTES = 256 << 20  # of a shard's largest field: few files, and enough of them to share among ranks
PIECE_BYTES = 16 << 20  # what is fetched at once
PARTS = ("train", "val", "test")
KINDS = ("inputs", "labels")
AGAIN = "pack it again"


class World(Protocol):
    """The processes that pack together; mpi4py's communicators are such."""

    rank: int
    size: int

    def allgather(self, sendobj: Any) -> list[Any]: ...


class Alone:
    rank, size = 0, 1

    def allgather(self, sendobj: Any) -> list[Any]:
        return [sendobj]


class _Facts(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Shard(_Facts):
    """A file: ``count`` rows of one field, how many bytes it has, and the SHA-256 of all of them."""

    file: str
    count: PositiveInt
    size: PositiveInt
    sha256: str


class Column(_Facts):
    field: Field
    shards: list[Shard]


class Part(_Facts):
    """``rows``: of every shard but the last."""

    count: PositiveInt
    rows: PositiveInt
    fingerprint: str
    note: str
    inputs: dict[str, Column]
    labels: dict[str, Column]

    def columns(self) -> Iterator[tuple[str, str, Column]]:
        for kind in KINDS:
            for name, column in getattr(self, kind).items():
                yield kind, name, column


class Manifest(_Facts):
    """``classes``: of each label, whether the task took it for one of 0, 1, ... when it was packed.
    ``vocabulary``: of a text whose words are numbered, JSON."""

    version: Literal[1]
    packed_from: str
    classes: dict[str, bool]
    ignore_index: int
    train: Part
    val: Part
    test: Part | None = None
    vocabulary: str = ""

    def shards(self) -> Iterator[tuple[Column, Shard]]:
        for part in filter(None, (self.train, self.val, self.test)):
            for _, _, column in part.columns():
                for shard in column.shards:
                    yield column, shard


# ---- writing


def pack(
    train: Source, val: Source, test: Source | None, told: str, task: TaskConfig, folder: Path, world: World
) -> Manifest:
    """Writes all parts, each rank its shards; every rank returns the manifest, or raises what went wrong on one.

    ``told``: where the samples come from, for people.
    """
    _together(world, lambda: _fresh(folder) if world.rank == 0 else None)
    parts = {}
    for name, source in zip(PARTS, (train, val, test), strict=True):
        if source is not None:
            parts[name] = _pack_part(name, source, folder, world)
    manifest = Manifest(
        version=VERSION,
        packed_from=told,
        classes=_classes(train.sample, task),
        ignore_index=task.ignore_index,
        vocabulary=getattr(train, "vocabulary", ""),
        **parts,
    )

    def finish() -> None:
        if world.rank == 0:
            with _Whole(folder / MANIFEST) as file:
                file.write(json.dumps(manifest.model_dump(), indent=1).encode() + b"\n")

    _together(world, finish)
    return manifest


def _classes(sample: Sample, task: TaskConfig) -> dict[str, bool]:
    return {name: task.classes(name, len(sample.labels) == 1) for name in sample.labels}


def _fresh(folder: Path) -> None:
    if (folder / MANIFEST).exists():
        raise ConfigError("holds a packed data set already", where=str(folder), fix="remove it, or name another folder")
    if folder.exists() and not folder.is_dir():
        raise ConfigError("is a file", where=str(folder), fix="name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"*{LEFT}"):  # of a packing that was ended
        left.unlink()


def _pack_part(name: str, source: Source, folder: Path, world: World) -> Part:
    n, fields = len(source), {kind: getattr(source.sample, kind) for kind in KINDS}
    widths = [_width(field) for kind in KINDS for field in fields[kind].values()]
    rows = max(1, min(SHARD_BYTES // max(*widths, 1), -(-n // world.size)))
    piece = max(1, min(rows, PIECE_BYTES // max(1, sum(widths))))

    def write() -> dict[tuple[str, str], dict[int, Shard]]:
        made: dict[tuple[str, str], dict[int, Shard]] = {}
        for number in range(world.rank, -(-n // rows), world.size):
            span = range(number * rows, min(n, (number + 1) * rows))
            for (kind, field), shard in _write(name, number, source, span, piece, folder).items():
                made.setdefault((kind, field), {})[number] = shard
        return made

    found = _together(world, write)
    columns: dict[str, dict[str, Column]] = {kind: {} for kind in KINDS}
    for kind in KINDS:
        for field, facts in fields[kind].items():
            own = {number: shard for made in found for number, shard in made.get((kind, field), {}).items()}
            columns[kind][field] = Column(field=facts, shards=[own[number] for number in sorted(own)])
    note = "\n".join(filter(None, [*getattr(source, "remarks", ()), getattr(source, "note", "")]))
    return Part(count=n, rows=rows, fingerprint=source.fingerprint, note=note, **columns)


def _write(
    part: str, number: int, source: Source, span: range, piece: int, folder: Path
) -> dict[tuple[str, str], Shard]:
    """One shard of every field."""
    sample, files = source.sample, {}
    try:
        for kind in KINDS:
            for name, field in getattr(sample, kind).items():
                files[kind, name] = file = _Whole(folder / f"{part}-{kind}-{name}-{number:05d}.npy")
                facts = {"descr": np.lib.format.dtype_to_descr(np.dtype(field.dtype)), "fortran_order": False}
                np.lib.format.write_array_header_2_0(file, {**facts, "shape": (len(span), *field.shape)})
        for start in range(span.start, span.stop, piece):
            taken = source.fetch(np.arange(start, min(span.stop, start + piece)))
            for kind, fields in zip(KINDS, taken, strict=True):
                for name, field in getattr(sample, kind).items():
                    files[kind, name].write(np.ascontiguousarray(fields[name], field.dtype).data)
        for file in files.values():
            file.close()
    except BaseException:
        for file in files.values():
            file.forget()
        raise
    return {
        key: Shard(file=file.path.name, count=len(span), size=file.size, sha256=file.digest.hexdigest())
        for key, file in files.items()
    }


class _Whole(Aside):
    """A file that is whole or not there, with its size and digest."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.size, self.digest = 0, hashlib.sha256()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.digest.update(view)
        self.size += view.nbytes
        return self.stream.write(view)


def _together(world: World, work: Callable[[], Any]) -> list[Any]:
    """Every rank's result; what goes wrong on one of them is raised on all, so that nobody waits."""
    made: Any = None
    error: TrainError | None = None
    try:
        made = work()
    except TrainError as caught:
        error = caught
    except OSError as caught:
        error = DataError(f"cannot be written: {caught.strerror}", where=str(caught.filename or ""))
    results = []
    told = error and (type(error), error.what, error.where, error.fix)
    for failed, result in world.allgather((told, made)):
        if failed:
            kind, what, where, fix = failed
            raise kind(what, where=where, fix=fix, common=True)
        results.append(result)
    return results


def _width(field: Field) -> int:
    return math.prod(field.shape) * np.dtype(field.dtype).itemsize


# ---- reading


def read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        fix = "see 'hvd-train data pack --help'; where packing was ended, pack again"
        raise DataError("no packed data set, or one that was not finished", where=str(path), fix=fix) from error
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path)) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
        raise DataError(f"no manifest of a packed data set: {what}"[:300], where=str(path), fix=AGAIN) from error


def open_packed(
    folder: Path, config: DataConfig, task: TaskConfig, labelled: bool = True
) -> tuple[Packed, Packed, Packed | None]:
    """(train, val, test); sizes of all files are looked at, their contents are not (``check``). ``labelled``: whether
    labels are looked at."""
    manifest = read_manifest(folder)
    found = manifest.train, manifest.val, manifest.test
    train, val, *tests = (Packed(folder, part, config.num_classes, config.images) for part in found if part)
    train.vocabulary = manifest.vocabulary
    if config.target == "labels" and labelled:
        _check_task(manifest, train.sample.joined(val.sample), config, task, folder)
    return train, val, tests[0] if tests else None


def _check_task(manifest: Manifest, sample: Sample, config: DataConfig, task: TaskConfig, folder: Path) -> None:
    """Labels were made for the task of the packing."""
    for name, wanted in _classes(sample, task).items():
        field = sample.labels[name]
        if wanted != manifest.classes.get(name):
            was, now = ("classes" if yes else "numbers" for yes in (not wanted, wanted))
            what = f"labels '{name}' were packed as {was}, and task.loss wants {now}"
            raise DataError(what, where=str(folder), fix="pack with -c and this configuration's task.loss")
        if config.num_classes and field.classes and config.num_classes != field.classes:
            what = f"packed with {field.classes} classes, and data.num_classes is {config.num_classes}"
            raise DataError(what, where=str(folder), fix="leave it out, or set it when packing")
        if field.masked and task.ignore_index != manifest.ignore_index:
            what = f"packed with ignore_index {manifest.ignore_index}, and task.ignore_index is {task.ignore_index}"
            raise DataError(what, where=str(folder), fix=f"set task.ignore_index: {manifest.ignore_index}")


class Packed:
    """A part of a packed data set."""

    def __init__(self, folder: Path, part: Part, num_classes: int | None = None, images: bool | None = None) -> None:
        self._count, self._rows = part.count, part.rows
        self.fingerprint, self.note, self.vocabulary = part.fingerprint, part.note, ""
        made: dict[str, dict[str, Field]] = {kind: {} for kind in KINDS}
        self._maps: dict[str, dict[str, list[np.ndarray]]] = {kind: {} for kind in KINDS}
        for kind, name, column in part.columns():
            counts = [shard.count for shard in column.shards]
            if sum(counts) != part.count or any(count != part.rows for count in counts[:-1]):
                what = f"the shards of '{name}' hold {sum(counts):,} samples, not {part.count:,}"
                raise DataError(what, where=str(folder / MANIFEST), fix=AGAIN)
            made[kind][name] = column.field
            if kind == "inputs" and images is not None:
                made[kind][name] = _declared(column.field, images, len(part.inputs) == 1)
            self._maps[kind][name] = [_mapped(folder, column.field, shard) for shard in column.shards]
        known = any(field.classes for field in made["labels"].values())
        self.sample = Sample(made["inputs"], made["labels"], None if known else num_classes)

    def __len__(self) -> int:
        return self._count

    def fetch(self, indices: np.ndarray) -> tuple[Fields, Fields]:
        shards, rows = np.divmod(np.asarray(indices, np.int64), self._rows)
        inputs, labels = (
            {
                name: _taken(maps, shards, rows).reshape(-1, *getattr(self.sample, kind)[name].shape)
                for name, maps in self._maps[kind].items()
            }
            for kind in KINDS
        )
        return inputs, labels


def _declared(field: Field, images: bool, alone: bool) -> Field:
    """An input's field by ``data.images``, which need not be what it was when the data was packed."""
    image = is_image(field.shape, np.dtype(field.dtype), alone, images)
    return replace(field, shape=(*field.shape, 1) if image and len(field.shape) == 2 else field.shape, image=image)


def _taken(maps: list[np.ndarray], shards: np.ndarray, rows: np.ndarray) -> np.ndarray:
    if len(maps) == 1:
        return maps[0][rows]
    out = np.empty((len(rows), *maps[0].shape[1:]), maps[0].dtype)
    for number in np.unique(shards):
        chosen = shards == number
        out[chosen] = maps[number][rows[chosen]]
    return out


def _mapped(folder: Path, field: Field, shard: Shard) -> np.ndarray:
    path = folder / shard.file
    _check_size(path, shard)
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"no .npy file: {str(error).splitlines()[0]}", where=str(path), fix=AGAIN) from error
    wanted = (shard.count, *field.shape)
    if found.shape != wanted or found.dtype != np.dtype(field.dtype):
        what = f"holds {found.shape} {found.dtype}, the manifest says {wanted} {field.dtype}"
        raise DataError(what, where=str(path), fix=AGAIN)
    return np.asarray(found)


def _check_size(path: Path, shard: Shard) -> None:
    if Path(shard.file).name != shard.file:
        raise DataError(f"names '{shard.file}', which lies elsewhere", where=str(path.parent / MANIFEST), fix=AGAIN)
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path), fix=AGAIN) from error
    if size != shard.size:
        what = f"{'cut off' if size < shard.size else 'too long'}: {size:,} bytes, {shard.size:,} were written"
        raise DataError(what, where=str(path), fix=AGAIN)


def check(folder: Path, world: World) -> Manifest:
    """Reads every file and compares its SHA-256, each rank its share; the first fault is raised on all ranks."""
    manifest = _together(world, lambda: read_manifest(folder))[0]

    def look() -> None:
        for number, (column, shard) in enumerate(manifest.shards()):
            if number % world.size != world.rank:
                continue
            _mapped(folder, column.field, shard)
            path = folder / shard.file
            with open(path, "rb") as stream:
                if hashlib.file_digest(stream, "sha256").hexdigest() != shard.sha256:
                    raise DataError("damaged: its SHA-256 is not the one that was written", where=str(path), fix=AGAIN)

    _together(world, look)
    return manifest


# ---- what the command line tells


def facts(manifest: Manifest) -> str:
    """1,437 training and 360 validation samples, 4 files, 1.5 MB."""
    shards = [shard for _, shard in manifest.shards()]
    size = sum(shard.size for shard in shards) / 1e6
    tests = f", {manifest.test.count:,} test samples" if manifest.test else ""
    return (
        f"{manifest.train.count:,} training and {manifest.val.count:,} validation samples{tests}, {len(shards)} files, "
        f"{size:,.1f} MB"
    )


MARKS: Mapping[str, str] = {"*.npy": "npy", "*-images*idx3-ubyte*": "idx", "data_batch_1.bin": "cifar10"}
SUFFIXES = {
    ".npz": "npz", ".h5": "hdf5", ".hdf5": "hdf5", ".csv": "table", ".tsv": "table", ".parquet": "table",
}  # fmt: skip


def kind_of(path: Path) -> str:
    """The data.name of a file or folder by its looks."""
    if path.is_dir():
        listed = [name for pattern, name in MARKS.items() if next(path.glob(pattern), None)]
        files = (file for file in path.iterdir() if SUFFIXES.get(file.suffix.lower()) == "table")
        tables = any(part_of(file.stem) == "train" for file in files)
        return listed[0] if listed else "table" if tables else "imagefolder"
    if not path.exists():
        raise DataError("there is no such file or folder", where=str(path))
    if path.suffix.lower() not in SUFFIXES:
        fix = "give -c FILE, or --set data.name=..."
        raise DataError("what kind of data it is cannot be told by its name", where=str(path), fix=fix)
    return SUFFIXES[path.suffix.lower()]
