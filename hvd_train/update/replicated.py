"""The update with the same weights on all ranks at any time: gradients travel in every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, cast

import numpy as np

from hvd_train.protocol import (
    OF_EXCHANGE,
    Averages,
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
from hvd_train.update.flat_state import FlatState
from hvd_train.update.state import Cell as EagerCell

# What the names of weights begin with that a run goes on with, where a checkpoint's weights are averages of them.
TRAINING = f"{OF_EXCHANGE}training_weights/"
STATISTICS = f"{OF_EXCHANGE}training_statistics/"  # the same of running statistics
MEAN = f"{OF_EXCHANGE}mean_weights/"  # the same of averages that are not ready


class Replicated:
    """Everything between the backward pass and new weights: exchange, residuals, clipping, optimizer, slots.

    Built once for a training; a front-end calls ``reduce`` and ``step`` eagerly or while it traces a step. Gradients
    are flat, one for each bucket. ``local_gradients``: a rank's gradient is the mean over its samples (adasum joins
    means, and neither adds nor averages them), instead of its part of the global mean.

    With ``keep_average`` the training stands for an average of its weights. A checkpoint holds this as the weights, and
    those that training goes on with beside it.
    """

    diverged = False
    delay = 0
    lockstep = True

    def __init__(self, frontend: Parameters, exchange: Exchange, local_gradients: bool = False) -> None:
        self.frontend, self.exchange, self.local_gradients = frontend, exchange, local_gradients
        self.optimizer = cast(Optimizer, frontend.connect(self))
        self._residuals = self._cells(exchange)
        self._saved = self._residuals  # those that a checkpoint keeps
        self._averages: Averages | None = None
        self._training: list[Tensor] = []  # this rank's weights, while the model has their averages
        self._statistics: Tree = {}  # running statistics of those of the two that the model has not
        self._received: Tree = {}  # what of these a checkpoint has

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
        self.optimizer.step(gradients, learning_rate)

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
        """Forget the statistics of averages that a checkpoint had: a run that goes on will end with others."""
        self._statistics = {}

    def after_step(self, step: int, samples: int) -> None:
        """Nothing follows a step."""

    @property
    def has_global_weights(self) -> bool:
        apart = self._averages is not None and self._averages.ready and not self._training
        return not self.diverged and not apart

    @property
    def needs_statistics(self) -> bool:
        return self._averages is not None and self._averages.needs_statistics and bool(self._training)

    def keep_statistics(self, training: Tree) -> None:
        self._statistics = self._statistics or training

    def _exchange_statistics(self) -> None:
        """Give the model the running statistics that belong to its weights, where these were kept."""
        if self._statistics:
            here = self.frontend.running_statistics()
            self.frontend.load(self._statistics)
            self._statistics = here

    def end_epoch(self, epoch: int, epochs: int) -> None:
        if self._averages:
            self.frontend.run_queued()
            self._averages.end_epoch(epoch, epochs)

    def end_training(self) -> bool:
        return self._averages is not None and self._averages.end_training()

    def keep_average(self, make: Callable[..., Any]) -> None:
        made = make(self.frontend, self.optimizer, self._here, self._moved_weights)
        self.optimizer = self._averages = made

    def _here(self, bucket: int) -> Sequence[Tensor]:
        """Return the flat weights of a bucket that this rank moves, a part for each tensor, within a step."""
        return self.optimizer.parts(bucket)

    def take_global_weights(self) -> None:
        if self._averages and self._averages.ready:
            self.frontend.run_queued()
            if self._averages.needs_statistics:
                self.frontend.average_statistics()  # as for a checkpoint: a run that goes on from it has these
            self._training = self._moved_weights()
            self._give(self._averages.global_weights())
            self._exchange_statistics()

    def take_local_weights(self) -> None:
        if self._training:
            self._give(self._training)
            self._training = []
            self._exchange_statistics()

    def _moved_weights(self) -> list[Tensor]:
        """Copy the weights that this rank moves, (n,) for each bucket."""
        return self.frontend.flat_weights()

    def _give(self, weights: Sequence[Tensor]) -> None:
        """Give the model weights as ``_moved_weights`` returns them; on all ranks alike."""
        for bucket, x in enumerate(weights):
            self.optimizer.take(bucket, x)

    @property
    def under_way(self) -> bool:
        return False

    def finish_transfers(self) -> None:
        """Nothing travels between steps."""

    def note(self) -> str:
        return self._averages.note() if self._averages else ""

    def close(self) -> None:
        """Nothing lies outside this process."""

    def state(self) -> list[Entry]:
        """List slots and residuals; what an entry reads is copied by nobody but the reader."""
        self.frontend.run_queued()
        return [*self._slots(Placement.REPLICATED), *self._residual_entries(), *self._training_entries()]

    def load(self, tree: Mapping[str, np.ndarray], placement: Placement) -> None:
        """Take arrays of ``state``; entries that are not in ``tree`` stay as they are."""
        self.frontend.run_queued()
        if placement is Placement.REPLICATED:
            self.optimizer.load(tree)
            self._received |= {key: x for key, x in tree.items() if key.startswith((TRAINING, STATISTICS, MEAN))}
            return
        ops = self.frontend.ops
        for b, cells in enumerate(self._saved):
            for k, cell in enumerate(cells):
                if f"{b}/{k}" in tree:
                    # A residual of 64 bits would make the gradients of a run that goes on in 32 as wide.
                    cell.write(ops.cast(ops.from_numpy(tree[f"{b}/{k}"]), ops.dtype(cell.read())))
        self._go_on()

    def _go_on(self) -> None:
        """Take the checkpoint's weights, which the model has, as the average, and go on with those beside them.

        A run that no longer averages goes on with these as well.
        """
        self._training = []
        if self._averages:
            self._averages.begin_average()
            if any(key.startswith(MEAN) for key in self._received):
                self._averages.take_average(self._weights_with(MEAN, self._received))
        self._give_received()

    def _give_received(self) -> None:
        """Give the model what training goes on with, where the checkpoint has it beside averages."""
        received, self._received, self._statistics = self._received, {}, {}
        if any(key.startswith(TRAINING) for key in received):
            self._give(self._weights_with(TRAINING, received))
            # What is frozen from now on stays as the training had it, not as its average was.
            moved = {TRAINING + spec.name for spec in self.frontend.specs()}
            frozen = {key: x for key, x in received.items() if key.startswith(TRAINING) and key not in moved}
            self.frontend.load({f"weights/{key.removeprefix(TRAINING)}": x for key, x in frozen.items()})
        statistics = {key: x for key, x in received.items() if key.startswith(STATISTICS)}
        if statistics:
            self._statistics = self.frontend.running_statistics()
            self.frontend.load({f"statistics/{key.removeprefix(STATISTICS)}": x for key, x in statistics.items()})

    def _weights_with(self, prefix: str, tree: Tree) -> list[Tensor]:
        """Return what this rank moves of the model's weights, those called ``prefix`` in ``tree`` in their place.

        What was frozen in the run of ``tree`` is not in it, and has always been as in the model.
        """
        flat, ops = FlatState(self.frontend, self.buckets), self.frontend.ops
        # Copied: TensorFlow's tensors may lie in memory that ranks share.
        cells = [EagerCell(ops.from_numpy(ops.to_numpy(x))) for x in self.frontend.flat_weights()]
        for b, cell in enumerate(cells):
            flat.load(prefix, b, cell, tree)
        return self._of_this_rank([cell.read() for cell in cells])

    def _of_this_rank(self, weights: list[Tensor]) -> list[Tensor]:
        """Return what this rank moves of whole buckets."""
        return weights

    def _training_entries(self) -> list[Entry]:
        """List what a checkpoint has beside weights and slots, which are averages or have some that are not ready."""
        if not self._averages:
            return []
        if not self._averages.ready:
            return self._flat_entries(MEAN, self._averages.global_weights)
        entries = self._flat_entries(TRAINING, lambda: self._training or self._moved_weights())
        for key, x in (self._statistics if self._training else {}).items():
            name = STATISTICS + key.removeprefix("statistics/")
            entries.append(Entry(name, Placement.REPLICATED, lambda x=x: x))  # type: ignore[misc]
        return entries

    def _flat_entries(self, prefix: str, read: Callable[[], Sequence[Tensor]]) -> list[Entry]:
        """List the tensors of what ``read`` gives, (n,) of this rank's part of each bucket."""
        flat, weights = FlatState(self.frontend, self.buckets), cache(read)
        return [
            entry
            for b in range(len(self.buckets))
            for entry in flat.entries(prefix, b, lambda b=b: weights()[b])  # type: ignore[misc]
        ]

    def _slots(self, placement: Placement) -> list[Entry]:
        return [Entry(name, placement, read) for name, read in self.optimizer.views()]

    def _residual_entries(self) -> list[Entry]:
        ops = self.frontend.ops
        return [
            Entry(f"{b}/{k}", Placement.PER_RANK, lambda cell=cell: ops.to_numpy(cell.read()))  # type: ignore[misc]
            for b, cells in enumerate(self._saved)
            for k, cell in enumerate(cells)
        ]
