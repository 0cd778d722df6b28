"""Horovod over PyTorch tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hvd_train.engine.library import use_stock
from hvd_train.engine.transfers import TYPES, Block
from hvd_train.frameworks import PYTORCH
from hvd_train.frontends.horovod import HorovodCommunicator, RankParts, StockBindings, guarded
from hvd_train.frontends.on_engine import EagerEngine
from hvd_train.protocol import Communicator

TYPE_NAMES = {getattr(torch, name): name for name in TYPES if hasattr(torch, name)}


class EngineTorch(EagerEngine):
    """The engine over tensors in host memory; those of a GPU are copied there and back."""

    def _block(self, x) -> Block:
        if not x.is_contiguous():
            raise ValueError("a tensor that is exchanged must be contiguous")
        return Block(x.data_ptr(), x.shape, TYPE_NAMES[x.dtype])

    def _of_array(self, array) -> torch.Tensor:
        return torch.from_numpy(array)

    def allreduce_async(self, x, name, op="sum") -> Any:
        start = super().allreduce_async
        return OnHost(start(x.cpu(), name, op), x) if x.is_cuda else start(x, name, op)

    def allgather_async(self, x, name) -> Any:
        start = super().allgather_async
        return OnHost(start(x.cpu(), name), x) if x.is_cuda else start(x.contiguous(), name)

    def alltoall_async(self, x, sizes, name) -> Any:
        start = super().alltoall_async
        return OnHost(start(x.cpu(), sizes, name), x) if x.is_cuda else start(x.contiguous(), sizes, name)

    def _result(self, transfer) -> torch.Tensor:
        if not isinstance(transfer, OnHost):
            return super()._result(transfer)
        received = super()._result(transfer.transfer)
        return transfer.place.copy_(received) if transfer.transfer.in_place else received.to(transfer.place.device)


@dataclass(frozen=True)
class OnHost:
    """A transfer of the copy in host memory of ``place``, a tensor of a GPU."""

    transfer: Any
    place: torch.Tensor


class HorovodTorch(HorovodCommunicator):
    """Exchanges by ``horovod.torch``, which uses NCCL on GPUs."""

    def _open(self) -> StockBindings:
        return StockBindings(PYTORCH.horovod)

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


def make_communicator(expected_size: int) -> Communicator:
    return HorovodTorch(expected_size) if use_stock() else EngineTorch(expected_size)
