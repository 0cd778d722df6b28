"""The state of a training: how it is saved from all ranks, and how they go on from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hvd_train import faults
from hvd_train.checkpoint import compatibility, store
from hvd_train.checkpoint.arrays import broadcast, pack, unpack
from hvd_train.checkpoint.compatibility import Resumption, RunFacts
from hvd_train.checkpoint.manifest import Progress
from hvd_train.checkpoint.writer import Writer, packed_error, raise_if_failed
from hvd_train.core.agreement import NONFINITE_FIX, collectively
from hvd_train.core.mean import is_float
from hvd_train.core.precision import FIRST_SCALE
from hvd_train.errors import CheckpointError, NonFiniteError
from hvd_train.protocol import Placement, Tree
from hvd_train.update.state import join_shards, read, training_state

if TYPE_CHECKING:
    from hvd_train.core.loop import Trainer

STATISTICS = "statistics/"


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
    gathered, local = communicator.gather_bytes(pack(own | _local(trainer))), []
    while gathered:  # no two copies of all of it
        local.append(unpack(gathered.pop(0)))
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
            outcome = packed_error(error)
    raise_if_failed(communicator.broadcast_bytes(outcome.encode()).decode())
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
        before, now = RunFacts(**found["facts"]), _facts(trainer)
        trainer.progress = Progress(**found["progress"])
        loss_scale = FIRST_SCALE if trainer.scaled else 1.0
        sums = trainer.frontend.task.length
        notes += compatibility.carry_over(
            Resumption(trainer.progress, before, now, trainer.train_size, sums, loss_scale)
        )
        local: Tree = {}
        if before.ranks == communicator.size:
            local = unpack(communicator.scatter_bytes([pack(part) for part in snapshot.local] if snapshot else []))
        own = {key: local.pop(key) for key in list(local) if key.startswith(STATISTICS)}
        shapes, expected = ({key: x.shape for key, x in tree.items()} for tree in (local, _local(trainer)))
        reason = compatibility.why_left_behind(before, now, same_shapes=shapes == expected)
        if not reason:
            mine = local
        elif found["kept"]:
            notes.append(f"what each rank kept to itself (residuals) is left behind: {reason}")

    def check() -> None:
        if snapshot:
            entries = trainer.update.state()
            shards = {e.name: np.broadcast_to(0.0, e.shape) for e in entries if e.placement is Placement.SHARDED}
            compatibility.check_tree(training_state(trainer.frontend, trainer.update) | shards, snapshot.tree)

    collectively(communicator, check)
    first = communicator.rank == 0 and not snapshot  # rank 0's own weights; slots are zeros everywhere
    tree = trainer.frontend.state() if first else snapshot.tree if snapshot else {}
    for piece in broadcast(communicator, tree):
        trainer.frontend.load(piece)
        trainer.update.load(piece, Placement.REPLICATED)
    if found and before.ranks == communicator.size:
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


def _facts(trainer: Trainer) -> RunFacts:
    """Give what of this training decides how it goes on."""
    config, ranks = trainer.config, trainer.communicator.size
    return RunFacts.of(config, config.framework, trainer.compression, trainer.data, ranks)


def _head(snapshot: store.Snapshot | None) -> bytes:
    """Give what all ranks must know of a checkpoint, as JSON; {}: there is none."""
    if snapshot is None:
        return b"{}"
    config, meta = snapshot.config(), snapshot.meta
    facts = RunFacts.of(config, snapshot.framework, meta.get("compression"), meta.get("data", {}), len(snapshot.local))
    head = {
        "facts": asdict(facts),
        "progress": asdict(snapshot.progress),
        "neutral": meta.get("neutral", False),
        "kept": any(not key.startswith(STATISTICS) for tree in snapshot.local for key in tree),
    }
    return json.dumps(head).encode()
