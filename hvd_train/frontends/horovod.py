"""Horovod's life cycle and failures, and the collectives that are the same for every framework."""

from __future__ import annotations

import copy
import ctypes
import functools
import importlib
import re
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_train.checkpoint.serialize import PIECE_BYTES
from hvd_train.engine.library import missing_fix
from hvd_train.engine.transfers import TransferError
from hvd_train.errors import (
    SOME_RANK,
    CommunicationError,
    ConfigError,
    EndedRankError,
    LostRankError,
    TrainError,
)
from hvd_train.frontends.mpi import MpiWindow, mpi_world
from hvd_train.frontends.traffic import Traffic
from hvd_train.launch.environment import world
from hvd_train.launch.launchers import named
from hvd_train.launch.launchers.detected import ALONE
from hvd_train.launch.rendezvous import client as rendezvous
from hvd_train.launch.rendezvous.ready import wait_for_ranks
from hvd_train.launch.status import announce_met
from hvd_train.protocol import Handle, Tensor


def guarded(transfer: Callable) -> Callable:
    """Make a failed transfer raise the communicator's ``failure``.

    ``failure`` is no RuntimeError, so that a script's ``except RuntimeError`` does not catch it. If a script catches it
    anyway, the next transfer ends the process.
    """

    @functools.wraps(transfer)
    def call(self: HorovodCommunicator, *args: Any, **kwargs: Any) -> Any:
        if self._failure is not None:
            raise SystemExit(self._failure.exit_code)
        began = time.perf_counter()
        try:
            with self.slot or nullcontext():
                return transfer(self, *args, **kwargs)
        except Exception as error:
            failure = self.failure(error)
            if failure is None:
                raise
            raise failure from error
        finally:
            self.waited += time.perf_counter() - began

    return call


@dataclass(frozen=True)
class RankParts:
    """A reduce-scatter in flight: ``ranks`` parts of ``length`` entries travel to the rank that adds them.

    The order in which Horovod's own reduce-scatter adds depends on transport and world size. Over Gloo its
    halving-doubling may also overwrite a buffer that is still being sent (pytorch/gloo issue 303).
    """

    transfer: Handle
    ranks: int
    length: int

    def add(self, received: Tensor) -> Tensor:
        """Add the parts in rank order; ``received``: (ranks * length,)."""
        first, *others = (received[rank * self.length : (rank + 1) * self.length] for rank in range(self.ranks))
        # The first sum is a new tensor: a slice of ``received`` would keep all of its memory alive.
        total = first + others[0] if others else first
        for part in others[1:]:
            total += part
        return total


class StockBindings:
    """Horovod's own module for a framework, with what our patch (scripts/horovod-*.patch) added to its library."""

    def __init__(self, module: str) -> None:
        self._module = importlib.import_module(module)
        self._library = self._module.mpi_ops._basics.MPI_LIB_CTYPES
        self._stall = getattr(self._library, "horovod_stall", None)
        if self._stall:
            self._stall.restype = ctypes.c_char_p

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def failed(self) -> bool:
        failed = getattr(self._library, "horovod_failed", None)
        return bool(failed and failed())

    def stall(self) -> str:
        return self._stall().decode() if self._stall else ""


class HorovodCommunicator(ABC):
    """Horovod's life cycle and byte transfers. A subclass adds its framework's tensor collectives, each ``guarded``."""

    rank = local_rank = 0
    size = local_size = 1
    mpi = False
    # mpi4py's communicator, if this one covers only some of the ranks.
    part: Any = None
    stages = 1  # of a pipeline; the ranks of one stage are ``stages`` apart
    waited = 0.0
    # A context in which a script's rank waits for other ranks; see launch/status.py.
    slot: Any = None
    left: Callable[[], Sequence[int]] = staticmethod(list)  # ranks of a script that have already ended
    _failure: TrainError | None = None

    def __init__(self, expected_size: int) -> None:
        self._expected = expected_size
        self._ranks: Sequence[int] = ()  # numbers in the world, if this communicator has only some of the ranks
        self._within: dict[str, Any] = {}  # arguments that select these ranks in Horovod
        self._sets: list[Any] = []

    @abstractmethod
    def _open(self) -> Any:
        """Load the engine, or Horovod's own module of the same interface."""

    def open(self) -> None:
        try:
            self.hvd: Any = self._open()
        except (ImportError, OSError) as error:
            raise ConfigError(f"Horovod cannot be used: {error}", fix=missing_fix()) from error
        wait_for_ranks(here := world())
        rendezvous.join_world(here)
        self._make_stage_sets()
        try:
            self._connect()
        except (ValueError, TransferError) as error:  # Horovod has printed the reason
            fix = "see the lines above; a rank may have ended, or a network does not reach the others"
            raise CommunicationError("Horovod cannot connect the ranks", fix=fix) from error
        self.rank, self.size = self.hvd.rank(), self.hvd.size()
        self.local_rank, self.local_size = self.hvd.local_rank(), self.hvd.local_size()
        self.mpi = self.hvd.mpi_enabled()
        if self.rank == 0:
            announce_met()
        if self.size != self._expected:
            # Without this check, each process would silently train alone.
            launcher = named(here.launcher)
            names, other = launcher.place_variables[:2], launcher.other_library
            raise CommunicationError(
                f"the launcher started {self._expected} ranks, but Horovod sees a world of {self.size}",
                where=f"environment variable {names[1]}",
                fix=f"Horovod and the launcher must speak the same MPI: see 'hvd-train doctor', or {other}; "
                f"{ALONE} {' '.join(names)}",
            )

    def _connect(self) -> None:
        """Connect the ranks: those of ``part``, in a sweep that mpi4py has split into worlds of their own, or all."""
        sets = {"process_sets": self._sets} if self._sets else {}
        self.hvd.init(*([self.part] if self.part else []), **sets)

    def _make_stage_sets(self) -> None:
        """Make a Horovod process set for the ranks of each stage, if there are several stages of several ranks."""
        if 1 < self.stages < self._expected:
            stages = range(self.stages)
            self._sets = [self._set_of([*range(stage, self._expected, self.stages)]) for stage in stages]

    def _set_of(self, ranks: list[int]) -> Any:
        return self.hvd.ProcessSet(ranks)

    def of_stage(self) -> HorovodCommunicator:
        """Return the communicator of the ranks of this rank's stage."""
        some = copy.copy(self)
        process_set = self._sets[self.rank % self.stages]
        some._ranks, some._within = process_set.ranks, {"process_set": process_set}
        some.waited = 0.0
        some.rank, some.size = self.rank // self.stages, len(process_set.ranks)
        return some

    def close(self) -> None:
        self.hvd.shutdown()

    def failure(self, error: BaseException | None = None) -> TrainError | None:
        # We cannot see an operation fail inside a graph.
        if self._failure is None and (_ended_transfers(error) or self.hvd.failed()):
            self._failure = _failure_of(error, self.hvd.stall(), self.left())
        return self._failure

    @abstractmethod
    def alltoall_async(self, x: Tensor, sizes: Sequence[int], name: str) -> Handle: ...

    def reduce_scatter_async(self, x: Tensor, sizes: Sequence[int], name: str) -> RankParts:
        return RankParts(self.alltoall_async(x, sizes, name), self.size, sizes[self.rank])

    @abstractmethod
    def _broadcast(self, data: np.ndarray, root: int, name: str) -> np.ndarray: ...

    @abstractmethod
    def _allgather(self, data: np.ndarray, name: str) -> np.ndarray: ...

    @abstractmethod
    def _alltoall(self, data: np.ndarray, sizes: Sequence[int], name: str) -> np.ndarray: ...

    def broadcast_bytes(self, data: bytes, root: int = 0) -> bytes:
        number = self._ranks[root] if self._ranks else root  # Horovod counts the ranks of the world
        length = self._broadcast(np.frombuffer(struct.pack("<q", len(data)), np.uint8).copy(), number, "bytes.length")
        (count,) = struct.unpack("<q", length.tobytes())
        parts = []
        # Horovod and we both hold copies, so send in pieces.
        for start in range(0, count, PIECE_BYTES):
            size = min(PIECE_BYTES, count - start)
            piece = np.frombuffer(data, np.uint8, size, start).copy() if self.rank == root else np.zeros(size, np.uint8)
            sent = self._broadcast(piece, number, "bytes.data")
            if self.rank != root:
                parts.append(sent.tobytes())
        return data if self.rank == root else b"".join(parts)

    def allgather_bytes(self, data: bytes, name: str = "bytes") -> list[bytes]:
        # Prefix each part with its length: Horovod only concatenates.
        framed = np.frombuffer(struct.pack("<q", len(data)) + data, np.uint8).copy()
        joined, parts = self._allgather(framed, f"{name}.gather").tobytes(), []
        while joined:
            (count,) = struct.unpack_from("<q", joined)
            parts.append(joined[8 : 8 + count])
            joined = joined[8 + count :]
        return parts

    def gather_bytes(self, data: bytes) -> list[bytes]:
        # Exchange lengths first: every rank must know the number of pieces of the longest part.
        counts = self.allgather_bytes(struct.pack("<q", len(data)), "lengths")
        lengths = [struct.unpack("<q", count)[0] for count in counts]
        parts: list[list[bytes]] = [[] for _ in lengths]
        step = -(-PIECE_BYTES // self.size)  # rank 0 receives a piece from every rank at once
        for start in range(0, max(lengths), step):
            piece = np.frombuffer(data[start : start + step], np.uint8).copy()
            received = self._alltoall(piece, [len(piece), *[0] * (self.size - 1)], "bytes.gathered")
            for part, length in zip(parts if self.rank == 0 else [], lengths, strict=False):
                count = min(max(length - start, 0), step)
                part.append(received[:count].tobytes())
                received = received[count:]
        return [b"".join(part) for part in parts] if self.rank == 0 else []

    def scatter_bytes(self, parts: Sequence[bytes]) -> bytes:
        parts = parts if self.rank == 0 else []
        counts = self.broadcast_bytes(struct.pack(f"<{len(parts)}q", *map(len, parts)))
        lengths = struct.unpack(f"<{self.size}q", counts)
        received: list[bytes] = []
        step = -(-PIECE_BYTES // self.size)  # rank 0 sends a piece to every rank at once
        for start in range(0, max(lengths), step):
            pieces = [part[start : start + step] for part in parts]
            sent = np.frombuffer(b"".join(pieces), np.uint8).copy()
            sizes = [len(piece) for piece in pieces] or [0] * self.size
            received.append(self._alltoall(sent, sizes, "bytes.scattered").tobytes())
        return b"".join(received)

    def barrier(self) -> None:
        self.allgather_bytes(b"", "barrier")

    def traffic(self) -> Traffic:
        """Make a counter of bytes for this framework's tensors."""
        return Traffic()

    def window(self, entries: int, dtype: str) -> MpiWindow:
        return MpiWindow(self.part or mpi_world(world()), entries, dtype, self._count_wait)

    def _count_wait(self, seconds: float) -> None:
        self.waited += seconds


def _ended_transfers(error: BaseException | None) -> bool:
    """Return whether the error means that Horovod has shut down its transfers."""
    # horovod.torch has an error class; TensorFlow's errors name the operation in their text.
    kind, text = type(error).__name__, str(error)
    graph = kind in ("UnknownError", "FailedPreconditionError", "InvalidArgumentError", "AbortedError")
    return kind in ("TransferError", "HorovodInternalError") or (graph and ("Horovod" in text or "HvdTrain" in text))


def _failure_of(error: BaseException | None, stalled: str, left: Sequence[int]) -> TrainError:
    if stalled:
        fix = "call the same on all ranks; if one is only slow, raise HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
        return CommunicationError(f"the ranks diverged: {stalled}", fix=fix)
    differs = re.search(r"(Mismatched|Invalid) [^\n]*", str(error))
    if differs:
        fix = "call the same on all ranks, with tensors of the same shape and type"
        return CommunicationError(f"the ranks diverged: {differs[0].strip()}", fix=fix)
    if left:
        what = f"rank {', '.join(map(str, left))} came to the end of the script, and this rank waits for it"
        fix = "end the loop at the same step on all ranks: decide by ht.sum or hk.reduce, take as many batches"
        return EndedRankError(what, fix=fix)
    return LostRankError(f"{SOME_RANK} was lost")
