"""Gradients are applied some steps later, so that they travel while the next steps compute (a fixed staleness).

With a delay of d steps and a compensation of lambda, step t starts the sum of g_t over the ranks and applies
c(g_{t-d}), where c(g) = g + lambda g^2 (w_t - w_{t-d}) by entries (Zheng et al. 2017, "Asynchronous Stochastic Gradient
Descent with Delay Compensation") and w_t are the weights that g_t was computed with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from hvd_train.protocol import IN_FLIGHT, Cell, Entry, Exchange, Parameters, Placement, State, Tensor
from hvd_train.update.flat_state import FlatState
from hvd_train.update.replicated import Replicated

STEPS = IN_FLIGHT + "steps"  # the entry with the number of gradients under way
Landed = tuple[list[Tensor], list[State]]


class Delayed(Replicated):
    """The ranks have the same weights at any time, and N ranks train as one rank does with the same delay.

    The first d steps apply nothing: weights, slots and number of steps of the optimizer stay. At the end of a training
    the gradients of its last d steps are left; they stand in its last checkpoint, and a longer run goes on with them. A
    gradient is clipped when it has been reduced, then compensated, and applied with the learning rate of the step that
    applies it. A step that is left out, as a gradient is not finite, neither takes nor applies one.

    The gradient of the last step travels during this one. Older ones wait reduced, so what a compressor leaves out of
    one gradient is there for the next, and a graph, which no transfer outlives, does the same.

    Checkpoints hold the gradients under way, reduced, and the weights that they were computed with if there is a
    compensation: a run goes on with them on another number of ranks and in the other framework.
    """

    def __init__(self, frontend: Parameters, exchange: Exchange, delay: int, compensation: float) -> None:
        self.delay, self.compensation = delay, compensation
        super().__init__(frontend, exchange)
        ops, specs = frontend.ops, frontend.specs()
        self._flat = FlatState(frontend, self.buckets)

        def kept() -> list[list[Cell]]:
            """Return [steps ago - 1][bucket]: (n,)."""
            kinds = [(sum(specs[i].size for i in members), specs[members[0]].dtype) for members in self.buckets]
            return [[ops.keep(np.zeros(*kind)) for kind in kinds] for _ in range(delay)]

        self._gradients = kept()
        self._weights = kept() if delay and compensation else []
        # Steps whose gradients were taken, and whether that of the last one has still to be reduced (1) or not (0).
        self._steps, self._local = ops.keep_number(0), ops.keep_number(0)
        self._land: Callable[[], Landed] | None = None
        self._due: Any = False

    # ---- within a step

    def begin(self) -> None:
        """Start the exchange of the gradient of the last step, if it has not been reduced for a checkpoint."""
        if self.delay:
            self._land = self.frontend.ops.start_if(self._local.read() > 0, self._depart, self._newest)

    def start(self, bucket: int, gradient: Tensor) -> Any:
        """Take a gradient, which travels from ``begin`` on."""
        return gradient if self.delay else super().start(bucket, gradient)

    def finish(self, started: Sequence[Any]) -> list[Tensor]:
        """Take this step's gradients; return those that are due, reduced and clipped, which ``step`` is to apply."""
        if not self.delay:
            return super().finish(started)
        reduced = [self._arrived(), *([cell.read() for cell in cells] for cells in self._gradients[1:])]
        due = reduced.pop()
        self._due = self._steps.read() >= self.delay
        if self._weights:
            now = self.frontend.flat_weights()
            then = [cell.read() for cell in self._weights[-1]]
            due = [g + self.compensation * g * g * (w - old) for g, w, old in zip(due, now, then, strict=True)]
            _write(self._weights, [now, *([cell.read() for cell in cells] for cells in self._weights[:-1])])
        _write(self._gradients, [started, *reduced])
        self._steps.write(self._steps.read() + 1)
        self._local.write(1)
        return due

    def step(self, gradients: Sequence[Tensor], learning_rate: Any) -> None:
        move = partial(self.move, gradients, learning_rate)
        if self.delay:
            self.frontend.ops.do_if(self._due, move)
        else:
            move()

    def _depart(self) -> Callable[[], Landed]:
        """Start the exchange of the newest gradient; return the function that waits for it."""
        started = [self.exchange.start(b, cell.read(), self._state(b)) for b, cell in enumerate(self._gradients[0])]
        return lambda: self.exchange.finish(started)

    def _newest(self) -> Landed:
        """Return the newest gradient as it is kept."""
        return [cell.read() for cell in self._gradients[0]], [self._state(b) for b in range(len(self.buckets))]

    def _arrived(self) -> list[Tensor]:
        """Return the reduced gradient of the last step; zeros before there is one."""
        gradients, states = (self._land or self._newest)()
        self._land = None
        self._write_states(states)
        return gradients

    # ---- between steps

    def finish_transfers(self) -> None:
        """Reduce the gradient of the last step, so that ``state`` holds it; the next step then need not."""
        self.frontend.run_queued()
        if int(self._local.read()):
            self._land = self._land or self._depart()
            _write(self._gradients[:1], [self._arrived()])
            self._local.write(0)

    def state(self) -> list[Entry]:
        """List slots, residuals and what is under way; see ``finish_transfers``."""
        return [*super().state(), *self._in_flight()]

    def load(self, tree: Mapping[str, np.ndarray], placement: Placement) -> None:
        super().load(tree, placement)
        if placement is not Placement.REPLICATED or not self.delay:
            return
        if STEPS in tree:
            self._steps.write(int(tree[STEPS]))
            self._local.write(0)
        for prefix, bucket, cell in self._named_cells():
            self._flat.load(prefix, bucket, cell, tree)

    def _in_flight(self) -> Iterator[Entry]:
        if not self.delay:
            return
        yield Entry(STEPS, Placement.REPLICATED, lambda: np.array(min(int(self._steps.read()), self.delay), np.int64))
        for prefix, bucket, cell in self._named_cells():
            yield from self._flat.entries(prefix, bucket, cell.read)

    def _named_cells(self) -> Iterator[tuple[str, int, Cell]]:
        """Yield (prefix of the names, bucket, cell) for each flat tensor that is kept."""
        for kind, kept in (("gradient", self._gradients), ("weights", self._weights)):
            for ago, cells in enumerate(kept, 1):
                for bucket, cell in enumerate(cells):
                    yield f"{IN_FLIGHT}{kind}{ago}/", bucket, cell


def _write(kept: Sequence[Sequence[Cell]], values: Sequence[Sequence[Tensor]]) -> None:
    for cells, tensors in zip(kept, values, strict=True):
        for cell, x in zip(cells, tensors, strict=True):
            cell.write(x)
