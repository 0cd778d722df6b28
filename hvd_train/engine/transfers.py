"""Start collectives on memory by its address, and wait for them."""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_train.engine.library import EngineCall, load

ALLREDUCE, ALLGATHER, BROADCAST, ALLTOALL, REDUCESCATTER = range(5)
AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT = range(6)
# Horovod's numbers of types of entries. It has no bfloat16.
TYPES = ("uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64", "bool")
TYPE_NUMBERS = {name: number for number, name in enumerate(TYPES)}
MOST_DIMENSIONS = 16
YIELD_SECONDS = 2e-4  # before a waiting thread sleeps: small tensors are there sooner than a sleeper wakes up


class TransferError(Exception):
    """Horovod refused or ended a transfer."""


@dataclass(frozen=True)
class Block:
    """A tensor in host memory, contiguous; ``dtype``: one of TYPES."""

    address: int
    shape: Sequence[int]
    dtype: str


def block(array: np.ndarray) -> Block:
    """Return where a contiguous array lies."""
    if not array.flags.c_contiguous:
        raise ValueError("an array that is exchanged must be contiguous")
    return Block(array.__array_interface__["data"][0], array.shape, array.dtype.name)


class Transfer:
    """A collective under way. ``kept``: what owns its memory; ``in_place``: whether the result is there."""

    def __init__(self, library: ctypes.CDLL, pointer: int, dtype: str, kept: Any, in_place: bool) -> None:
        self._library, self._pointer, self._dtype = library, pointer, dtype
        self.kept, self.in_place = kept, in_place

    def ended(self) -> bool:
        return bool(self._library.engine_ended(self._pointer))

    def wait(self) -> None:
        """Wait for the end. Raises TransferError."""
        if self._library.engine_wait(self._pointer, YIELD_SECONDS):
            raise TransferError(self._library.engine_error().decode(errors="replace"))

    def output(self, index: int = 0) -> np.ndarray:
        """Return what an allgather or alltoall received; ``index`` 1: the rows that an alltoall got from each rank."""
        data, shape = ctypes.c_void_p(), (ctypes.c_int64 * MOST_DIMENSIONS)()
        dims = self._library.engine_output(self._pointer, index, ctypes.byref(data), shape, MOST_DIMENSIONS)
        return np.asarray(_Output(self, data.value, tuple(shape[:dims]), "int32" if index else self._dtype))

    def __del__(self) -> None:
        if "_library" not in vars(self):  # torch.compile makes such an object while it traces
            return
        if not self.ended():
            _abandoned.append((self._pointer, self.kept))  # Horovod still writes there
        else:
            self._library.engine_free(self._pointer)


_abandoned: list[Any] = []


class _Output:
    """Memory of a transfer, as NumPy reads it; the array holds this, and this the transfer."""

    def __init__(self, transfer: Transfer, address: int | None, shape: tuple[int, ...], dtype: str) -> None:
        self._transfer = transfer
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": shape,
            "typestr": np.dtype(dtype).str,
        }


class ProcessSet:
    """Some ranks, whose collectives are their own. ``number``: Horovod's, once the engine has started."""

    number = 0

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = sorted(ranks)


class Engine:
    """Horovod in one process."""

    def __init__(self, name: str) -> None:
        self.library = load(name)

    def init(self, process_sets: Sequence[ProcessSet] = (), comm: int | None = None) -> None:
        """Connect all ranks of the launcher, or those of ``comm``, the address of an MPI_Comm. Raises TransferError."""
        library = self.library
        sizes = [len(one.ranks) for one in process_sets]
        ranks = [rank for one in process_sets for rank in one.ranks]
        sets = (ctypes.c_int * len(ranks))(*ranks), (ctypes.c_int * len(sizes))(*sizes), len(sizes)
        atexit.register(library.horovod_shutdown)
        if comm is None:
            connected = library.horovod_init(None, 0, *sets)
        else:
            connected = library.horovod_init_multi_comm(ctypes.c_void_p(comm), 1, *sets)
        if not connected:
            raise TransferError("Horovod cannot connect the ranks")
        numbers = {tuple(ranks): number for number, ranks in self._process_sets().items()}
        for one in process_sets:
            one.number = numbers[tuple(one.ranks)]

    def _process_sets(self) -> dict[int, list[int]]:
        count = self.library.horovod_number_of_process_sets()
        numbers = (ctypes.c_int * count)()
        self.library.horovod_process_set_ids(numbers)
        sets = {}
        for number in numbers:
            ranks = (ctypes.c_int * self.library.horovod_process_set_size(number))()
            self.library.horovod_process_set_ranks(number, ranks)
            sets[number] = list(ranks)
        return sets

    def shutdown(self) -> None:
        self.library.horovod_shutdown()

    def rank(self) -> int:
        return self.library.horovod_rank()

    def size(self) -> int:
        return self.library.horovod_size()

    def local_rank(self) -> int:
        return self.library.horovod_local_rank()

    def local_size(self) -> int:
        return self.library.horovod_local_size()

    def mpi_enabled(self) -> bool:
        return self.library.horovod_mpi_enabled()

    def failed(self) -> bool:
        """Return whether a transfer failed whose end nobody waits for: inside a graph."""
        return bool(self.library.horovod_failed())

    def stall(self) -> str:
        """Return which tensor waited for which ranks, if that ended the transfers."""
        return self.library.horovod_stall().decode(errors="replace")

    def start(
        self,
        collective: int,
        names: Sequence[str],
        inputs: Sequence[Block],
        outputs: Sequence[Block] | None = None,
        reduce_op: int = SUM,
        root: int = 0,
        prescale: float = 1.0,
        postscale: float = 1.0,
        process_set: int = 0,
        splits: Sequence[int] = (),
        kept: Any = None,
    ) -> Transfer:
        """Start a collective of equally typed tensors: a group if there are several.

        ``root``: of a broadcast, a rank of the world. ``splits``: of an alltoall, rows to each rank. ``kept``: what
        owns the memory, and is held until the transfer has ended. Raises TransferError; ValueError for a sum of bools.
        """
        count, first = len(inputs), inputs[0]
        if first.dtype == "bool" and collective in (ALLREDUCE, REDUCESCATTER):
            raise ValueError("truth values cannot be added")  # MPI would end the job
        sizes = [size for one in inputs for size in one.shape]
        call = EngineCall(
            collective,
            count,
            (ctypes.c_char_p * count)(*[name.encode() for name in names]),
            (ctypes.c_void_p * count)(*[one.address for one in inputs]),
            (ctypes.c_void_p * count)(*[one.address for one in outputs]) if outputs else None,
            (ctypes.c_int * count)(*[len(one.shape) for one in inputs]),
            (ctypes.c_int64 * len(sizes))(*sizes),
            TYPE_NUMBERS[first.dtype],
            reduce_op,
            root,
            prescale,
            postscale,
            process_set,
            (ctypes.c_int32 * len(splits))(*splits) if splits else None,
            len(splits),
        )
        pointer = self.library.engine_start(ctypes.byref(call))
        if not pointer:
            raise TransferError(self.library.engine_error().decode(errors="replace"))
        return Transfer(self.library, pointer, first.dtype, kept, in_place=outputs is inputs)
