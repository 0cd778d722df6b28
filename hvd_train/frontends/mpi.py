"""mpi4py's world, for what Horovod lacks: objects, groups of ranks, one-sided memory."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from hvd_train.errors import ConfigError
from hvd_train.installation import PIP_MPI, install_fix
from hvd_train.launch.launchers import named
from hvd_train.launch.world import World


def can_meet(here: World) -> None:
    """Raise ConfigError if mpi4py does not connect the launcher's ranks."""
    if not named(here.launcher).opens_mpi:
        what = f"{here.launcher}'s ranks cannot connect by mpi4py"
        raise ConfigError(what, where=here.launcher, fix="start with mpirun")


def mpi_world(here: World) -> Any:
    """Return mpi4py's communicator of all ranks that the launcher started."""
    can_meet(here)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: no MPI library
        what = f"several ranks need mpi4py: {str(error).splitlines()[0]}"
        raise ConfigError(what, fix=f"{install_fix(pip=PIP_MPI)}, or start one process") from error
    ranks = MPI.COMM_WORLD
    if ranks.size != here.size:
        what = f"the launcher started {here.size} ranks, but mpi4py sees a world of {ranks.size}"
        raise ConfigError(what, where=here.launcher, fix="start with mpirun")
    return ranks


def address_of(mpi: Any) -> int:
    """Return where the MPI_Comm of mpi4py's communicator lies."""
    from mpi4py import MPI

    return MPI._addressof(mpi)


def leave(code: int) -> NoReturn:
    """End all ranks together, and finalize MPI before Python exits, where its clean-up would collide with Horovod's."""
    from mpi4py import MPI

    sys.stdout.flush()
    sys.stderr.flush()
    MPI.Finalize()
    os._exit(code)


class Counter:
    """A counter 0, 1, 2, ... shared by all ranks of ``mpi``; each number is given to one rank.

    It is one-sided: rank 0 holds the number, but takes no part when another rank asks.
    """

    def __init__(self, mpi: Any) -> None:
        from mpi4py import MPI

        self._type, self._add = MPI.INT64_T, MPI.SUM
        self._window = MPI.Win.Allocate(8 if mpi.rank == 0 else 0, 8, comm=mpi)
        if mpi.rank == 0:
            self._window.Lock(0)
            self._window.Put([np.zeros(1, np.int64), self._type], 0)
            self._window.Unlock(0)
        mpi.Barrier()

    def next(self) -> int:
        number = np.zeros(1, np.int64)
        self._window.Lock(0)
        self._window.Fetch_and_op([np.ones(1, np.int64), self._type], [number, self._type], 0, 0, self._add)
        self._window.Unlock(0)
        return int(number[0])

    def close(self) -> None:
        self._window.Free()


class MpiWindow:
    """``entries`` numbers of this rank, initially zero, that all ranks of ``mpi`` read and change one-sidedly.

    ``took`` gets the seconds of each call.
    """

    def __init__(
        self, mpi: Any, entries: int, dtype: str, took: Callable[[float], None] = lambda seconds: None
    ) -> None:
        from mpi4py import MPI

        self._took = took
        self._mpi, self._dtype = MPI, np.dtype(dtype)
        # Horovod's thread calls MPI at the same time.
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise _no_windows("it is not thread-safe (MPI_THREAD_MULTIPLE)")
        try:
            window = MPI.Win.Allocate(entries * self._dtype.itemsize, self._dtype.itemsize, comm=mpi)
        except (MPI.Exception, NotImplementedError) as error:
            raise _no_windows(str(error).splitlines()[0]) from error
        self._window, self._lengths = window, mpi.allgather(entries)
        if entries:
            window.Lock(mpi.rank)
            memory: Any = window.tomemory()
            np.frombuffer(memory, self._dtype)[:entries] = 0
            window.Unlock(mpi.rank)
        mpi.Barrier()

    def read(self, rank: int, into: np.ndarray) -> None:
        began = time.perf_counter()
        # Not Get: it may read a half-written entry during an Accumulate.
        self._window.Lock(rank, self._mpi.LOCK_SHARED)
        kind = self._mpi.Datatype.fromcode(into.dtype.char)
        self._window.Get_accumulate([into, 0, kind], into, rank, [0, len(into), kind], self._mpi.NO_OP)
        self._window.Unlock(rank)
        self._took(time.perf_counter() - began)

    def add(self, rank: int, x: np.ndarray) -> None:
        began = time.perf_counter()
        self._window.Lock(rank, self._mpi.LOCK_SHARED)
        self._window.Accumulate(x, rank, op=self._mpi.SUM)
        self._window.Unlock(rank)
        self._took(time.perf_counter() - began)

    def change(self, rank: int, to: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        began = time.perf_counter()
        old = np.empty(self._lengths[rank], self._dtype)
        self._window.Lock(rank)
        self._window.Get(old, rank)
        self._window.Flush(rank)
        self._window.Put(np.ascontiguousarray(to(old), self._dtype), rank)
        self._window.Unlock(rank)
        self._took(time.perf_counter() - began)
        return old

    def close(self) -> None:
        self._window.Free()


def _no_windows(reason: str) -> ConfigError:
    # Open MPI 4.1 has no one-sided operations over TCP for threaded programs, only over shared memory or RDMA.
    fix = "start all ranks on one host, or over a network with RDMA, or set exchange.mode: outer or local_sgd"
    return ConfigError(f"this MPI gives no memory that other ranks read and change: {reason}", fix=fix, common=True)
