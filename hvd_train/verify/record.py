"""The record of a short run of one world, on disk, so that another process can compare two worlds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvd_train.checkpoint.serialize import pack, unpack
from hvd_train.config import load_config
from hvd_train.core.hooks import Hook, StepInfo
from hvd_train.core.loop import Trainer
from hvd_train.core.stage_state import of_other_stages
from hvd_train.core.training import Training
from hvd_train.jobs import job as jobs
from hvd_train.jobs.connect import connect
from hvd_train.protocol import Tree, broadcast_json
from hvd_train.run_folder.log import NullLog
from hvd_train.update.state import join_shards, training_state

STAGES = ("first", "last")


class Recorder(Hook):
    """Records this rank's sums, learning rate and samples of each step.

    Writes PATH.RANK.json, and the trees before the first step and after the last to PATH.RANK.safetensors.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._notes: dict[str, list[Any]] = {"sums": [], "rates": [], "samples": []}

    def on_start(self, trainer: Training) -> None:
        self._first = self._state(trainer)
        self._notes["losses"] = [list(entries) for entries in trainer.frontend.task.entries]

    @staticmethod
    def _state(trainer: Training) -> Tree:
        """Return weights and optimizer state; shards of the latter are gathered on rank 0."""
        shards = join_shards(trainer.update.state(), trainer.groups.world)
        here = training_state(trainer.frontend, trainer.update) | shards
        return here | of_other_stages(trainer.groups, lambda: here, here)

    def on_step(self, trainer: Training, info: StepInfo) -> None:
        sums = np.sum([trainer.frontend.ops.to_numpy(sums) for sums in info.local_sums], axis=0)
        self._notes["sums"].append(sums.tolist())
        self._notes["rates"].append(info.learning_rate)
        indices = [batch.indices for batch in info.batch.micro_batches]
        # All stages of a replica have the same samples.
        self._notes["samples"].append(np.concatenate(indices).tolist() if trainer.groups.last_stage else [])

    def on_end(self, trainer: Training, summary: Mapping[str, Any]) -> None:
        stages = zip(STAGES, (self._first, self._state(trainer)), strict=True)
        trees = {f"{stage}:{key}": x for stage, tree in stages for key, x in tree.items()}
        # Other ranks write only tensors that differ bitwise from rank 0's, usually none.
        hashes = {key: hashlib.sha256(x.tobytes()).hexdigest() for key, x in trees.items()}
        rank0 = broadcast_json(trainer.communicator, hashes)
        rank = trainer.communicator.rank
        kept = {key: x for key, x in trees.items() if rank == 0 or hashes[key] != rank0[key]}
        _file(self._path, rank, "safetensors").write_bytes(pack(kept))
        _file(self._path, rank, "json").write_text(json.dumps(self._notes))


def record(folder: Path, verbose: bool) -> int:
    """Run a worker of ``hvd-train verify``: one short run and record for each configuration in ``folder``."""
    paths = sorted(folder.glob("*.yaml"))
    # Horovod can be initialized only once in a process, so later runs reuse the first session and data.
    with jobs.opened_job(load_config(paths[0]), verbose) as first:
        for path in paths:
            config = load_config(path)
            job = first if path == paths[0] else jobs.build_job(config, first.session, first.data)
            job.frontend.without_dropout()
            update, _ = connect(job, "none")
            hooks = [Recorder(path.with_suffix(""))]
            trainer = Trainer(
                config, job.frontend, update, job.data.train, job.data.val, folder, NullLog(), hooks=hooks
            )
            trainer.restore(None)
            trainer.fit()
    return 0


@dataclass(frozen=True)
class Record:
    """The record of a run of ``steps`` steps on all its ranks.

    losses (steps,): means over the global batch; rates (ranks, steps): learning rates; samples: per step, the indices
    that all ranks together used, sorted; trees: rank 0's tree at each stage; differing: at each stage, tensors of a
    rank that differ bitwise from rank 0's.
    """

    losses: np.ndarray
    rates: np.ndarray
    samples: list[np.ndarray]
    trees: dict[str, Tree]
    differing: dict[str, dict[int, Tree]]

    @property
    def size(self) -> int:
        return len(self.rates)

    @classmethod
    def read(cls, path: Path, size: int) -> Record:
        """Read the records of the ``size`` ranks of a world at ``path``."""
        notes = [json.loads(_file(path, rank, "json").read_text()) for rank in range(size)]
        parts = [stages_of(unpack(_file(path, rank, "safetensors").read_bytes()), STAGES) for rank in range(size)]
        sums = np.sum([n["sums"] for n in notes], axis=0)
        samples = samples_of([n["samples"] for n in notes])
        apart = {s: {rank: part[s] for rank, part in enumerate(parts) if rank and part[s]} for s in STAGES}
        # sums (steps, entries): each loss has an entry for its sum and one for its count.
        losses = sum(sums[:, value] / np.maximum(sums[:, count], 1e-300) for value, count in notes[0]["losses"])
        return cls(losses, np.array([n["rates"] for n in notes]), samples, parts[0], apart)


def stages_of(tree: Tree, stages: Sequence[str]) -> dict[str, Tree]:
    """Split a tree with keys STAGE:KEY into one per stage."""
    return {stage: {k[len(stage) + 1 :]: x for k, x in tree.items() if k.startswith(f"{stage}:")} for stage in stages}


def samples_of(ranks: Sequence[Sequence[Sequence[int]]]) -> list[np.ndarray]:
    """Return, for each step, the samples of all ranks, sorted; ``ranks``: for each rank, those of each step."""
    steps = zip(*ranks, strict=True)
    return [np.sort(np.concatenate([np.asarray(x, np.int64) for x in step])) for step in steps]


def _file(path: Path, rank: int, kind: str) -> Path:
    return path.with_name(f"{path.name}.{rank}.{kind}")
