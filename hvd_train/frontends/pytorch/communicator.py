"""Horovod over PyTorch tensors."""

from __future__ import annotations

import numpy as np
import torch

from hvd_train.frameworks import PYTORCH
from hvd_train.frontends.horovod import HorovodCommunicator, RankParts, guarded


class HorovodTorch(HorovodCommunicator):
    module = PYTORCH.horovod

    @guarded
    def allreduce_async(self, x, name, op="sum") -> int:
        ops = {"sum": self.hvd.Sum, "average": self.hvd.Average, "adasum": self.hvd.Adasum}
        return self.hvd.allreduce_async_(x, name=name, op=ops[op], **self._within)

    @guarded
    def allgather_async(self, x, name) -> int:
        return self.hvd.allgather_async(x, name=name, **self._within)

    @guarded
    def alltoall_async(self, x, sizes, name) -> int:
        return self.hvd.alltoall_async(x, splits=list(sizes), name=name, **self._within)

    @guarded
    def synchronize(self, handle) -> torch.Tensor:
        parts = handle if isinstance(handle, RankParts) else None
        result = self.hvd.synchronize(parts.transfer if parts else handle)
        received = result[0] if isinstance(result, tuple) else result  # an alltoall gives the received sizes, too
        return parts.add(received) if parts else received

    @guarded
    def _broadcast(self, data, root, name) -> np.ndarray:
        return self.hvd.broadcast(torch.from_numpy(data), root, name=name, **self._within).numpy()

    @guarded
    def _allgather(self, data, name) -> np.ndarray:
        return self.hvd.allgather(torch.from_numpy(data), name=name, **self._within).numpy()

    @guarded
    def _alltoall(self, data, sizes, name) -> np.ndarray:
        return self.hvd.alltoall(torch.from_numpy(data), splits=list(sizes), name=name, **self._within)[0].numpy()


def make_communicator(expected_size: int) -> HorovodTorch:
    return HorovodTorch(expected_size)
