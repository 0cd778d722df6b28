"""Synchronous data parallelism: gradients are summed in every step, and all ranks have the same weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hvd_train.protocol import (
    EXCHANGE_PREFIX,
    Cell,
    Entry,
    Exchange,
    GradientNorms,
    Optimizer,
    Parameters,
    Placement,
    State,
    Tensor,
    Tree,
)
from hvd_train.update.error_meter import compression_error
from hvd_train.update.owned_weights import OwnedWeights

# Name prefixes of the training weights and running statistics in a checkpoint whose weights are an average
# (update/averaged_update.py).
TRAINING, STATISTICS = f"{EXCHANGE_PREFIX}training_weights/", f"{EXCHANGE_PREFIX}training_statistics/"


class Replicated:
    """The step from gradients to new weights: exchange, residuals, clipping and optimizer.

    Built once for a training. A front-end calls ``reduce`` and ``step`` eagerly or while it traces a step. Gradients
    are flat, one for each bucket. ``local_gradients``: a rank's gradient is the mean over its samples, as adasum needs
    it, instead of its part of the global mean.

    ``move``: updates the weights from reduced gradients and a learning rate: the optimizer's ``step``, or that of a
    weight average around it. ``moved``: the weights that it updates.
    """

    diverged = False
    delay = 0
    lockstep = True

    def __init__(self, frontend: Parameters, exchange: Exchange) -> None:
        self.frontend, self.exchange, self.local_gradients = frontend, exchange, exchange.op == "adasum"
        self.optimizer = self._connect()
        self.update_weights: Callable[[Sequence[Tensor], Any], None] = self.optimizer.step
        self.owned = OwnedWeights(frontend, self.optimizer, self.buckets)
        self._residuals = self._cells(exchange)
        self._kept_residuals = self._residuals  # the ones saved in checkpoints
        self._training: Tree = {}  # from a checkpoint of averages: training weights and statistics

    def _connect(self) -> Optimizer:
        """Connect the front-end to this update, and make its optimizer."""
        return self.frontend.connect(self)

    def _cells(self, exchange: Exchange) -> list[tuple[Cell, ...]]:
        """Make the compressor state of each bucket."""
        return [tuple(map(self.frontend.ops.keep, arrays)) for arrays in exchange.init_state()]

    @property
    def buckets(self) -> Sequence[Sequence[int]]:
        return self.exchange.buckets

    @property
    def norms(self) -> GradientNorms | None:
        return self.exchange.norms

    # ---- within a step

    def begin(self) -> None:
        """Do nothing: no transfer of an earlier step is in flight."""

    def start(self, bucket: int, gradient: Tensor) -> Any:
        """Start the exchange of one bucket. It does not block, so backward hooks may call it."""
        return self.exchange.start(bucket, gradient, self._state(bucket))

    def finish(self, started: Sequence[Any]) -> list[Tensor]:
        """Wait for every bucket, update the residuals, and return the reduced and clipped gradients."""
        gradients, states = self.exchange.finish(started)
        self._write_states(states)
        return gradients

    def reduce(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Exchange all buckets at once: ``start`` for each, then ``finish``."""
        return self.finish([self.start(b, gradient) for b, gradient in enumerate(gradients)])

    def step(self, gradients: Sequence[Tensor], learning_rate: Any) -> None:
        """Update weights and optimizer state from reduced gradients."""
        self.update_weights(gradients, learning_rate)

    def failures(self, gradients: Sequence[Tensor]) -> Tensor:
        """Count the ranks on which a gradient is not finite, (1,) float32. All ranks call it before ``reduce``."""
        return self.exchange.failures(gradients)

    def compression_error(self, gradients: Sequence[Tensor]) -> Tensor:
        """Measure the error of compression for these gradients (``error_meter``); nothing is changed."""
        return compression_error(self.exchange, gradients, [self._state(b) for b in range(len(self.buckets))])

    def _state(self, bucket: int) -> State:
        return tuple(cell.read() for cell in self._residuals[bucket])

    def _write_states(self, states: Sequence[State]) -> None:
        # Uncompressed buckets have no residual.
        for cells, values in zip(self._residuals, states, strict=True):
            for cell, value in zip(cells, values, strict=True):
                cell.write(value)

    # ---- between steps

    def before_step(self, step: int, samples: int) -> None:
        """Do nothing before a step."""

    def after_step(self, step: int, samples: int) -> None:
        """Do nothing after a step."""

    @property
    def has_global_weights(self) -> bool:
        return not self.diverged

    def end_epoch(self, epoch: int, epochs: int) -> None:
        """Do nothing after an epoch."""

    def end_training(self) -> bool:
        return False

    @property
    def needs_statistics(self) -> bool:
        return False

    def keep_statistics(self, training: Tree) -> None:
        """Do nothing: the model's statistics already belong to its weights."""

    def take_global_weights(self) -> None:
        """Do nothing: the model already holds them."""

    def take_local_weights(self) -> None:
        """Do nothing: the model already holds them."""

    @property
    def in_flight(self) -> bool:
        return False

    def finish_transfers(self) -> None:
        """Do nothing: no transfer is in flight between steps."""

    def note(self) -> str:
        return ""

    def close(self) -> None:
        """Do nothing: there are no resources outside this process."""

    def state(self) -> list[Entry]:
        """List optimizer state and residuals; entries may read views, so the caller must copy."""
        self.frontend.run_queued()
        return [*self._slots(Placement.REPLICATED), *self._residual_entries()]

    def load(self, tree: Mapping[str, np.ndarray], placement: Placement) -> None:
        """Load arrays of ``state``; entries that are not in ``tree`` stay unchanged."""
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
                    # A float64 residual would promote the gradients of a run that resumes in 32 bits.
                    cell.write(ops.cast(ops.from_numpy(tree[f"{b}/{k}"]), ops.dtype(cell.read())))
        self._load_training()

    def _load_training(self) -> None:
        """Load the training weights into the model, if the checkpoint holds them beside averages."""
        training, self._training = self._training, {}
        if training:
            # Another rank may still read the averages from shared memory.
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
