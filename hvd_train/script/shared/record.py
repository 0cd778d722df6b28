"""The record of a script under ``hvd-train verify``, which runs K steps in 64 bits without dropout.

The environment variable holds a folder, K, and the number of ranks to compare with: a single process takes the global
batches of that many ranks.
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

from hvd_train.checkpoint.serialize import pack
from hvd_train.launch.environment import world
from hvd_train.protocol import Communicator, Tree

VARIABLE = "HVD_TRAIN_VERIFY"
SEED = 0  # for scripts that set none


@dataclass
class Recording:
    """The record of this rank.

    For each step: ``sums`` [loss times its weight, divisor of the sum over ranks], learning rate, and samples from this
    rank's loaders. ``trees``: a function for each model that returns its current weights and statistics.
    ``gradient``: from each optimizer's first step. ``norm_fix``: advice about local statistics in batch norm.
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
    _step_samples: list[int] = field(default_factory=list)
    _written: bool = False

    @property
    def together(self) -> int:
        """Return the number of ranks whose batches this process takes."""
        return self.ranks // world().size

    def model(self, tree: Callable[[], Tree]) -> None:
        """Add a model and its initial weights."""
        self.first |= tree()
        self.trees.append(tree)

    def note(self, text: str) -> None:
        """Add a line about a change or a limit of the comparison, once."""
        self.notes += [text] * (text not in self.notes)

    def loss(self, value: float, weight: float, divisor: float) -> None:
        """Add the loss of a backward pass to that of the step."""
        self._loss = [self._loss[0] + value * weight, divisor]

    def add_samples(self, loader: int, indices: list) -> None:
        """Add the samples of a batch of loader number ``loader``; indices that are not numbers are ignored."""
        # The loader's number is in the bits above 40, so equal indices of two loaders stay distinct.
        if all(isinstance(i, int) for i in indices):
            self._step_samples += [(loader << 40) + i for i in indices]

    def step(self, rate: float, communicator: Communicator) -> None:
        """Record a step of an optimizer. The last one ends the process, on all ranks."""
        self.sums.append(self._loss)
        self.rates.append(rate)
        self.samples.append(self._step_samples)
        self._loss, self._step_samples = [0.0, 0.0], []
        if len(self.rates) == self.steps:
            self.write()
            # All ranks write before one exits, because a launcher may then end all.
            communicator.barrier()
            communicator.close()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)  # without running the rest of the script

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
    """Return the record for ``hvd-train verify``; None if the script runs without it."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return None
    options: dict[str, Any] = json.loads(text)
    started = Recording(Path(options["folder"]), options["ranks"], options["steps"])
    # torch and Keras are seeded in verify_mode, once they are loaded.
    random.seed(SEED)
    np.random.seed(SEED)
    atexit.register(started.write)  # a script may end before step K
    return started
