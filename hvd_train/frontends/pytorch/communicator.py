"""Horovod over PyTorch tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hvd_train.frameworks import PYTORCH
from hvd_train.frontends.horovod import HorovodCommunicator, RankParts, guarded


@dataclass(frozen=True)
class OnHost:
    """An allreduce in host memory, whose result is copied back to ``place`` on a GPU."""

    transfer: int
    place: torch.Tensor


class HorovodTorch(HorovodCommunicator):
    module = PYTORCH.horovod

    @guarded
    def allreduce_async(self, x, name, op="sum") -> int | OnHost:
        ops = {"sum": self.hvd.Sum, "average": self.hvd.Average, "adasum": self.hvd.Adasum}
        # With NCCL, Horovod averages over the GPUs of a host, and runs Adasum only between hosts.
        on_host = op == "adasum" and x.is_cuda
        transfer = self.hvd.allreduce_async_(x.cpu() if on_host else x, name=name, op=ops[op], **self._within)
        return OnHost(transfer, x) if on_host else transfer

    @guarded
    def allgather_async(self, x, name) -> int:
        return self.hvd.allgather_async(x, name=name, **self._within)

    @guarded
    def alltoall_async(self, x, sizes, name) -> int:
        return self.hvd.alltoall_async(x, splits=list(sizes), name=name, **self._within)

    @guarded
    def synchronize(self, handle) -> torch.Tensor:
        result = self.hvd.synchronize(handle.transfer if isinstance(handle, RankParts | OnHost) else handle)
        received = result[0] if isinstance(result, tuple) else result  # an alltoall also returns the received sizes
        if isinstance(handle, OnHost):
            return handle.place.copy_(received)
        return handle.add(received) if isinstance(handle, RankParts) else received

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
