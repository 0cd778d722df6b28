"""Checkpoints of a training: what is saved of all ranks, and how they go on from it."""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hvd_train import errors, faults
from hvd_train.checkpoint import store
from hvd_train.checkpoint.arrays import broadcast, pack, unpack
from hvd_train.checkpoint.manifest import Progress
from hvd_train.config import Config
from hvd_train.core.agreement import NONFINITE_FIX, collectively
from hvd_train.core.mean import is_float
from hvd_train.core.precision import FIRST_SCALE
from hvd_train.errors import CheckpointError, NonFiniteError, TrainError
from hvd_train.protocol import Placement, Source, Tree
from hvd_train.update.state import join_shards, read, training_state

if TYPE_CHECKING:
    from hvd_train.core.loop import Trainer

STATISTICS = "statistics/"
NOT_KEPT = "not kept"  # what was written was not among those that stay, and is gone again
WRITER_NICENESS = 10  # a tenth of what a step gets, where a core has both


class Writer:
    """Writes a checkpoint on rank 0 while training goes on; on other ranks it knows which. Never two at once.

    ``path``: what is being written, None: nothing; ``longest``: seconds that a write has taken, on rank 0; ``limit``:
    seconds after which one that has not ``moved`` is given up (0: never), for a server of files may be gone."""

    def __init__(self, limit: float = 0.0) -> None:
        self.path: Path | None = None
        self.longest = 0.0
        self._limit, self._last, self._looked = limit, 0.0, 0.0
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._kept: bool | None = None
        self.warned = False  # that snapshots are left out
        self.tree: Tree | None = None  # of the last save: the first writing of new memory costs more than the copying

    def begin(self, path: Path, work: Callable[[], bool | None] | None) -> None:
        """``work``: what rank 0 does, in a thread of its own; False: ``path`` was not kept."""
        self.path, self._failure, self._kept = path, None, None
        self.moved()
        self._looked = self._last
        if work:
            self._thread = threading.Thread(target=self._write, args=[work], name="saving", daemon=True)
            self._thread.start()

    def _write(self, work: Callable[[], bool | None]) -> None:
        began = time.monotonic()
        with suppress(OSError):  # of this thread alone: it takes what the step leaves of the core
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICENESS)
        try:
            self._kept = work()
        except BaseException as error:
            self._failure = error
        self.longest = max(self.longest, time.monotonic() - began)

    def moved(self) -> None:
        """The thread has come further."""
        self._last = time.monotonic()

    def wait(self, seconds: float = math.inf) -> None:
        """For its end, at most so long."""
        stop = time.monotonic() + seconds
        while self._thread and self._thread.is_alive() and not self._hangs() and time.monotonic() < stop:
            self._thread.join(min(1.0, self._limit / 4 or 1.0, seconds))

    def _hangs(self) -> bool:
        now, before = time.monotonic(), self._looked
        self._looked = now
        if now - before > self._limit / 2:  # this process was stopped itself, and the thread with it
            self.moved()
        return bool(self._limit) and now - self._last > self._limit

    def outcome(self) -> str | None:
        """What rank 0 tells all: None while it writes, "" or NOT_KEPT when it has written, or why it could not."""
        if self._thread is None or (self._thread.is_alive() and not self._hangs()):
            return None
        if self._thread.is_alive():
            self._thread = None
            what = f"the checkpoint cannot be written: nothing has moved for {self._limit:g} s"
            fix = "look for a disk or a server of files that does not answer; watchdog_s sets the limit"
            return _told(CheckpointError(what, where=str(self.path), fix=fix))
        self._thread = None
        if isinstance(self._failure, CheckpointError):
            return _told(self._failure)
        if self._failure:
            raise self._failure
        return NOT_KEPT if self._kept is False else ""


def _told(error: TrainError) -> str:
    return json.dumps([type(error).__name__, error.what, error.where, error.fix])


def settle(outcome: str) -> None:
    """The same on all ranks: all go on, or all stop."""
    if outcome and outcome != NOT_KEPT:
        kind, what, where, fix = json.loads(outcome)
        raise getattr(errors, kind)(what, where=where, fix=fix, common=True)


def size(trainer: Trainer) -> int:
    """Bytes of a checkpoint less residuals, where this rank will write any; its memory is taken here."""
    rule, writer = trainer.config.checkpoint, trainer._writer
    if trainer.communicator.rank or not (rule.save_last or rule.save_top_k):
        return 0
    writer.tree = training_state(trainer.frontend, trainer.update, writer.tree)
    return sum(array.nbytes for array in writer.tree.values())


def save(
    trainer: Trainer, metrics: Mapping[str, float], writer: Writer, *, keep: bool = False, memory: Path | None = None
) -> None:
    """Copies what is to be saved, on rank 0, which then writes it; all ranks learn whether there is something good to
    save, so that all go on or all stop.

    ``keep``: the run ends here, and this checkpoint stays, whatever the configuration keeps. ``memory``: a folder of
    its own, which keeps the newest two.
    """
    faults.at("save")
    c, communicator = trainer.config, trainer.communicator
    several = keep and communicator.size > 1
    before = trainer.frontend.statistics() if several else {}
    trainer.frontend.average_statistics()
    after = trainer.frontend.statistics() if several else {}
    # Averaging changes later averages in their last bits: an interrupted run goes on with what each rank had.
    own = trainer.frontend.neutral({k: x for k, x in before.items() if x.tobytes() != after[k].tobytes()})
    local = []
    for root in range(communicator.size):  # in turn: no rank but 0 holds what the others have
        part = communicator.broadcast_bytes(pack(own | _local(trainer)) if root == communicator.rank else b"", root)
        local += [unpack(part)] if communicator.rank == 0 else []
    entries = trainer.update.state()
    shards = join_shards(entries, communicator)
    outcome, p = "", trainer.progress
    if communicator.rank == 0:
        meta = {
            "framework": c.framework,
            "world_size": communicator.size,
            "config": c.model_dump(mode="json"),
            "compression": trainer.compression,
            "neutral": True,  # the names of each rank's own statistics; older checkpoints do not tell
            "sample": asdict(trainer.sample),
            "data": trainer.data,
            "progress": asdict(p),
            "monitor": dict(metrics),
        }
        try:
            trainer.log.check()
            model = trainer.frontend.state(writer.tree)
            optimizer = read(entries, Placement.REPLICATED, writer.tree) | shards
            writer.tree = model | optimizer
            # What a compressor cuts off stays in a residual, and shows in no weight.
            kept = {f"{key} of rank {rank}": x for rank, part in enumerate(local) for key, x in part.items()}
            _check_finite(writer.tree | kept, f"epoch {p.epoch + 1}, step {p.step}")
        except (CheckpointError, NonFiniteError) as error:
            outcome = _told(error)
    settle(communicator.broadcast_bytes(outcome.encode()).decode())
    work, folder = None, memory or trainer.folder
    if communicator.rank == 0:
        snapshot = store.Snapshot(p.step, p.epoch, p.consumed, model, optimizer, local, meta)
        rule = c.checkpoint
        # A rollback goes back to the newest.
        last = rule.save_last or keep or c.on_nonfinite == "rollback" or memory is not None

        def work() -> bool:
            try:
                store.save(folder, snapshot, writer.moved)
            except CheckpointError as error:
                if not memory:
                    raise
                if not writer.warned:  # once: the next ones are likely to fail as well
                    trainer.log.warning(f"a snapshot in memory is left out: {error}; training goes on without")
                writer.warned = True
                return False
            store.prune(
                folder,
                save_top_k=0 if memory else rule.save_top_k,
                save_last=last,
                monitor=rule.monitor,
                mode=c.mode_of(rule),
            )
            return store.place(folder, snapshot.step).exists()

    writer.begin(store.place(folder, p.step), work)


def _check_finite(tree: Tree, where: str) -> None:
    """A step may spoil weights although its loss was finite. Buffers may be infinite on purpose (masks)."""
    for key, x in tree.items():
        if not key.startswith(STATISTICS) and is_float(x) and not np.isfinite(x).all():
            raise NonFiniteError(f"{key} is not finite; nothing was saved", where=where, fix=NONFINITE_FIX)


def _local(trainer: Trainer) -> Tree:
    """Copy what belongs to this rank alone: residuals, and slots where ranks train apart."""
    return read(trainer.update.state(), Placement.PER_RANK)


def restore(trainer: Trainer, snapshot: store.Snapshot | None) -> list[str]:
    """Goes on from ``snapshot`` (read on rank 0, None: from the start); ends with equal weights on all ranks.

    Returns what of it was left behind, a line each.
    """
    communicator, notes = trainer.communicator, []
    own: Tree = {}
    head = collectively(communicator, lambda: _head(snapshot) if communicator.rank == 0 else b"")
    found = json.loads(communicator.broadcast_bytes(head))
    mine: Tree = {}
    if found:
        notes += _go_on(trainer, Progress(**found["progress"]), found)
        local: Tree = {}
        for rank, part in enumerate(_locals(snapshot, found["ranks"])):
            packed = communicator.broadcast_bytes(pack(part))
            local = unpack(packed) if rank == communicator.rank else local
        own = {key: local.pop(key) for key in list(local) if key.startswith(STATISTICS)}
        # A residual belongs to its rank, its framework's axis order and its compressor; else all begin at zero.
        shapes = {k: x.shape for k, x in _local(trainer).items()}
        here = {
            "ranks": communicator.size,
            "framework": trainer.config.framework,
            "compression": trainer.compression,
            "mode": trainer.config.exchange.mode,
        }
        other = [f"{key} {found[key]} -> {own}" for key, own in here.items() if found[key] not in (None, own)]
        if not other and {k: x.shape for k, x in local.items()} == shapes:
            mine = local
        elif found["kept"]:
            why = ", ".join(other) or "their shapes are others"
            notes.append(f"what each rank kept to itself (residuals) is left behind: {why}")

    def check() -> None:
        if snapshot:
            entries = trainer.update.state()
            shards = {e.name: np.broadcast_to(0.0, e.shape) for e in entries if e.placement is Placement.SHARDED}
            check_tree(training_state(trainer.frontend, trainer.update) | shards, snapshot.tree)

    collectively(communicator, check)
    first = communicator.rank == 0 and not snapshot  # rank 0's own weights; slots are zeros everywhere
    tree = trainer.frontend.state() if first else snapshot.tree if snapshot else {}
    for piece in broadcast(communicator, tree):
        trainer.frontend.load(piece)
        trainer.update.load(piece, Placement.REPLICATED)
    if found and found["ranks"] == communicator.size:
        collectively(communicator, lambda: _check_own(trainer, own) if found["neutral"] else None)
        trainer.frontend.load(own)
    trainer.update.load(mine, Placement.PER_RANK)
    return notes


def _check_own(trainer: Trainer, own: Tree) -> None:
    """``load`` leaves out what it does not know: the run would go on with other statistics, and nobody be told."""
    here = trainer.frontend.neutral(trainer.frontend.statistics())
    unknown = [key for key, x in sorted(own.items()) if key not in here or here[key].shape != x.shape]
    if unknown:
        what = "the checkpoint has statistics of a rank, which this model has not"
        raise CheckpointError(f"{what}: {', '.join(unknown[:20])}", fix="it is damaged: take another one")


def _go_on(trainer: Trainer, progress: Progress, found: dict[str, Any]) -> list[str]:
    """Takes over where training stood, less what belongs to another precision or other data."""
    notes = []
    if not trainer.scaled or found["precision"] != "16-mixed":
        fresh = Progress(loss_scale=FIRST_SCALE if trainer.scaled else 1.0)
        if trainer.scaled or progress.loss_scale != fresh.loss_scale:
            notes.append(
                f"precision {found['precision']} -> {trainer.config.precision}: loss scale {fresh.loss_scale:g}"
            )
        changed = found["precision"] != trainer.config.precision
        for name in ("loss_scale", "good_steps", *(["skipped"] if changed else [])):
            setattr(progress, name, getattr(fresh, name))
    rule = _rule(trainer.config)
    if (progress.best is not None or progress.waited) and found["early_stopping"] != rule:
        notes.append(f"early stopping: {found['early_stopping']} -> {rule}; what was best before does not count")
        progress.best, progress.waited, progress.stopped = None, 0, False
    patience = trainer.config.early_stopping.patience if trainer.config.early_stopping else 0
    if progress.stopped and 0 < found["patience"] <= progress.waited < patience:
        notes.append(f"early stopping: patience {found['patience']} -> {patience}, of which {progress.waited} are used")
        progress.stopped = False
    train = found["data"].get("train")
    other = train is not None and train != trainer.data["train"]
    if progress.consumed and (other or progress.consumed > trainer.train_size):
        notes.append(f"the training data are others: epoch {progress.epoch + 1} begins anew")
        progress.consumed, progress.epoch_sums = 0, []
        progress.pending, progress.ending = [], False
    # Sums of another task are those of other things; there may be none yet, or other classes.
    same = found["task"] == trainer.config.task.model_dump(mode="json")
    if not same or len(progress.epoch_sums) != trainer.frontend.task.length:
        progress.epoch_sums = []
    if not same:
        progress.pending = []
    trainer.progress = progress
    return notes


def check_tree(expected: Tree, given: Tree) -> None:
    """The checkpoint must fit the model, tensor by tensor; else a table of what differs."""
    rows = []
    for key in sorted(expected.keys() | given.keys()):
        if key not in given:
            rows.append(f"  {key}: not in the checkpoint")
        elif key not in expected:
            rows.append(f"  {key}: not in this model or optimizer")
        elif expected[key].shape != given[key].shape:
            rows.append(f"  {key}: {given[key].shape} in the checkpoint, {expected[key].shape} in the model")
    if rows:
        more = [f"  and {len(rows) - 20} more"] if len(rows) > 20 else []
        raise CheckpointError("\n".join(["the checkpoint does not fit this model and optimizer:", *rows[:20], *more]))


def data_facts(train: Source, val: Source) -> dict[str, dict[str, Any]]:
    """What a resumed run compares: of each part its size and fingerprint."""
    parts = {"train": train, "val": val}
    short = {name: hashlib.sha256(str(part.fingerprint).encode()).hexdigest()[:16] for name, part in parts.items()}
    return {name: {"samples": len(part), "fingerprint": short[name]} for name, part in parts.items()}


def _rule(config: Config) -> str:
    rule = config.early_stopping
    return f"{config.mode_of(rule)} of {rule.monitor}" if rule else "none"


def _head(snapshot: store.Snapshot | None) -> bytes:
    if snapshot is None:
        return b"{}"
    config = snapshot.config()
    head = {
        "progress": asdict(snapshot.progress),
        "framework": snapshot.framework,
        "compression": snapshot.meta.get("compression"),
        "mode": config.exchange.mode,
        "precision": config.precision,
        "task": config.task.model_dump(mode="json"),
        "early_stopping": _rule(config),
        "patience": config.early_stopping.patience if config.early_stopping else 0,
        "data": snapshot.meta.get("data", {}),
        "neutral": snapshot.meta.get("neutral", False),
        "ranks": len(snapshot.local),
        "kept": any(not key.startswith(STATISTICS) for tree in snapshot.local for key in tree),
    }
    return json.dumps(head).encode()


def _locals(snapshot: store.Snapshot | None, ranks: int) -> list[Tree]:
    return list(snapshot.local) if snapshot else [{}] * ranks
