"""Squared norms of gradients: this rank's before the exchange, and the reduced one after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from hvd_train.protocol import Ops, Tensor


class GradientNorms:
    """Adds up the squared norms of measured steps, on the device and without a transfer.

    ``part``: the share of the reduced gradient's squared norm that this rank adds to the sum over ranks: 1 if ranks
    have parts of the gradient, else 1 / ranks.
    """

    def __init__(self, ops: Ops, part: float) -> None:
        self._ops, self._part = ops, part
        self.factor: Any = 0.0  # of this rank's squared norm; 0: the step is not measured. In a graph a tensor
        self._sent: list[Callable[[], Tensor]] = []  # of the buckets of the step in progress
        self._sums = ops.keep(np.zeros(2))

    @contextmanager
    def traced(self, factor: Any) -> Iterator[None]:
        """Trace a step whose ``factor`` is a tensor."""
        before, self.factor = self.factor, factor
        try:
            yield
        finally:
            self.factor = before

    @property
    def _off(self) -> bool:
        return isinstance(self.factor, float) and not self.factor

    def sent(self, gradient: Tensor) -> None:
        """Take this rank's gradient of a bucket, before the exchange overwrites it."""
        if self._off:
            return

        def start() -> Callable[[], Tensor]:
            square = self._square(gradient)  # at once
            return lambda: square

        zero = lambda: self._ops.from_numpy(np.zeros(()))  # noqa: E731
        self._sent.append(self._ops.start_if(self.factor > 0, start, zero))

    def received(self, gradients: Sequence[Tensor]) -> None:
        """Take the reduced gradients of all buckets, not clipped; this ends the step."""
        if self._off:
            return
        sent, self._sent = [square() for square in self._sent], []

        def add() -> None:
            sums = [_sum(sent) * self.factor, _sum([*map(self._square, gradients)]) * self._part]
            self._sums.write(self._sums.read() + self._ops.stack(sums))

        self._ops.do_if(self.factor > 0, add)

    def _square(self, x: Tensor) -> Tensor:
        # A fifth of the time of ``sum_of_squares``, whose bits do not depend on threads: no weight depends on these.
        flat = self._ops.reshape(x, (-1,))
        return self._ops.cast(self._ops.dot(flat, flat), "float64")

    def take(self) -> np.ndarray:
        """Return the sums since the last call, (2,) float64: factor x this rank's, and its part of the reduced."""
        sums = self._ops.to_numpy(self._sums.read())
        self._sums.write(self._ops.from_numpy(np.zeros(2)))
        return sums


def _sum(parts: Sequence[Tensor]) -> Tensor:
    return sum(parts[1:], start=parts[0])
