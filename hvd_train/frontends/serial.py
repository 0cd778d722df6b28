"""The communicator of a single rank: every collective is the identity. Needs no Horovod."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hvd_train.protocol import Tensor


class LocalWindow:
    """A window that only this rank reads and changes."""

    def __init__(self, entries: int, dtype: str) -> None:
        self._memory = np.zeros(entries, dtype)

    def read(self, rank: int, into: np.ndarray) -> None:
        into[:] = self._memory

    def add(self, rank: int, x: np.ndarray) -> None:
        self._memory += x

    def change(self, rank: int, to: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        old = self._memory.copy()
        self._memory[:] = to(old)
        return old

    def close(self) -> None:
        pass


class Serial:
    rank = local_rank = 0
    size = local_size = 1
    mpi = False
    waited = 0.0

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def allreduce_async(self, x: Tensor, name: str, op: str = "sum") -> Tensor:
        return x

    def allgather_async(self, x: Tensor, name: str) -> Tensor:
        return x

    def alltoall_async(self, x: Tensor, sizes: Sequence[int], name: str) -> Tensor:
        return x

    def reduce_scatter_async(self, x: Tensor, sizes: Sequence[int], name: str) -> Tensor:
        return x

    def synchronize(self, handle: Tensor) -> Tensor:
        return handle

    def broadcast_bytes(self, data: bytes, root: int = 0) -> bytes:
        return data

    def allgather_bytes(self, data: bytes, name: str = "bytes") -> list[bytes]:
        return [data]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]

    def scatter_bytes(self, parts: Sequence[bytes]) -> bytes:
        return parts[0]

    def barrier(self) -> None:
        pass

    def window(self, entries: int, dtype: str) -> LocalWindow:
        return LocalWindow(entries, dtype)

    def failure(self, error: BaseException | None = None) -> None:
        return None
