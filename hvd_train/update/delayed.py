"""Delayed gradients (a fixed staleness): the exchange overlaps with the next steps.

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

STEPS = IN_FLIGHT + "steps"  # the entry with the number of gradients in flight
Reduced = tuple[list[Tensor], list[State]]


class Delayed(Replicated):
    """The update that applies each gradient ``delay`` steps later; the ranks always have the same weights.

    N ranks train as one rank does with the same delay. The first d steps apply nothing: weights, optimizer state and
    the optimizer's step count stay. The gradients of the last d steps of a training are not applied; its last
    checkpoint holds them, and a longer run applies them. A gradient is reduced, clipped, compensated, and applied with
    the learning rate of the step that applies it. A step skipped for a non-finite gradient neither stores nor applies
    one.

    The gradient of the last step is exchanged during this one. Older ones are kept reduced. So the residual of one
    gradient is there for the next, and a graph, within which a transfer must end, does the same.

    Checkpoints hold the reduced gradients in flight and, with a compensation, the weights that they were computed with.
    A run can resume from them on another number of ranks and in the other framework.
    """

    def __init__(self, frontend: Parameters, exchange: Exchange, delay: int, compensation: float) -> None:
        self.delay, self.compensation = delay, compensation
        super().__init__(frontend, exchange)
        ops, specs = frontend.ops, frontend.specs()
        self._flat = FlatState(frontend, self.buckets)

        def kept() -> list[list[Cell]]:
            """Make cells of zeros, indexed by [steps ago - 1][bucket], (n,) each."""
            kinds = [(sum(specs[i].size for i in members), specs[members[0]].dtype) for members in self.buckets]
            return [[ops.keep(np.zeros(*kind)) for kind in kinds] for _ in range(delay)]

        self._gradients = kept()
        self._weights = kept() if delay and compensation else []
        # The number of gradients stored so far, and whether the last one is still to be reduced (1) or not (0).
        self._steps, self._local = ops.keep_number(0), ops.keep_number(0)
        self._pending: Callable[[], Reduced] | None = None
        self._due: Any = False

    # ---- within a step

    def begin(self) -> None:
        """Start the exchange of the gradient of the last step, if it has not been reduced for a checkpoint."""
        if self.delay:
            self._pending = self.frontend.ops.start_if(self._local.read() > 0, self._start_newest, self._stored_newest)

    def start(self, bucket: int, gradient: Tensor) -> Any:
        """Store a gradient; the next ``begin`` starts its exchange."""
        return gradient if self.delay else super().start(bucket, gradient)

    def finish(self, started: Sequence[Any]) -> list[Tensor]:
        """Store this step's gradients; return the due ones, reduced and clipped, for ``step`` to apply."""
        if not self.delay:
            return super().finish(started)
        reduced = [self._await_newest(), *([cell.read() for cell in cells] for cells in self._gradients[1:])]
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
        update = partial(self.update_weights, gradients, learning_rate)
        if self.delay:
            self.frontend.ops.do_if(self._due, update)
        else:
            update()

    def _start_newest(self) -> Callable[[], Reduced]:
        """Start the exchange of the newest gradient; return the function that waits for it."""
        started = [self.exchange.start(b, cell.read(), self._state(b)) for b, cell in enumerate(self._gradients[0])]
        return lambda: self.exchange.finish(started)

    def _stored_newest(self) -> Reduced:
        """Return the newest gradient, and the residuals, as stored."""
        return [cell.read() for cell in self._gradients[0]], [self._state(b) for b in range(len(self.buckets))]

    def _await_newest(self) -> list[Tensor]:
        """Wait for the reduced gradient of the last step; zeros before there is one."""
        gradients, states = (self._pending or self._stored_newest)()
        self._pending = None
        self._write_states(states)
        return gradients

    # ---- between steps

    def finish_transfers(self) -> None:
        """Reduce the gradient of the last step now, so that ``state`` holds it."""
        self.frontend.run_queued()
        if int(self._local.read()):
            self._pending = self._pending or self._start_newest()
            _write(self._gradients[:1], [self._await_newest()])
            self._local.write(0)

    def state(self) -> list[Entry]:
        """List optimizer state, residuals and gradients in flight; see ``finish_transfers``."""
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
        """Yield (name prefix, bucket, cell) for each stored flat tensor."""
        for kind, kept in (("gradient", self._gradients), ("weights", self._weights)):
            for ago, cells in enumerate(kept, 1):
                for bucket, cell in enumerate(cells):
                    yield f"{IN_FLIGHT}{kind}{ago}/", bucket, cell


def _write(kept: Sequence[Sequence[Cell]], values: Sequence[Sequence[Tensor]]) -> None:
    for cells, tensors in zip(kept, values, strict=True):
        for cell, x in zip(cells, tensors, strict=True):
            cell.write(x)
