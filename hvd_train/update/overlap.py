"""Exchanges that begin while the backward pass still runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvd_train import protocol


class Overlap:
    """The buckets of a backward pass: each starts when the last of its gradients arrives, the others at the end.

    ``start(b)`` brings bucket ``b`` together and hands it to ``Exchange.start``. Members that no backward pass reaches,
    and all where ``arrived`` is not called, leave their buckets to ``finish``.
    """

    def __init__(self, exchange: protocol.Exchange | protocol.StepUpdate, start: Callable[[int], Any]) -> None:
        self._exchange, self._start = exchange, start
        self.bucket = {i: b for b, members in enumerate(exchange.buckets) for i in members}
        self.begin()

    def begin(self) -> None:
        """Begin a pass, whatever an error has left of the last one."""
        self.started: dict[int, Any] = {}
        self._awaited: dict[int, set[int]] = {}

    def arrived(self, i: int) -> int | None:
        """Note that gradient ``i`` has arrived; return the bucket that started thereby, if any.

        A gradient that arrives twice before its bucket has started counts once.
        """
        b = self.bucket[i]
        if b in self.started:
            return None
        # A pass waits for all members of a bucket, from the first of them on.
        if b not in self._awaited:
            self._awaited[b] = set(self._exchange.buckets[b])
        self._awaited[b].discard(i)
        if self._awaited[b]:
            return None
        self.started[b] = self._start(b)
        return b

    def finish(self, last: int | None = None, start: Callable[[int], Any] | None = None) -> Any:
        """Start the other buckets, ``last`` behind them, by ``start`` if given; return what the exchange finishes."""
        buckets = range(len(self._exchange.buckets))
        # The same order on all ranks for those that backward has not started.
        for b in sorted(buckets, key=lambda b: b == last):
            if b not in self.started:
                self.started[b] = (start or self._start)(b)
        started = [self.started[b] for b in buckets]
        self.begin()
        return self._exchange.finish(started)
