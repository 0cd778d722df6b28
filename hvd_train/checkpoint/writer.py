"""The thread of rank 0 that writes a checkpoint during training."""

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

NOT_KEPT = "not kept"  # the written checkpoint was not among those to keep, and was removed
WRITER_NICENESS = 10  # a tenth of the training's share of a core that both use


class Writer:
    """Writes one checkpoint at a time on rank 0 during training. Other ranks only know its path.

    ``path``: the checkpoint being written, or None. ``longest``: seconds of the slowest write, on rank 0. ``limit``:
    seconds without progress (``moved``) until a write is given up, as when a file server is gone (0: never)."""

    def __init__(self, limit: float = 0.0) -> None:
        self.path: Path | None = None
        self.longest = 0.0
        self._limit, self._patience = limit, Patience(limit)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._kept: bool | None = None
        self.warned = False  # whether the user was told that snapshots are skipped
        self.tree: Tree | None = None  # of the last save, reused: page faults of new memory cost more than the copy

    def begin(self, path: Path, work: Callable[[], bool | None] | None) -> None:
        """Begin a write. ``work`` runs in a thread on rank 0, and returns False if ``path`` was not kept."""
        self.path, self._failure, self._kept = path, None, None
        self._patience = Patience(self._limit)
        if work:
            self._thread = threading.Thread(target=self._write, args=[work], name="saving", daemon=True)
            self._thread.start()

    def _write(self, work: Callable[[], bool | None]) -> None:
        began = time.monotonic()
        with suppress(OSError):  # of this thread only: it uses the core when the step does not
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICENESS)
        try:
            self._kept = work()
        except BaseException as error:
            self._failure = error
        self.longest = max(self.longest, time.monotonic() - began)

    def moved(self) -> None:
        """Record that the thread has made progress."""
        self._patience.moved()

    def wait(self, seconds: float = math.inf) -> None:
        """Wait for the write to finish, at most ``seconds``."""
        stop = time.monotonic() + seconds
        while self._thread and self._thread.is_alive() and not self._patience.over() and time.monotonic() < stop:
            # In short intervals, to notice a hanging thread soon after the limit.
            self._thread.join(min(1.0, self._limit / 4 or 1.0, seconds))

    def outcome(self) -> str | None:
        """Return rank 0's status on all ranks: None while it writes, then "" or NOT_KEPT, or the error."""
        if self._thread is None or (self._thread.is_alive() and not self._patience.over()):
            return None
        if self._thread.is_alive():
            self._thread = None  # it cannot be ended while it waits for a disk; as a daemon it does not block exit
            what = f"the checkpoint cannot be written: there was no progress for {self._limit:g} s"
            fix = "look for a disk or a file server that does not answer; watchdog_s sets the limit"
            return packed_error(CheckpointError(what, where=str(self.path), fix=fix))
        self._thread = None
        if isinstance(self._failure, CheckpointError):
            return packed_error(self._failure)
        if isinstance(self._failure, OSError):
            what = f"the checkpoint cannot be written: {self._failure.strerror}"
            return packed_error(CheckpointError(what, where=str(self.path)))
        if self._failure:  # a bug, not a disk failure: print its traceback
            raise self._failure
        return NOT_KEPT if self._kept is False else ""


def packed_error(error: TrainError) -> str:
    """Serialize an error for ``raise_if_failed``."""
    return json.dumps([type(error).__name__, error.what, error.where, error.fix])


def raise_if_failed(outcome: str) -> None:
    """Raise the error of rank 0's save, if any, on all ranks alike."""
    if outcome and outcome != NOT_KEPT:
        kind, what, where, fix = json.loads(outcome)
        raise getattr(errors, kind)(what, where=where, fix=fix, common=True)
