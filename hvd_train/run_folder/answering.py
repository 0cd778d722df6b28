"""Detect a file server that does not respond, from a second thread: the waiting main thread cannot raise an error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hvd_train.errors import CheckpointError
from hvd_train.files import Patience

SHARE = 0.9  # of the limit, after which the watchdog would report only a stuck rank, and not the cause


class FileWatch:
    """Watches accesses to files, and calls ``end`` with an error when one takes nearly ``limit`` seconds (0: never).

    ``end`` is called in a thread, and must end the process. None: nothing is watched.
    """

    def __init__(self, limit: float = 0.0, end: Callable[[CheckpointError], object] | None = None) -> None:
        self._limit, self._end = SHARE * limit if end else 0.0, end
        self._patience = Patience(self._limit)
        self._path: Path | None = None  # the path being accessed
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def at(self, path: Path) -> Iterator[None]:
        """Watch an access to ``path``; may be nested."""
        before, self._path = self._path, path
        self._patience.moved()
        if self._limit and self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="files", daemon=True)
            self._thread.start()
        try:
            yield
        finally:
            self._path = before
            self._patience.moved()

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(min(1.0, self._limit / 20)):
            path, over = self._path, self._patience.over()
            if path and over and self._end:
                what = f"the file system has not answered for {self._limit:g} s"
                fix = "look for a disk or a file server that does not answer; watchdog_s sets the limit"
                self._end(CheckpointError(what, where=str(path), fix=fix))
                return
