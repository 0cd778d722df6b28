"""Count the bytes that a rank sends, by wrapping its communicator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from hvd_train.protocol import Communicator, Groups, Handle, StageLinks, Tensor, Window


class Traffic:
    """A thread-safe counter of bytes."""

    def __init__(self) -> None:
        self._lock, self._bytes = threading.Lock(), 0.0

    def add(self, x: Tensor, times: float) -> None:
        """Count a tensor that travels ``times`` times."""
        self.add_bytes(x.nbytes * times)

    def add_bytes(self, count: float) -> None:
        with self._lock:
            self._bytes += count

    def total(self) -> float:
        return self._bytes


class MeteredCommunicator:
    """A communicator that counts the bytes of its tensor collectives.

    An allreduce counts as a ring's, 2 (N - 1) / N times its bytes, whatever the library does. Control traffic (checks,
    logs, signals) does not count.
    """

    def __init__(self, communicator: Communicator, traffic: Traffic) -> None:
        self._communicator, self._traffic = communicator, traffic
        self._others = communicator.size - 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._communicator, name)

    def allreduce_async(self, x: Tensor, name: str, op: str = "sum") -> Handle:
        self._traffic.add(x, 2 * self._others / self._communicator.size)
        return self._communicator.allreduce_async(x, name, op)

    def allgather_async(self, x: Tensor, name: str) -> Handle:
        self._traffic.add(x, self._others)
        return self._communicator.allgather_async(x, name)

    def alltoall_async(self, x: Tensor, sizes: Sequence[int], name: str) -> Handle:
        self._traffic.add(x, self._share_of_others(sizes))
        return self._communicator.alltoall_async(x, sizes, name)

    def reduce_scatter_async(self, x: Tensor, sizes: Sequence[int], name: str) -> Handle:
        self._traffic.add(x, self._share_of_others(sizes))
        return self._communicator.reduce_scatter_async(x, sizes, name)

    def window(self, entries: int, dtype: str) -> Window:
        return MeteredWindow(self._communicator.window(entries, dtype), self._communicator.rank, self._traffic)

    def _share_of_others(self, sizes: Sequence[int]) -> float:
        return 1 - sizes[self._communicator.rank] / max(sum(sizes), 1)


class MeteredWindow:
    """A window that counts the bytes to and from the memory of other ranks."""

    def __init__(self, window: Window, rank: int, traffic: Traffic) -> None:
        self._window, self._rank, self._traffic = window, rank, traffic

    def read(self, rank: int, into: np.ndarray) -> None:
        self._count(rank, into)
        self._window.read(rank, into)

    def add(self, rank: int, x: np.ndarray) -> None:
        self._count(rank, x)
        self._window.add(rank, x)

    def change(self, rank: int, to: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        old = self._window.change(rank, to)
        self._count(rank, old, 2)
        return old

    def _count(self, rank: int, x: np.ndarray, times: int = 1) -> None:
        if rank != self._rank:
            self._traffic.add_bytes(times * x.nbytes)

    def close(self) -> None:
        self._window.close()


class MeteredLinks:
    """The connections to the other stages of a pipeline, which count the bytes sent."""

    def __init__(self, links: StageLinks, traffic: Traffic) -> None:
        self._links, self._traffic = links, traffic

    def __getattr__(self, name: str) -> Any:
        return getattr(self._links, name)

    def send(self, stage: int, word: str, message: Any) -> None:
        self._traffic.add_bytes(message.data.nbytes)
        self._links.send(stage, word, message)

    def sum(self, x: np.ndarray, stages: Sequence[int], word: str) -> np.ndarray:
        self._traffic.add_bytes((len(stages) - 1) * np.asarray(x).nbytes)
        return self._links.sum(x, stages, word)


def metered(groups: Groups, traffic: Traffic) -> Groups:
    """Wrap the communicators of ``groups`` so that they count."""
    data = cast(Communicator, MeteredCommunicator(groups.data, traffic))
    if groups.links is None:
        return Groups.of(data)
    return replace(groups, data=data, links=cast(StageLinks, MeteredLinks(groups.links, traffic)))
