"""The thread of rank 0 that writes a checkpoint while training goes on."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hvd_train import errors
from hvd_train.errors import CheckpointError, TrainError
from hvd_train.files import Patience
from hvd_train.protocol import Tree

NOT_KEPT = "not kept"  # what was written was not among those that stay, and is gone again
WRITER_NICENESS = 10  # a tenth of what a step gets, where a core has both


class Writer:
    """Writes a checkpoint on rank 0 while training goes on; on other ranks it knows which. Never two at once.

    ``path``: what is being written, None: nothing; ``longest``: seconds that a write has taken, on rank 0; ``limit``:
    seconds after which one that has not ``moved`` is given up (0: never), for a server of files may be gone."""

    def __init__(self, limit: float = 0.0) -> None:
        self.path: Path | None = None
        self.longest = 0.0
        self._limit, self._patience = limit, Patience(limit)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._kept: bool | None = None
        self.warned = False  # that snapshots are left out
        self.tree: Tree | None = None  # of the last save: the first writing of new memory costs more than the copying

    def begin(self, path: Path, work: Callable[[], bool | None] | None) -> None:
        """Begin a write; ``work``: done by rank 0 in a thread, returns False where ``path`` was not kept."""
        self.path, self._failure, self._kept = path, None, None
        self._patience = Patience(self._limit)
        if work:
            self._thread = threading.Thread(target=self._write, args=[work], name="saving", daemon=True)
            self._thread.start()

    def _write(self, work: Callable[[], bool | None]) -> None:
        began = time.monotonic()
        with suppress(OSError):  # of this thread alone: it takes what the step leaves of the core
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICENESS)
        try:
            self._kept = work()
        except BaseException as error:
            self._failure = error
        self.longest = max(self.longest, time.monotonic() - began)

    def moved(self) -> None:
        """Note that the thread has come further."""
        self._patience.moved()

    def wait(self, seconds: float = math.inf) -> None:
        """Wait for the end of the write, at most ``seconds``."""
        stop = time.monotonic() + seconds
        while self._thread and self._thread.is_alive() and not self._patience.over() and time.monotonic() < stop:
            # In short waits: a thread that hangs must be noticed soon after the limit.
            self._thread.join(min(1.0, self._limit / 4 or 1.0, seconds))

    def outcome(self) -> str | None:
        """Return rank 0's report for all ranks: None while it writes, "" or NOT_KEPT after that, or the error."""
        if self._thread is None or (self._thread.is_alive() and not self._patience.over()):
            return None
        if self._thread.is_alive():
            self._thread = None  # nothing ends a thread that waits for a disk; as a daemon it does not hold the process
            what = f"the checkpoint cannot be written: nothing has moved for {self._limit:g} s"
            fix = "look for a disk or a server of files that does not answer; watchdog_s sets the limit"
            return packed_error(CheckpointError(what, where=str(self.path), fix=fix))
        self._thread = None
        if isinstance(self._failure, CheckpointError):
            return packed_error(self._failure)
        if isinstance(self._failure, OSError):
            what = f"the checkpoint cannot be written: {self._failure.strerror}"
            return packed_error(CheckpointError(what, where=str(self.path)))
        if self._failure:  # a bug, and no fault of the disk: with its traceback
            raise self._failure
        return NOT_KEPT if self._kept is False else ""


def packed_error(error: TrainError) -> str:
    """Return an error as the text that ``raise_if_failed`` takes."""
    return json.dumps([type(error).__name__, error.what, error.where, error.fix])


def raise_if_failed(outcome: str) -> None:
    """Raise the error of rank 0's save, if there is one, the same on all ranks: all go on, or all stop."""
    if outcome and outcome != NOT_KEPT:
        kind, what, where, fix = json.loads(outcome)
        raise getattr(errors, kind)(what, where=where, fix=fix, common=True)
