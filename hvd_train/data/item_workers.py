"""Processes that fetch samples for a rank. They are forked when the data are opened: before threads, MPI and GPUs are
there, and with the data set as it is, which need not be pickled."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from hvd_train.errors import DataError, TrainError, named_reason

PR_SET_PDEATHSIG = 1


class ItemWorkers:
    """Processes that call ``work``. ``run`` may be called by as many threads at a time as there are processes."""

    def __init__(self, count: int, work: Callable[..., Any], where: str) -> None:
        self._where, self._free = where, SimpleQueue[Connection]()
        ends: list[Connection] = []
        fork = multiprocessing.get_context("fork")
        for _ in range(count):
            ours, theirs = fork.Pipe()
            ends.append(ours)
            process = fork.Process(target=_serve, args=(theirs, list(ends), work), daemon=True, name="fetch")
            process.start()
            theirs.close()
            self._free.put(ours)
        weakref.finalize(self, _close, ends)

    def run(self, *arguments: Any) -> Any:
        """Call ``work(*arguments)`` in a process that is free; return its result, or raise its error."""
        connection = self._free.get()
        try:
            connection.send(arguments)
            error, value = connection.recv()
        except (OSError, EOFError) as lost:
            what = "a process that fetches samples has ended"
            raise DataError(what, where=self._where, fix="look for a crash or too little memory") from lost
        finally:
            self._free.put(connection)
        if error:
            raise error
        return value


def _close(ends: list[Connection]) -> None:
    for end in ends:
        with suppress(OSError):
            end.close()


def _serve(connection: Connection, others: list[Connection], work: Callable[..., Any]) -> None:
    """Answer requests until the rank closes its end, or dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the rank, which saves first
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _close(others)
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
            connection.send((error, value))
