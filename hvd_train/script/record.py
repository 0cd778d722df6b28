"""A script as ``hvd-train verify`` runs it: in 64 bits, without dropout, to the end of its K-th step, with a record.

The variable names a folder, K, and how many ranks the other world has: alone, a script takes the global batches that
so many ranks take together.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hvd_train.checkpoint.arrays import pack
from hvd_train.launch.environment import world
from hvd_train.protocol import Communicator, Tree

VARIABLE = "HVD_TRAIN_VERIFY"
SEED = 0  # of a script that sets none


@dataclass
class Recording:
    """The record of this rank.

    For each step: ``sums`` [loss times its weight, weight], the learning rate, the samples that this rank took of its
    loaders. ``trees``: for each model, a function that gives its weights and statistics now. ``gradient``: of each
    optimizer's first step. ``norm_fix``: the advice about batch normalization over each rank's local samples.
    """

    folder: Path
    ranks: int
    steps: int
    sums: list[list[float]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    samples: list[list[int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    norm_fix: str = ""
    first: Tree = field(default_factory=dict)
    gradient: Tree = field(default_factory=dict)
    trees: list[Callable[[], Tree]] = field(default_factory=list)
    _loss: list[float] = field(default_factory=lambda: [0.0, 0.0])
    _taken: list[int] = field(default_factory=list)
    _written: bool = False

    @property
    def together(self) -> int:
        """Return how many ranks' batches this process takes."""
        return self.ranks // world().size

    def model(self, tree: Callable[[], Tree]) -> None:
        """Another model is there, with its first weights."""
        self.first |= tree()
        self.trees.append(tree)

    def note(self, text: str) -> None:
        self.notes += [text] * (text not in self.notes)

    def loss(self, value: float, weight: float) -> None:
        """Add the loss of a backward pass; a step's loss is the sum over its passes."""
        self._loss = [self._loss[0] + value * weight, weight]

    def took(self, loader: int, indices: list) -> None:
        if all(isinstance(i, int) for i in indices):
            self._taken += [(loader << 40) + i for i in indices]

    def step(self, rate: float, communicator: Communicator) -> None:
        """An optimizer has made a step. The last one ends the process, on all ranks."""
        self.sums.append(self._loss)
        self.rates.append(rate)
        self.samples.append(self._taken)
        self._loss, self._taken = [0.0, 0.0], []
        if len(self.rates) == self.steps:
            self.write()
            communicator.barrier()
            communicator.close()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)  # whatever the script would still do

    def write(self) -> None:
        if self._written:
            return
        self._written = True
        last = {key: x for tree in self.trees for key, x in tree().items()}
        stages = {"first": self.first, "last": last, "gradient": self.gradient}
        arrays = {f"{stage}:{key}": np.asarray(x) for stage, tree in stages.items() for key, x in tree.items()}
        rank = world().rank
        (self.folder / f"{rank}.safetensors").write_bytes(pack(arrays))
        notes: dict[str, Any] = {"sums": self.sums, "rates": self.rates, "samples": self.samples, "notes": self.notes}
        notes["norm_fix"] = self.norm_fix
        (self.folder / f"{rank}.json").write_text(json.dumps(notes))


@functools.cache
def recording() -> Recording | None:
    """None: the script runs by itself."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return None
    options: dict[str, Any] = json.loads(text)
    started = Recording(Path(options["folder"]), options["ranks"], options["steps"])
    random.seed(SEED)
    np.random.seed(SEED)
    atexit.register(started.write)  # a script may end before
    return started
