"""The update with the same weights on all ranks at any time: gradients travel in every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hvd_train.protocol import (
    EXCHANGE_PREFIX,
    Cell,
    Entry,
    Exchange,
    Optimizer,
    Parameters,
    Placement,
    State,
    Tensor,
    Tree,
)
from hvd_train.update.error_meter import compression_error
from hvd_train.update.moved_weights import MovedWeights

# What the names begin with of the weights and running statistics that a run goes on with, in a checkpoint whose weights
# are an average of them (update/averaged_update.py).
TRAINING, STATISTICS = f"{EXCHANGE_PREFIX}training_weights/", f"{EXCHANGE_PREFIX}training_statistics/"


class Replicated:
    """Everything between the backward pass and new weights: exchange, residuals, clipping, optimizer, slots.

    Built once for a training; a front-end calls ``reduce`` and ``step`` eagerly or while it traces a step. Gradients
    are flat, one for each bucket. ``local_gradients``: a rank's gradient is the mean over its samples (adasum joins
    means, and neither adds nor averages them), instead of its part of the global mean.

    ``move``: what moves the weights by reduced gradients and a learning rate, the optimizer's ``step`` or an average's
    around it. ``moved``: the weights that it moves.
    """

    diverged = False
    delay = 0
    lockstep = True

    def __init__(self, frontend: Parameters, exchange: Exchange) -> None:
        self.frontend, self.exchange, self.local_gradients = frontend, exchange, exchange.op == "adasum"
        self.optimizer = self._connect()
        self.move: Callable[[Sequence[Tensor], Any], None] = self.optimizer.step
        self.moved = MovedWeights(frontend, self.optimizer, self.buckets)
        self._residuals = self._cells(exchange)
        self._kept_residuals = self._residuals  # those that a checkpoint keeps
        self._training: Tree = {}  # what a checkpoint has for training to go on with, beside averages

    def _connect(self) -> Optimizer:
        """Connect the front-end to this update, and make its optimizer."""
        return self.frontend.connect(self)

    def _cells(self, exchange: Exchange) -> list[tuple[Cell, ...]]:
        """Make the residuals of each bucket."""
        return [tuple(map(self.frontend.ops.keep, arrays)) for arrays in exchange.init_state()]

    @property
    def buckets(self) -> Sequence[Sequence[int]]:
        return self.exchange.buckets

    # ---- within a step

    def begin(self) -> None:
        """Nothing of earlier steps travels within a step."""

    def start(self, bucket: int, gradient: Tensor) -> Any:
        """Start the exchange of one bucket; nothing waits here, so a backward pass may call it."""
        return self.exchange.start(bucket, gradient, self._state(bucket))

    def finish(self, started: Sequence[Any]) -> list[Tensor]:
        """Wait for every bucket; return the reduced and clipped gradients. Residuals are those of this step then."""
        gradients, states = self.exchange.finish(started)
        self._write_states(states)
        return gradients

    def reduce(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Exchange all buckets at once: ``start`` for each, then ``finish``."""
        return self.finish([self.start(b, gradient) for b, gradient in enumerate(gradients)])

    def step(self, gradients: Sequence[Tensor], learning_rate: Any) -> None:
        """Move the weights and slots by reduced gradients."""
        self.move(gradients, learning_rate)

    def failures(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return (1,) float32: on how many ranks a gradient is not finite. All ranks ask before ``reduce``."""
        return self.exchange.failures(gradients)

    def compression_error(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the figures of ``error_meter`` for these gradients; nothing is changed."""
        return compression_error(self.exchange, gradients, [self._state(b) for b in range(len(self.buckets))])

    def _state(self, bucket: int) -> State:
        return tuple(cell.read() for cell in self._residuals[bucket])

    def _write_states(self, states: Sequence[State]) -> None:
        # A bucket that travels whole has no residual.
        for cells, values in zip(self._residuals, states, strict=True):
            for cell, value in zip(cells, values, strict=True):
                cell.write(value)

    # ---- between steps

    def before_step(self, step: int, samples: int) -> None:
        """Nothing comes before a step."""

    def after_step(self, step: int, samples: int) -> None:
        """Nothing follows a step."""

    @property
    def has_global_weights(self) -> bool:
        return not self.diverged

    def end_epoch(self, epoch: int, epochs: int) -> None:
        """Nothing follows an epoch."""

    def end_training(self) -> bool:
        return False

    @property
    def needs_statistics(self) -> bool:
        return False

    def keep_statistics(self, training: Tree) -> None:
        """Running statistics belong to the weights that the model has."""

    def take_global_weights(self) -> None:
        """The model has them."""

    def take_local_weights(self) -> None:
        """The model has them."""

    @property
    def in_flight(self) -> bool:
        return False

    def finish_transfers(self) -> None:
        """Nothing travels between steps."""

    def note(self) -> str:
        return ""

    def close(self) -> None:
        """Nothing lies outside this process."""

    def state(self) -> list[Entry]:
        """List slots and residuals; what an entry reads is copied by nobody but the reader."""
        self.frontend.run_queued()
        return [*self._slots(Placement.REPLICATED), *self._residual_entries()]

    def load(self, tree: Mapping[str, np.ndarray], placement: Placement) -> None:
        """Take arrays of ``state``; entries that are not in ``tree`` stay as they are."""
        self.frontend.run_queued()
        if placement is Placement.REPLICATED:
            self.optimizer.load(tree)
            for prefix, kind in ((TRAINING, "weights/"), (STATISTICS, "statistics/")):
                self._training |= {
                    kind + key.removeprefix(prefix): x for key, x in tree.items() if key.startswith(prefix)
                }
            return
        ops = self.frontend.ops
        for b, cells in enumerate(self._kept_residuals):
            for k, cell in enumerate(cells):
                if f"{b}/{k}" in tree:
                    # A residual of 64 bits would make the gradients of a run that goes on in 32 as wide.
                    cell.write(ops.cast(ops.from_numpy(tree[f"{b}/{k}"]), ops.dtype(cell.read())))
        self._load_training()

    def _load_training(self) -> None:
        """Give the model what training goes on with, where the checkpoint has it beside averages."""
        training, self._training = self._training, {}
        if training:
            # Another rank may still read the averages, from memory that the ranks share.
            self.frontend.groups.data.barrier()
            self.frontend.load(training)

    def _slots(self, placement: Placement) -> list[Entry]:
        return [Entry(name, placement, read) for name, read in self.optimizer.views()]

    def _residual_entries(self) -> list[Entry]:
        ops = self.frontend.ops
        return [
            Entry(f"{b}/{k}", Placement.PER_RANK, lambda cell=cell: ops.to_numpy(cell.read()))  # type: ignore[misc]
            for b, cells in enumerate(self._kept_residuals)
            for k, cell in enumerate(cells)
        ]
