"""Processes that fetch samples for a rank. They are forked when the data are opened: before threads, MPI and GPUs are
there, and with the data set as it is, which need not be pickled."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import pickle
import signal
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from hvd_train.errors import DataError, TrainError, named_reason

PR_SET_PDEATHSIG = 1
LARGE = 1 << 16  # bytes of an array from which memory that both processes see is faster than the pipe


class ItemWorkers:
    """Processes that call ``work``. ``run`` may be called by as many threads at a time as there are processes."""

    def __init__(self, count: int, work: Callable[..., Any], where: str) -> None:
        self._where, self._free = where, SimpleQueue[_Worker]()
        ends: list[Connection] = []
        memories: list[Memory] = []
        fork = multiprocessing.get_context("fork")
        for _ in range(count):
            ours, theirs = fork.Pipe()
            memory = Memory.made()
            ends.append(ours)
            memories.append(memory)
            arguments = (theirs, memory, list(ends), memories[:-1], work)
            process = fork.Process(target=_serve, args=arguments, daemon=True, name="fetch")
            process.start()
            theirs.close()
            self._free.put(_Worker(ours, memory))
        weakref.finalize(self, _close, [*ends, *memories])

    def run(self, *arguments: Any) -> Any:
        """Call ``work(*arguments)`` in a process that is free; return its result, or raise its error."""
        worker = self._free.get()
        try:
            worker.connection.send(arguments)
            error, pickled, sizes = worker.connection.recv()
            value = None if error else pickle.loads(pickled, buffers=worker.memory.read(sizes))
        except (OSError, EOFError) as lost:
            what = "a process that fetches samples has ended"
            raise DataError(what, where=self._where, fix="look for a crash or too little memory") from lost
        finally:
            self._free.put(worker)
        if error:
            raise error
        return value


class Memory:
    """Shared memory through which a forked worker hands over large arrays.

    Through a pipe, 32 photographs of 224 x 224 as float32 took 36 ms, a quarter of the time to decode them.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._memory: mmap.mmap | None = None

    @classmethod
    def made(cls) -> Memory:
        """Make memory, or one that holds nothing where a sandbox forbids it."""
        with suppress(OSError):
            return cls(os.memfd_create("hvd-train-samples", os.MFD_CLOEXEC))
        return cls(None)

    def takes(self, part: pickle.PickleBuffer) -> bool:
        return self._descriptor is not None and part.raw().nbytes >= LARGE

    def write(self, parts: list[pickle.PickleBuffer]) -> list[int]:
        """Write the parts one after the other; return their sizes. Those of the last ``write`` are gone."""
        sizes = [part.raw().nbytes for part in parts]
        if parts:
            memory, start = self._mapped(sum(sizes), grow=True), 0
            for part, size in zip(parts, sizes, strict=True):
                memory[start : start + size] = part.raw()
                start += size
        return sizes

    def read(self, sizes: list[int]) -> list[bytearray]:
        """Return copies of what the other process has written."""
        if not sizes:
            return []
        view, start, parts = memoryview(self._mapped(sum(sizes))), 0, []
        for size in sizes:
            parts.append(bytearray(view[start : start + size]))
            start += size
        view.release()
        return parts

    def _mapped(self, size: int, grow: bool = False) -> mmap.mmap:
        assert self._descriptor is not None
        if self._memory is None or len(self._memory) < size:
            if grow:
                os.ftruncate(self._descriptor, size)
            self._memory = mmap.mmap(self._descriptor, size)
        return self._memory

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)


@dataclass
class _Worker:
    connection: Connection
    memory: Memory


def _close(ends: list[Any]) -> None:
    for end in ends:
        with suppress(OSError):
            end.close()


def _serve(
    connection: Connection, memory: Memory, others: list[Connection], memories: list[Memory], work: Callable[..., Any]
) -> None:
    """Answer requests until the rank closes its end, or dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the rank, which saves first
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _close([*others, *memories])
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # the threads of the process that was forked are not here, and would be waited for
    with suppress(EOFError, OSError):
        while True:
            arguments = connection.recv()
            error: TrainError | None = None
            value = None
            try:
                value = work(*arguments)
            except TrainError as caught:
                error = caught
            except Exception as caught:
                error = DataError(f"fetch failed: {named_reason(caught)}", where=f"process {os.getpid()}")
            large: list[pickle.PickleBuffer] = []

            def apart(part: pickle.PickleBuffer, large: list[pickle.PickleBuffer] = large) -> bool:
                """Keep a large array for the common memory; True: the others go through the pipe."""
                if not memory.takes(part):
                    return True
                large.append(part)
                return False

            pickled = pickle.dumps(value, protocol=5, buffer_callback=apart)
            connection.send((error, pickled, memory.write(large)))
