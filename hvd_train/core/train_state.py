"""Save the state of a training from all ranks, and restore it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hvd_train import faults
from hvd_train.checkpoint import resume_rules, store
from hvd_train.checkpoint.manifest import Progress
from hvd_train.checkpoint.resume_rules import Resumption, RunFacts
from hvd_train.checkpoint.serialize import broadcast, pack, unpack
from hvd_train.checkpoint.writer import Writer, packed_error, raise_if_failed
from hvd_train.config import Config
from hvd_train.core.agreement import NONFINITE_FIX, collectively
from hvd_train.core.learning_rate import Schedule
from hvd_train.core.loss_scale import FIRST_SCALE
from hvd_train.core.reductions import is_float
from hvd_train.core.stage_state import of_other_stages
from hvd_train.core.training import Training
from hvd_train.data.order import steps
from hvd_train.errors import CheckpointError, NonFiniteError
from hvd_train.protocol import Entry, Placement, Tree
from hvd_train.update.outer import MOMENTUM
from hvd_train.update.state import is_residual, join_shards, read, training_state, weight_names

STATISTICS = "statistics/"
# Per-rank state that must be restored; the rest may be reset without loss.
KEPT = {"residuals", "slots", "weights"}


def size(training: Training, writer: Writer) -> int:
    """Return the size of a checkpoint in bytes, without residuals; 0 on ranks that write none.

    Allocates the memory into which saving copies, so that a run with too little fails at its start.
    """
    rule = training.config.checkpoint
    if training.communicator.rank or not (rule.save_last or rule.save_top_k):
        return 0
    writer.tree = training_state(training.frontend, training.update, writer.tree)
    shards = [entry for entry in training.update.state() if entry.placement is Placement.SHARDED]
    # For pipeline stages, estimate the other stages by the same bytes per weight.
    whole = sum(x.size for x in training.frontend.whole.values())
    share = sum(x.size for key, x in writer.tree.items() if key in training.frontend.whole) / whole if whole else 1
    here = sum(x.nbytes for x in writer.tree.values()) / share
    return int(here) + sum(math.prod(e.shape) * e.read().itemsize for e in shards)


def save(
    training: Training, metrics: Mapping[str, float], writer: Writer, *, keep: bool = False, memory: Path | None = None
) -> None:
    """Copy the state on rank 0, which then writes it. All ranks learn whether that succeeded, so that all continue or
    all stop.

    ``keep``: the run ends here, and this checkpoint is kept in any case. ``memory``: folder for in-memory checkpoints,
    the newest two.
    """
    faults.at("save")
    communicator = training.communicator
    training.update.finish_transfers()
    local = _gather_local(training, keep)
    # Gathering shards is a collective, so all ranks do it before rank 0 checks values.
    entries = training.update.state()
    shards = join_shards(entries, communicator)
    shards |= of_other_stages(training.groups, lambda: training_state(training.frontend, training.update))
    snapshot, outcome = None, ""
    if communicator.rank == 0:
        try:
            training.log.check()
            snapshot = _copy(training, metrics, writer, entries, shards, local)
        except (CheckpointError, NonFiniteError) as error:
            outcome = packed_error(error)
    raise_if_failed(communicator.broadcast_bytes(outcome.encode()).decode())
    folder = memory or training.folder
    work = None
    if snapshot and memory:
        work = partial(_write_to_memory, training, writer, folder, snapshot)
    elif snapshot:
        work = partial(_write, training, writer, folder, snapshot, keep)
    writer.begin(store.place(folder, training.progress.step), work)


def _gather_local(training: Training, keep: bool) -> list[Tree]:
    """Return each rank's own state on rank 0, and average running statistics for the checkpoint."""
    frontend, communicator = training.frontend, training.communicator
    several = keep and communicator.size > 1
    before = frontend.running_statistics() if several else {}
    frontend.average_statistics()
    after = frontend.running_statistics() if several else {}
    # Averaging changes the last bits of later averages, so an interrupted run restores each rank's own statistics.
    averages = {k: x for k, x in before.items() if x.tobytes() != after[k].tobytes()}
    parts, local = communicator.gather_bytes(pack(averages | _local(training))), []
    while parts:  # no two copies of all of it
        local.append(unpack(parts.pop(0)))
    return local


def _copy(
    training: Training,
    metrics: Mapping[str, float],
    writer: Writer,
    entries: Sequence[Entry],
    shards: Tree,
    local: list[Tree],
) -> store.Snapshot:
    """Copy the model, the optimizer and the facts of the run on rank 0. Raises NonFiniteError for non-finite values."""
    p = training.progress
    model = training.frontend.state(writer.tree)
    optimizer = read(entries, Placement.REPLICATED, writer.tree)
    of_model = {key for key in shards if key in training.frontend.whole}
    model = {key: x for key, x in shards.items() if key in of_model} | model
    optimizer = {key: x for key, x in shards.items() if key not in of_model} | optimizer
    writer.tree = model | optimizer
    # Values that a compressor drops stay in a residual, and may show in no weight.
    kept = {f"{key} of rank {rank}": x for rank, part in enumerate(local) for key, x in part.items()}
    _check_finite(writer.tree | kept, f"epoch {p.epoch + 1}, step {p.step}")
    meta = {
        "framework": training.config.framework,
        "world_size": training.communicator.size,
        "config": training.config.model_dump(mode="json"),
        "compression": training.compression,
        "axes": training.frontend.axes,
        "sample": asdict(training.sample),
        "data": training.data,
        "progress": asdict(p),
        "monitor": dict(metrics),
    }
    return store.Snapshot(p.step, p.epoch, p.consumed, model, optimizer, local, meta)


def _write(training: Training, writer: Writer, folder: Path, snapshot: store.Snapshot, keep: bool) -> bool:
    """Write a checkpoint, in a thread of rank 0. Returns whether it is kept."""
    rule = training.config.checkpoint
    store.save(folder, snapshot, writer.moved)
    store.prune(
        folder,
        save_top_k=rule.save_top_k,
        save_last=rule.save_last or keep or training.config.on_nonfinite == "rollback",  # needs the newest
        monitor=rule.monitor,
        mode=training.config.mode_of(rule),
        warn=training.log.warning,
    )
    return _is_there(folder, snapshot)


def _write_to_memory(training: Training, writer: Writer, folder: Path, snapshot: store.Snapshot) -> bool:
    """Write an in-memory checkpoint, in a thread of rank 0. A failure does not end the training."""
    rule = training.config.checkpoint
    try:
        store.save(folder, snapshot, writer.moved)
    except CheckpointError as error:
        if not writer.warned:  # once, because the next ones are likely to fail as well
            training.log.warning(f"a snapshot in memory is left out: {error}; training goes on without")
        writer.warned = True
        return False
    store.prune(folder, save_top_k=0, save_last=True, monitor=rule.monitor, mode=training.config.mode_of(rule))
    return _is_there(folder, snapshot)


def _is_there(folder: Path, snapshot: store.Snapshot) -> bool:
    """Return whether a saved checkpoint was kept."""
    with suppress(OSError):  # a file server that does not answer at the moment
        return store.place(folder, snapshot.step).exists()
    return True


def _check_finite(tree: Tree, where: str) -> None:
    """Refuse non-finite weights, optimizer state and residuals, which a step may produce even with a finite loss."""
    for key, x in tree.items():
        # Buffers may be infinite on purpose (masks).
        if not key.startswith(STATISTICS) and is_float(x) and not np.isfinite(x).all():
            raise NonFiniteError(f"{key} is not finite; nothing was saved", where=where, fix=NONFINITE_FIX)


def _local(training: Training) -> Tree:
    """Copy this rank's own state: residuals, and with local training optimizer state."""
    return read(training.update.state(), Placement.PER_RANK)


def restore(training: Training, snapshot: store.Snapshot | None) -> list[str]:
    """Restore ``snapshot`` (read on rank 0; None: start), so that all ranks have equal weights.

    Returns a line for each part that was not restored.
    """
    communicator, groups, notes = training.communicator, training.groups, []
    training.update.finish_transfers()  # of a training that rolls back
    averages: Tree = {}  # this rank's running statistics, if the run was interrupted
    # Only rank 0 reads the checkpoint. The others receive its facts, then the tensors piece by piece.
    head = collectively(communicator, lambda: _head(training, snapshot) if communicator.rank == 0 else b"")
    saved = json.loads(communicator.broadcast_bytes(head))
    kept: Tree = {}  # this rank's residuals and optimizer state
    if saved:
        before, now = RunFacts(**saved["facts"]), _facts(training)
        training.progress = Progress(**saved["progress"])
        _keep_warmup(training, saved["warmup"])
        loss_scale = FIRST_SCALE if training.scaled else 1.0
        sums = training.frontend.task.length
        notes += resume_rules.carry_over(Resumption(training.progress, before, now, sums, loss_scale))
        local: Tree = {}
        same_layout = (before.ranks, before.stages) == (now.ranks, now.stages)
        if same_layout:
            local = unpack(communicator.scatter_bytes([pack(part) for part in snapshot.local] if snapshot else []))
        averages = {key: local.pop(key) for key in list(local) if key.startswith(STATISTICS)}
        # Contains this rank's weights if they differed; their shapes are the model's, which are checked below.
        weights = weight_names(training.frontend)
        trees = ({key: x for key, x in local.items() if key not in weights}, _local(training))
        shapes, expected = ({key: x.shape for key, x in tree.items()} for tree in trees)
        reason = resume_rules.why_left_behind(before, now, same_shapes=shapes == expected)
        if not reason:
            kept = local
        elif saved["kept"]:
            notes.append(f"per-rank state ({', '.join(saved['kept'])}) is not restored: {reason}")

    here = partial(training_state, training.frontend, training.update)
    others = of_other_stages(training.groups, here) if saved else {}
    # From the start: broadcast rank 0's weights (with stages, those of each stage's first rank); optimizer state is
    # zero.
    source = groups.data if groups.links and not saved else communicator

    def fitting() -> Tree:
        if not snapshot:
            return {} if saved or source.rank else training.frontend.state()
        entries = training.update.state()
        shards = {e.name: np.broadcast_to(0.0, e.shape) for e in entries if e.placement is Placement.SHARDED}
        return resume_rules.fitting(here() | shards | others, snapshot.tree)

    tree = collectively(communicator, fitting)
    if snapshot and len(tree) < len(snapshot.tree):
        notes.append("gradients in flight are dropped: exchange.mode or exchange.delay changed")
    momentum = [entry.name for entry in training.update.state() if entry.name.startswith(MOMENTUM)]
    if snapshot and momentum and not any(name in snapshot.tree for name in momentum):
        notes.append("the outer momentum begins with zeros: the checkpoint has none")
    for piece in broadcast(source, tree):
        training.frontend.load(piece)
        training.update.load(piece, Placement.REPLICATED)
    if saved and same_layout:
        collectively(communicator, lambda: _check_averages(training, averages))
        training.frontend.load(averages)
    training.update.load(kept, Placement.PER_RANK)
    return notes


def _keep_warmup(training: Training, as_given: list[Any]) -> None:
    """Keep a resumed run's warm-up length, unless the configuration changed it."""
    begun = replace(training.schedule, warmup=0.0)
    kept = training.progress.warmup if as_given == begun.warmup_as_given else begun.mixed_warmup
    training.progress.warmup, training.schedule = kept, replace(begun, warmup=kept)


def _check_averages(training: Training, averages: Tree) -> None:
    """Refuse running statistics of this rank that the model lacks."""
    # ``load`` ignores unknown names: the run would silently continue with other statistics.
    here = training.frontend.running_statistics()
    unknown = [key for key, x in sorted(averages.items()) if key not in here or here[key].shape != x.shape]
    if unknown:
        what = "the checkpoint has statistics of a rank, which this model lacks"
        raise CheckpointError(f"{what}: {', '.join(unknown[:20])}", fix="it is damaged: take another one")


def _facts(training: Training) -> RunFacts:
    """Return the facts of this training that decide how it may be resumed."""
    config, ranks = training.config, training.communicator.size
    axes = training.frontend.axes
    return RunFacts.of(config, config.framework, training.compression, training.data, ranks, axes=axes)


def _steps_per_epoch(training: Training, before: Config, meta: Mapping[str, Any], ranks: int) -> int:
    """Return the steps of a whole epoch when the checkpoint was saved."""
    if before.data.lengths == training.config.data.lengths and training.train_loader.by_tokens:
        return training.steps_per_epoch
    return steps(meta["data"]["train"]["samples"], 0, before.global_batch(before.replicas(ranks)))


def _head(training: Training, snapshot: store.Snapshot | None) -> bytes:
    """Return the facts of a checkpoint that all ranks need, as JSON; {} without one."""
    if snapshot is None:
        return b"{}"
    config, meta = snapshot.config(), snapshot.meta
    ranks = len(snapshot.local)
    keys = {key for tree in snapshot.local for key in tree}
    axes = meta["axes"] if any(map(is_residual, keys)) else None  # everything else has canonical axes
    facts = RunFacts.of(config, snapshot.framework, meta["compression"], meta["data"], ranks, axes)
    schedule = Schedule.of(config, _steps_per_epoch(training, config, meta, ranks), config.replicas(ranks))
    head = {
        "facts": asdict(facts),
        "progress": meta["progress"],
        "warmup": schedule.warmup_as_given,
        "kept": sorted({"residuals" if is_residual(key) else key.split("/")[0] for key in keys} & KEPT),
    }
    return json.dumps(head).encode()
