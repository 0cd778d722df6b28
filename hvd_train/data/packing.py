"""Pack a data set into a few large files: .npy shards for each field of a part (train, val).

Samples keep their order and their split, so training gives the same weights as on the original files. The manifest is
written last: a folder without one is incomplete.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hvd_train.config import TaskConfig
from hvd_train.data.packed import label_classes, mapped
from hvd_train.data.packed_manifest import (
    AGAIN,
    KINDS,
    MANIFEST,
    VERSION,
    PackedColumn,
    PackedPart,
    PackManifest,
    Shard,
    read_manifest,
)
from hvd_train.errors import ConfigError, DataError, TrainError
from hvd_train.files import LEFT, AtomicFile
from hvd_train.protocol import Field, Source

# Size of a shard's largest field: few files, but enough of them to distribute over ranks.
SHARD_BYTES = 256 << 20
PIECE_BYTES = 16 << 20  # fetched at once
PARTS = ("train", "val", "test")


class Processes(Protocol):
    """The processes that pack together, such as a communicator of mpi4py."""

    rank: int
    size: int

    def allgather(self, sendobj: Any) -> list[Any]: ...


class Alone:
    """A world of one process."""

    rank, size = 0, 1

    def allgather(self, sendobj: Any) -> list[Any]:
        return [sendobj]


def pack(
    train: Source, val: Source, test: Source | None, origin: str, task: TaskConfig, folder: Path, world: Processes
) -> PackManifest:
    """Write all parts, with the shards distributed over ranks; return the manifest, or raise an error, on every rank.

    ``origin``: a description of where the samples come from.
    """
    _on_all_ranks(world, lambda: _fresh(folder) if world.rank == 0 else None)
    parts = {}
    for name, source in zip(PARTS, (train, val, test), strict=True):
        if source is not None:
            parts[name] = _pack_part(name, source, folder, world)
    manifest = PackManifest(
        version=VERSION,
        packed_from=origin,
        classes=label_classes(train.sample, task),
        ignore_index=task.ignore_index,
        vocabulary=getattr(train, "vocabulary", ""),
        fitted=getattr(train, "fitted", None),
        **parts,
    )

    def finish() -> None:
        if world.rank == 0:
            with _HashedFile(folder / MANIFEST) as file:
                file.write(json.dumps(manifest.model_dump(), indent=1).encode() + b"\n")

    _on_all_ranks(world, finish)
    return manifest


def _fresh(folder: Path) -> None:
    """Create the folder; raise ConfigError if it holds packed data already."""
    if (folder / MANIFEST).exists():
        raise ConfigError(
            "the folder holds a packed data set already", where=str(folder), fix="remove it, or name another folder"
        )
    if folder.exists() and not folder.is_dir():
        raise ConfigError("this is a file", where=str(folder), fix="name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"*{LEFT}"):  # of an interrupted packing
        left.unlink()


def _pack_part(name: str, source: Source, folder: Path, world: Processes) -> PackedPart:
    """Write one part, and return its entry of the manifest."""
    n, fields = len(source), {kind: getattr(source.sample, kind) for kind in KINDS}
    widths = [_width(field) for kind in KINDS for field in fields[kind].values()]
    # Samples of a shard: limited by its size, and such that every rank has a shard to write.
    rows = max(1, min(SHARD_BYTES // max(*widths, 1), -(-n // world.size)))
    piece = max(1, min(rows, PIECE_BYTES // max(1, sum(widths))))

    def write() -> dict[tuple[str, str], dict[int, Shard]]:
        shards: dict[tuple[str, str], dict[int, Shard]] = {}
        for number in range(world.rank, -(-n // rows), world.size):
            span = range(number * rows, min(n, (number + 1) * rows))
            for (kind, field), shard in _write(name, number, source, span, piece, folder).items():
                shards.setdefault((kind, field), {})[number] = shard
        return shards

    shards_of_ranks = _on_all_ranks(world, write)
    columns: dict[str, dict[str, PackedColumn]] = {kind: {} for kind in KINDS}
    for kind in KINDS:
        for field, facts in fields[kind].items():
            numbered = [pair for shards in shards_of_ranks for pair in shards.get((kind, field), {}).items()]
            in_order = [shard for _, shard in sorted(numbered, key=lambda pair: pair[0])]
            columns[kind][field] = PackedColumn(field=facts, shards=in_order)
    note = "\n".join(filter(None, [*getattr(source, "remarks", ()), getattr(source, "note", "")]))
    return PackedPart(count=n, rows=rows, fingerprint=source.fingerprint, note=note, **columns)


def _write(
    part: str, number: int, source: Source, span: range, piece: int, folder: Path
) -> dict[tuple[str, str], Shard]:
    """Write shard ``number`` of every field: the samples of ``span``, ``piece`` of them at a time."""
    sample, files = source.sample, {}
    try:
        for kind in KINDS:
            for name, field in getattr(sample, kind).items():
                # The .npy header with the final shape comes first, so that rows can be appended.
                files[kind, name] = file = _HashedFile(folder / f"{part}-{kind}-{name}-{number:05d}.npy")
                facts = {"descr": np.lib.format.dtype_to_descr(np.dtype(field.dtype)), "fortran_order": False}
                np.lib.format.write_array_header_2_0(file, {**facts, "shape": (len(span), *field.shape)})
        for start in range(span.start, span.stop, piece):
            fetched = source.fetch(np.arange(start, min(span.stop, start + piece)))
            for kind, fields in zip(KINDS, fetched, strict=True):
                for name, field in getattr(sample, kind).items():
                    files[kind, name].write(np.ascontiguousarray(fields[name], field.dtype).data)
        for file in files.values():
            file.close()
    except BaseException:
        for file in files.values():
            file.discard()
        raise
    return {
        key: Shard(file=file.path.name, count=len(span), size=file.size, sha256=file.digest.hexdigest())
        for key, file in files.items()
    }


class _HashedFile(AtomicFile):
    """An atomically written file that counts its size and computes its SHA-256."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.size, self.digest = 0, hashlib.sha256()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.digest.update(view)
        self.size += view.nbytes
        return self.stream.write(view)


def _width(field: Field) -> int:
    """Return the size of one sample in bytes."""
    return math.prod(field.shape) * np.dtype(field.dtype).itemsize


def check(folder: Path, world: Processes) -> PackManifest:
    """Read all files, distributed over ranks, and compare their SHA-256; the first error is raised on all ranks."""
    manifest = _on_all_ranks(world, lambda: read_manifest(folder))[0]

    def look() -> None:
        for number, (column, shard) in enumerate(manifest.shards()):
            if number % world.size != world.rank:
                continue
            mapped(folder, column.field, shard)
            path = folder / shard.file
            with open(path, "rb") as stream:
                if hashlib.file_digest(stream, "sha256").hexdigest() != shard.sha256:
                    raise DataError(
                        "the file is damaged: its SHA-256 is not the one that was written", where=str(path), fix=AGAIN
                    )

    _on_all_ranks(world, look)
    return manifest


def _on_all_ranks(world: Processes, work: Callable[[], Any]) -> list[Any]:
    """Run ``work`` on every rank and return all results; raise an error of one rank on all, so that none hangs."""
    result: Any = None
    error: TrainError | None = None
    try:
        result = work()
    except TrainError as caught:
        error = caught
    except OSError as caught:
        error = DataError(f"the packed data cannot be written: {caught.strerror}", where=str(caught.filename or ""))
    failure = error and (type(error), error.what, error.where, error.fix)
    everyone = world.allgather((failure, result))
    for failed, _ in everyone:
        if failed:
            kind, what, where, fix = failed
            raise kind(what, where=where, fix=fix, common=True)
    return [result for _, result in everyone]
