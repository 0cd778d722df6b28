"""Checkpoints: folders of safetensors files and a JSON manifest, committed by rename; nothing is ever unpickled.

Commit: write ``step-N.tmp-XXXX/``, fsync each file, write the manifest (size and SHA-256 of each) last, fsync, rename
to ``step-N``, fsync the parent; only then remove old ones. Saving a step again first moves the old folder to
``step-N.was-XXXX``, which counts as ``step-N`` until that exists. So after the first commit there is always a valid
checkpoint.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import ValidationError

from hvd_train import faults, files
from hvd_train.checkpoint.comparable import Measure
from hvd_train.checkpoint.manifest import MANIFEST, NAME, Progress, encode, read
from hvd_train.checkpoint.serialize import packed, unpack
from hvd_train.config import Config
from hvd_train.errors import CheckpointError, printable
from hvd_train.files import sync, write

SHARED_MODE = 0o770
AGAIN_SECONDS = 0.5  # after an I/O error that may be transient
T = TypeVar("T")
STALE = re.compile(r"step-[0-9]+\.(tmp|old)-[0-9a-f]+$")


@dataclass(frozen=True)
class Snapshot:
    """The complete state of a training at a step.

    ``model``: weights and running statistics by canonical names (protocol.Model.state). ``optimizer``: the update's
    replicated and sharded entries. ``local``: each rank's own state. ``meta``: JSON.
    """

    step: int
    epoch: int
    consumed: int
    model: dict[str, np.ndarray]
    optimizer: dict[str, np.ndarray]
    local: list[dict[str, np.ndarray]]
    meta: dict[str, Any]
    path: Path = Path()

    @property
    def tree(self) -> dict[str, np.ndarray]:
        """Model and optimizer together."""
        return self.model | self.optimizer

    def config(self) -> Config:
        """Return the configuration of the training that saved this state."""
        return _config(self.meta, self.path)

    @property
    def progress(self) -> Progress:
        return Progress(**self.meta["progress"])

    @property
    def framework(self) -> str:
        return self.meta["framework"]


def preflight(folder: Path, needed: int) -> None:
    """Check before training that checkpoints of ``needed`` bytes can be written."""
    probe = folder / f"step-0.tmp-{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write(probe, [b"probe"])
        probe.unlink()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise CheckpointError(f"the run folder cannot be written: {error.strerror}", where=str(folder)) from error
    if free < needed:
        what = f"the disk has no room for a checkpoint: {needed:,} bytes needed, {free:,} free"
        raise CheckpointError(what, where=str(folder), fix="make room, or set run_dir to another disk")


def place(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def save(folder: Path, snapshot: Snapshot, moved: Callable[[], None] = lambda: None) -> Path:
    """Commit ``folder/step-N``; replace one of the same step. Older ones are not touched.

    ``moved()`` is called after each write.
    """
    final = place(folder, snapshot.step)
    try:
        return _once_more(lambda: _commit(folder, final, snapshot, moved))
    except OSError as error:
        needed = sum(array.nbytes for array in snapshot.tree.values())
        free = shutil.disk_usage(folder).free if folder.is_dir() else 0
        room = f"; {needed:,} bytes needed, {free:,} free" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise CheckpointError(f"the checkpoint cannot be written: {error.strerror}{room}", where=str(final)) from error


def _once_more(work: Callable[[], T]) -> T:
    """Retry once after an I/O error that may be transient."""
    try:
        return work()
    except OSError as error:
        if error.errno not in (errno.EIO, errno.EINTR, errno.EAGAIN, errno.ESTALE, errno.ENOENT):
            raise
        time.sleep(AGAIN_SECONDS)
        return work()


def _commit(folder: Path, final: Path, snapshot: Snapshot, moved: Callable[[], None]) -> Path:
    parts = {"weights": snapshot.model, "optimizer": snapshot.optimizer}
    if any(snapshot.local):
        parts |= {f"rank-{rank}": tree for rank, tree in enumerate(snapshot.local)}
    temporary = folder / f"{final.name}.tmp-{secrets.token_hex(4)}"
    try:
        temporary.mkdir(parents=True)
        # Weights are private, unless the umask allows the group to write.
        temporary.chmod(SHARED_MODE if temporary.stat().st_mode & 0o020 else 0o700)
        entries: dict[str, dict[str, Any]] = {}
        for part, tree in parts.items():
            faults.at("write")
            entry = entries[f"{part}.safetensors"] = {"bytes": 0, "sha256": ""}
            write(temporary / f"{part}.safetensors", _noted(packed(tree), entry, moved))
            moved()
        # The manifest comes last: it holds sizes and hashes of the files.
        manifest = {
            "step": snapshot.step,
            "epoch": snapshot.epoch,
            "consumed": snapshot.consumed,
            "ranks": len(snapshot.local),
            "meta": snapshot.meta,
            "files": entries,
        }
        faults.at("manifest")
        write(temporary / MANIFEST, [encode(manifest)])
        # Before the rename: after a power cut a folder of a valid name must not lack its files.
        sync(temporary)
        # An older checkpoint of this step keeps a valid name until the new one is renamed.
        before = [final] if final.exists() else []
        if before:
            before = [final.with_name(f"{final.name}.was-{secrets.token_hex(4)}")]
            os.rename(final, before[0])
        faults.at("rename")
        os.rename(temporary, final)
        faults.at("commit")
        # Remove the old one only after the rename is on the disk.
        sync(folder)
        for path in before:
            with suppress(OSError):  # ``prune`` tries again
                _remove(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def _noted(
    pieces: Iterable[bytes | memoryview], entry: dict[str, Any], moved: Callable[[], None]
) -> Iterator[bytes | memoryview]:
    """Yield the pieces unchanged, and store their total length and hash in ``entry``."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
        entry["bytes"] += len(piece)
        yield piece
        moved()
    entry["sha256"] = digest.hexdigest()


def _remove(path: Path) -> None:
    faults.at("remove")
    # Rename first: a kill in between leaves no half-removed folder under a valid name.
    doomed = path.with_name(f"{path.name.partition('.')[0]}.old-{secrets.token_hex(4)}")
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def load(path: Path, model_only: bool = False) -> Snapshot:
    """Read a checkpoint. The size and SHA-256 of each file are verified before its content is used.

    ``model_only``: the files of the optimizer and of ranks are verified, but not kept in memory.
    """
    from safetensors import SafetensorError, safe_open

    (manifest, meta), trees = read(path), {}
    for name, entry in manifest.files.items():
        file = path / name
        try:
            if file.is_symlink():
                raise CheckpointError("the file is a symbolic link", where=str(file))
            if file.stat().st_size != entry.bytes:
                raise CheckpointError(f"the file has {file.stat().st_size:,} of {entry.bytes:,} bytes", where=str(file))
            needed = name == "weights.safetensors" or not model_only
            if needed:
                content = files.content(file, entry.bytes)
                digest = hashlib.sha256(content).hexdigest()
            else:
                with files.opened(file, entry.bytes) as stream:
                    digest = hashlib.file_digest(stream, "sha256").hexdigest()
            # Verify before parsing: no parser sees damaged data.
            if digest != entry.sha256:
                raise CheckpointError("the file is damaged (its SHA-256 differs)", where=str(file))
            if needed:
                trees[name] = unpack(content)
            else:
                with safe_open(file, "numpy"):  # reads the header: a foreign file's hash may be valid
                    pass
        except OSError as error:
            raise CheckpointError(f"the file cannot be read: {error.strerror}", where=str(file)) from error
        except (SafetensorError, ValueError) as error:
            raise CheckpointError(f"this is not a safetensors file: {error}", where=str(file)) from error
    model, optimizer = (trees.get(f"{part}.safetensors", {}) for part in ("weights", "optimizer"))
    local = [trees.get(f"rank-{rank}.safetensors", {}) for rank in range(manifest.ranks)]
    return Snapshot(manifest.step, manifest.epoch, manifest.consumed, model, optimizer, local, meta, path)


def find(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of committed checkpoints, oldest first. "latest" is computed, never a link."""
    try:
        paths = _once_more(lambda: sorted(folder.iterdir()) if folder.is_dir() else [])
    except OSError as error:
        raise CheckpointError(f"the folder cannot be read: {error.strerror}", where=str(folder)) from error
    checkpoints: dict[int, Path] = {}
    for path in paths:  # prefer step-N to step-N.was-XXXX
        match = NAME.match(path.name)
        if match:
            checkpoints.setdefault(int(match.group(1)), path)
    return sorted(checkpoints.items())


def leave(folder: Path, step: int) -> Path | None:
    """Move checkpoints of later steps into ``left-XXXX``, for a run that resumes from ``step``. Returns None if there
    are none.

    They belong to another run, but would count as this run's newest.
    """
    later = [path for path in folder.iterdir() if (name := NAME.match(path.name)) and int(name.group(1)) > step]
    if not later:
        return None
    left = folder / f"left-{secrets.token_hex(4)}"
    left.mkdir()
    for path in sorted(later, reverse=True):  # newest first, so that a kill in between leaves only older ones
        os.rename(path, left / path.name)
    sync(folder)
    return left


def newest(
    folder: Path, warn: Callable[[str], None], memory: Path | None = None, model_only: bool = False
) -> Snapshot | None:
    """Read the newest valid checkpoint, including those in ``memory``. Warns of each damaged one. Returns None if there
    is none.

    ``model_only``: as for ``load``.
    """
    checkpoints = sorted([*find(folder), *(find(memory) if memory else [])])
    for _, path in reversed(checkpoints):
        try:
            return load(path, model_only)
        except CheckpointError as error:
            last = error
            warn(f"checkpoint {path.name} cannot be used ({error}); trying the one before")
    if checkpoints:
        raise CheckpointError(f"no checkpoint can be used; the oldest one: {last.what}", where=last.where)
    return None


def newest_readable(folder: Path) -> Path:
    """Return the newest checkpoint with a readable manifest and files of the right sizes. Their content is not read."""
    checkpoints = find(folder)
    if not checkpoints:
        raise CheckpointError("there is no checkpoint", where=str(folder))
    for _, path in reversed(checkpoints):
        with suppress(CheckpointError, OSError):
            manifest, _ = read(path)
            if all((path / name).stat().st_size == entry.bytes for name, entry in manifest.files.items()):
                return path
    read(checkpoints[-1][1])  # raises the error for the newest one
    raise CheckpointError("no checkpoint can be used: files are missing or cut short", where=str(folder))


def config_of(path: Path) -> dict[str, Any]:
    """Return the configuration saved in the checkpoint. Other files are not read."""
    return read(path)[1]["config"]


def _config(meta: dict[str, Any], path: Path) -> Config:
    try:
        return Config.model_validate(meta["config"])
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join("".join(c for c in str(part) if c.isprintable())[:60] for part in first["loc"])
        said = printable(first["msg"][:200], one_line=True)
        what = f"the checkpoint holds a configuration that this version cannot read ({key}: {said})"
        raise CheckpointError(what, where=str(path)) from error


def _no_warning(text: str) -> None:
    """Ignore warnings: the user has been warned, or the caller polls all checkpoints."""


def _ranked(
    folder: Path, monitor: str, mode: str, warn: Callable[[str], None] = _no_warning, strict: bool = False
) -> list[tuple[float, int, Path]]:
    """Return (monitored value, negated if larger is better; step; path) of checkpoints with a value, best first.

    Only values that are comparable with the newest one's count: same loss and data. ``warn`` is called for each damaged
    manifest, whose checkpoint may have been the best. ``strict``: raise for a manifest that cannot be read now, but may
    be intact.
    """
    sign, rows, now = (1 if mode == "min" else -1), [], None
    for step, path in reversed(find(folder)):
        try:
            _, meta = read(path)
            measure = Measure.of(_config(meta, path), meta["data"], meta["world_size"])
        except CheckpointError as error:
            cause = error.__cause__
            if strict and isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
                raise
            warn(f"checkpoint {path.name} cannot be used ({error}); using the best of the others")
            continue
        now = now or measure
        value = meta["monitor"].get(monitor)
        if value is not None and math.isfinite(value) and not measure.difference(now, monitor):
            rows.append((sign * float(value), step, path))
    return sorted(rows)


def best(folder: Path, monitor: str, mode: str) -> str:
    """Return the value, epoch and name of the best checkpoint; {} if none has the ``monitor``."""
    ranked = _ranked(folder, monitor, mode)
    if not ranked:
        return ""
    manifest, meta = read(ranked[0][2])
    epoch = manifest.epoch + (manifest.consumed > 0)  # a checkpoint within an epoch belongs to that epoch
    return f"{monitor} {meta['monitor'][monitor]:.4f} in epoch {epoch}, checkpoint {ranked[0][2].name}"


def prune(
    folder: Path,
    *,
    save_top_k: int,
    save_last: bool,
    monitor: str,
    mode: str,
    warn: Callable[[str], None] = _no_warning,
) -> None:
    """Keep the k best and the newest two (in case one is damaged); remove others and leftovers of killed runs.

    Without ``save_last`` only the k best are kept, at least one. What cannot be removed stays with a warning, and the
    next call tries again.
    """
    try:
        _once_more(lambda: _prune(folder, save_top_k, save_last, monitor, mode))
    except (OSError, CheckpointError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        warn(f"old checkpoints cannot be removed: {why}; {folder}; the next save tries again")


def _prune(folder: Path, save_top_k: int, save_last: bool, monitor: str, mode: str) -> None:
    for path in folder.iterdir():
        name = NAME.match(path.name)
        if STALE.match(path.name):  # never committed, or partly removed
            shutil.rmtree(path, ignore_errors=True)
        elif name and name.group(2):  # a save of the same step was killed between its two renames
            final = path.with_name(path.name.removesuffix(name.group(2)))
            _remove(path) if final.exists() else os.rename(path, final)
    checkpoints = find(folder)
    keep = {path for _, _, path in _ranked(folder, monitor, mode, strict=True)[:save_top_k]}
    keep |= {path for _, path in checkpoints[-2 if save_last else -1 :]} if save_last or not keep else set()
    for _, path in checkpoints:
        if path not in keep:
            _remove(path)


def choose(run_dir: Path, which: str, monitor: str, mode: str, warn: Callable[[str], None] = _no_warning) -> Snapshot:
    """Read and verify the model for --checkpoint: the newest intact one, the best by ``monitor``, or a path."""
    if which != "last":
        return load(resolve(run_dir, which, monitor, mode, warn), model_only=True)
    snapshot = newest(run_dir / "checkpoints", warn, model_only=True)
    if snapshot is None:
        raise CheckpointError("there is no checkpoint", where=str(run_dir / "checkpoints"))
    first = newest_readable(run_dir / "checkpoints")
    if config_of(first) != snapshot.meta["config"]:
        what = f"{first.name} is damaged, and the one before it was trained with another configuration"
        raise CheckpointError(what, where=str(first), fix=f"take that one: --checkpoint {snapshot.path}")
    return snapshot


def resolve(
    run_dir: Path,
    which: str,
    monitor: str = "val_loss",
    mode: str = "min",
    warn: Callable[[str], None] = _no_warning,
) -> Path:
    """Return a checkpoint's path. ``which``: ``best``, ``last``, its name, or its, its run's or ``checkpoints``'
    path."""
    folder = run_dir / "checkpoints"
    if which == "best":
        ranked = _ranked(folder, monitor, mode, warn)
        if ranked:
            return ranked[0][2]
        raise CheckpointError(f"no checkpoint has a {monitor}", where=str(folder), fix="use 'last' or a path")
    if which != "last":
        path, checkpoints = Path(which), dict(find(folder))
        step = NAME.match(path.name)
        if (path / MANIFEST).exists() or (step and path.is_dir()):
            return path
        if step and path.name == which and int(step[1]) in checkpoints:
            return checkpoints[int(step[1])]
        if step:
            fix = f"{run_dir} has {', '.join(one.name for one in checkpoints.values()) or 'none'}"
            raise CheckpointError("there is no checkpoint", where=which, fix=fix)
        folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    newest_last = find(folder)
    if not newest_last:
        raise CheckpointError("there is no checkpoint", where=str(folder), fix="give a folder of the form step-N")
    return newest_last[-1][1]
