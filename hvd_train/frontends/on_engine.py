"""The engine's collectives over arrays in host memory."""

from __future__ import annotations

import os
import sys
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hvd_train.engine import transfers
from hvd_train.engine.library import BINDINGS, built, chosen, damage, file_of, lacking
from hvd_train.engine.transfers import ADASUM, ALLGATHER, ALLREDUCE, ALLTOALL, AVERAGE, BROADCAST, SUM, Block
from hvd_train.errors import ConfigError
from hvd_train.frontends.horovod import HorovodCommunicator, RankParts, guarded
from hvd_train.frontends.mpi import address_of
from hvd_train.installation import AGAIN, install_fix, replace_fix
from hvd_train.protocol import Handle, Tensor

STOCK = ("horovod.torch", "horovod.tensorflow")
OPS = {"sum": SUM, "average": AVERAGE, "adasum": ADASUM}


def check_file(file: Path) -> None:
    """Raise ConfigError if a library of the engine cannot be loaded on this machine."""
    if fault := damage(file):
        raise ConfigError(f"the engine's library {fault}", where=str(file), fix=replace_fix())


class EngineCommunicator(HorovodCommunicator):
    """A subclass has the tensor collectives of its framework; bytes travel as NumPy's arrays."""

    def _open(self) -> transfers.Engine:
        if missing := lacking():
            raise ConfigError(f"the engine needs a processor with {missing} (2013 or newer)", fix="take another host")
        if others := sorted(name for name in STOCK if name in sys.modules):
            what = f"two Horovods in one process: hvd_train's engine, and {others[0]}, which this process has imported"
            raise ConfigError(what, where=others[0], fix=f"do not import it, or set {BINDINGS}=stock")
        if not built():
            raise ConfigError("the engine is not built", fix=install_fix("--bindings both"))
        if (value := os.environ.get(BINDINGS, "")) not in ("", "engine", "stock"):
            raise ConfigError(f"{value!r} is neither engine nor stock", where=BINDINGS, fix="unset it")
        check_file(file_of(name := chosen()))
        try:
            return transfers.Engine(name)
        except OSError as error:
            without = "take --launcher horovodrun, which needs none"
            if "gloo" not in built():
                without = f"add the library for Gloo alone: {AGAIN}"
            fix = f"load the MPI that starts the ranks, or {without}"
            raise ConfigError(f"the engine cannot be loaded: {error}", fix=fix) from error

    def _set_of(self, ranks: list[int]) -> transfers.ProcessSet:
        return transfers.ProcessSet(ranks)

    def _connect(self) -> None:
        self.hvd.init(self._sets, address_of(self.part) if self.part else None)

    @property
    def _process_set(self) -> int:
        """The number of the process set of these ranks."""
        return self._within["process_set"].number if self._within else 0

    def _check(self, op: str) -> None:
        if op == "adasum" and self.size & (self.size - 1):
            raise NotImplementedError("Adasum needs a number of ranks that is a power of 2")

    @guarded
    def _broadcast(self, data, root, name) -> np.ndarray:
        one = transfers.block(data)
        self.hvd.start(
            BROADCAST, [f"broadcast.{name}"], [one], [one], root=root, process_set=self._process_set, kept=data
        ).wait()
        return data

    @guarded
    def _allgather(self, data, name) -> np.ndarray:
        return self._received(ALLGATHER, f"allgather.{name}", data)

    @guarded
    def _alltoall(self, data, sizes, name) -> np.ndarray:
        return self._received(ALLTOALL, f"alltoall.{name}", data, sizes)

    def _received(self, collective: int, name: str, data: np.ndarray, sizes: Sequence[int] = ()) -> np.ndarray:
        blocks = [transfers.block(data)]
        transfer = self.hvd.start(collective, [name], blocks, process_set=self._process_set, splits=sizes, kept=data)
        transfer.wait()
        return transfer.output()


class EagerEngine(EngineCommunicator):
    """Collectives that run when they are called. A subclass says where its tensors lie, and makes them of arrays."""

    @abstractmethod
    def _block(self, x: Tensor) -> Block:
        """Return the address, shape and type of ``x``, which is contiguous and in host memory."""

    @abstractmethod
    def _of_array(self, array: np.ndarray) -> Tensor:
        """Return a tensor on the array's memory."""

    @guarded
    def allreduce_async(self, x, name, op="sum") -> Handle:
        self._check(op)
        blocks = [self._block(x)]
        return self.hvd.start(
            ALLREDUCE,
            [f"allreduce.{name}"],
            blocks,
            blocks,
            reduce_op=OPS[op],
            process_set=self._process_set,
            kept=x,
        )

    @guarded
    def allgather_async(self, x, name) -> Handle:
        blocks = [self._block(x)]
        return self.hvd.start(ALLGATHER, [f"allgather.{name}"], blocks, process_set=self._process_set, kept=x)

    @guarded
    def alltoall_async(self, x, sizes, name) -> Handle:
        blocks = [self._block(x)]
        return self.hvd.start(
            ALLTOALL, [f"alltoall.{name}"], blocks, process_set=self._process_set, splits=sizes, kept=x
        )

    @guarded
    def synchronize(self, handle) -> Tensor:
        if isinstance(handle, RankParts):
            return handle.add(self._result(handle.transfer))
        return self._result(handle)

    def _result(self, transfer: Handle) -> Tensor:
        transfer.wait()
        return transfer.kept if transfer.in_place else self._of_array(transfer.output())


class EngineNumpy(EagerEngine):
    """The engine over NumPy's arrays."""

    def allreduce_async(self, x, name, op="sum") -> Handle:
        return super().allreduce_async(np.array(x), name, op)  # not in place: x may be a number

    def _block(self, x) -> Block:
        return transfers.block(x)

    def _of_array(self, array) -> np.ndarray:
        return array
