"""Overlap of the exchange with the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvd_train import protocol


class Overlap:
    """An exchange that starts each bucket as soon as the last of its gradients has arrived.

    ``start(b)`` assembles bucket ``b`` and passes it to ``Exchange.start``. ``finish`` starts the remaining buckets:
    those with a tensor that backward does not reach, or all if ``arrived`` is not called.
    """

    def __init__(self, exchange: protocol.Exchange | protocol.StepUpdate, start: Callable[[int], Any]) -> None:
        self._exchange, self._start = exchange, start
        self.bucket = {i: b for b, members in enumerate(exchange.buckets) for i in members}
        self.begin()

    def begin(self) -> None:
        """Begin a pass, and discard what a failed one may have left."""
        self.started: dict[int, Any] = {}
        self._awaited: dict[int, set[int]] = {}

    def arrived(self, i: int) -> int | None:
        """Record that gradient ``i`` has arrived; return the bucket that this starts, if any.

        A gradient that arrives twice before its bucket has started counts once.
        """
        b = self.bucket[i]
        if b in self.started:
            return None
        # From the first gradient of a bucket on, the pass waits for all of them.
        if b not in self._awaited:
            self._awaited[b] = set(self._exchange.buckets[b])
        self._awaited[b].discard(i)
        if self._awaited[b]:
            return None
        self.started[b] = self._start(b)
        return b

    def finish(self, last: int | None = None, start: Callable[[int], Any] | None = None) -> Any:
        """Start the remaining buckets, the bucket ``last`` at the end; return the result of the exchange."""
        buckets = range(len(self._exchange.buckets))
        # The same order on all ranks for those that backward has not started.
        for b in sorted(buckets, key=lambda b: b == last):
            if b not in self.started:
                self.started[b] = (start or self._start)(b)
        started = [self.started[b] for b in buckets]
        self.begin()
        return self._exchange.finish(started)
