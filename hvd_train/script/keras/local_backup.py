"""A file beside the backup of Keras' ``BackupAndRestore``, for local training.

It holds what the backup lacks, the outer momentum and each rank's slots, so that a resumed script gets the same bits.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
from safetensors import SafetensorError

from hvd_train import files
from hvd_train.checkpoint import serialize
from hvd_train.core.agreement import collectively
from hvd_train.errors import CheckpointError
from hvd_train.protocol import Communicator, Tree
from hvd_train.script.keras.model_state import to_numpy
from hvd_train.script.shared.local_training import LocalTraining

FILE = "local_training.safetensors"
STEPS, OUTER = "steps", "outer/"  # key of the optimizer's steps; prefix of the outer optimizer's state


class LocalBackup(keras.callbacks.Callback):
    """A callback on all ranks, after the ``BackupAndRestore`` of rank 0."""

    def __init__(self, backup: Any, optimizer: Any, training: LocalTraining, world: Communicator) -> None:
        super().__init__()
        self._each_epoch = backup.save_freq == "epoch"  # else ranks may be between two synchronizations
        self._path = Path(backup.backup_dir) / FILE
        self._optimizer, self._training, self._world = optimizer, training, world

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not self._each_epoch:
            return
        local = {str(k): to_numpy(v) for k, v in enumerate(self._optimizer.variables)}
        tree = {STEPS: self._steps()} | {OUTER + name: x for name, x in self._training.state().items()}
        for rank, part in enumerate(self._world.gather_bytes(serialize.pack(local))):
            tree |= {f"rank{rank}/{k}": x for k, x in serialize.unpack(part).items()}
        if not self._world.rank:
            files.put(self._path, serialize.pack(tree))

    def restore(self) -> None:
        """Load the file if it belongs to the weights that ``BackupAndRestore`` has read. All ranks call it."""
        data = self._world.broadcast_bytes(collectively(self._world, self._read))
        tree: Tree = serialize.unpack(data) if data else {}
        if not tree:
            # A backup within an epoch, or one that was copied without this file.
            if not self._world.rank and any(self._path.parent.glob("*.weights.h5")):
                what = f"{self._path} is missing: the outer momentum begins with zeros"
                warnings.warn(f"{what}, and all ranks with rank 0's slots", stacklevel=2)
            return
        if tree[STEPS] != self._steps():
            if not self._world.rank:
                what = f"{self._path} is of step {tree[STEPS]}, and the weights are of step {self._steps()}"
                warnings.warn(f"{what}: the outer momentum begins with zeros", stacklevel=2)
            return
        self._training.load({name.removeprefix(OUTER): x for name, x in tree.items() if name.startswith(OUTER)})
        ranks = {name.split("/")[0] for name in tree if name.startswith("rank")}
        if len(ranks) == self._world.size:  # else all continue with rank 0's slots
            for k, v in enumerate(self._optimizer.variables):
                v.assign(tree[f"rank{self._world.rank}/{k}"])

    def _read(self) -> bytes:
        if self._world.rank or not self._path.exists():
            return b""
        try:
            data = files.content(self._path)
            serialize.unpack(data)  # only to check it before it is sent to the other ranks
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"it cannot be read: {error}", where=str(self._path), fix="remove it") from error
        return data

    def _steps(self) -> np.ndarray:
        return to_numpy(self._optimizer._iterations)
