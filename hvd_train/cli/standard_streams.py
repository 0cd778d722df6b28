"""Handle failing standard streams: the reader leaves (``| head``), the terminal closes, the disk is full."""

from __future__ import annotations

import io
import os
import select
import sys
import threading
import time
from typing import Any

from hvd_train.errors import ConfigError

KEPT_BYTES = 16 << 20
READ_SECONDS, END_SECONDS = 2.0, 30.0  # for a reader to read something, before it counts as paused, and at the end


class ReaderLeftError(BrokenPipeError):
    """Standard output's reader has ended (``| head``)."""


class _Guarded(io.FileIO):
    """A stream that switches to the null device after a write error.

    ``silent``: no error, and no waiting for a paused reader: up to ``KEPT_BYTES`` are kept, and written when it reads
    again.
    """

    silent = False
    _lock = threading.RLock()  # one lock, because streams may share a pipe and so its free space

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._kept, self._lost, self._stalled = bytearray(), 0, False

    def write(self, data: Any) -> int:
        # click writes an empty string to find the stream's type, which fails on a full disk.
        size = memoryview(data).nbytes
        if not size or not self.silent:
            return self._write(data) if size else 0
        with self._lock:
            room = max(KEPT_BYTES - len(self._kept), 0)
            self._kept += bytes(data)[:room]
            self._lost += max(size - room, 0)
            self.drain(0.0 if self._stalled else READ_SECONDS)
        return size

    def drain(self, seconds: float) -> None:
        """Write the kept bytes, as long as the reader takes some within ``seconds``."""
        poll = select.poll()
        poll.register(self.fileno(), select.POLLOUT)
        with self._lock:
            while self._kept:
                self._stalled = not poll.poll(1000 * seconds)
                if self._stalled:
                    return
                del self._kept[: self._write(bytes(self._kept[: select.PIPE_BUF]))]  # that much fits
                if not self._kept and self._lost:
                    self._kept += f"\n... {self._lost:,} bytes left out: nobody read them\n".encode()
                    self._lost = 0

    def _write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            # Python flushes streams once more at exit, which cannot fail for the null device.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            if self.silent:
                return memoryview(data).nbytes
            if isinstance(error, BrokenPipeError):
                raise ReaderLeftError from error
            what = f"the output cannot be written: {error.strerror}"
            raise ConfigError(what, where="standard output", fix="send it to another file") from error


def drain() -> None:
    """At the end of the process, give a paused reader some time to read the kept output."""
    stop = time.monotonic() + END_SECONDS
    for stream in (sys.stdout, sys.stderr):
        raw = getattr(getattr(stream, "buffer", None), "raw", getattr(stream, "buffer", None))
        if isinstance(raw, _Guarded):
            raw.drain(max(stop - time.monotonic(), 0.0))


def guard(*silent: str) -> None:
    """Open closed standard streams, and guard stdout and stderr.

    Printing to a failed stream raises ReaderLeftError or ConfigError, but nothing for ``silent`` ones ("stdout",
    "stderr").
    """
    _open_closed()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):
            continue  # a test has replaced the stream
        raw = getattr(stream.buffer, "raw", stream.buffer)
        if not isinstance(raw, _Guarded):
            raw = _Guarded(stream.fileno())
            unbuffered = isinstance(stream.buffer, io.FileIO)  # python -u
            kept = {key: getattr(stream, key) for key in ("encoding", "errors", "line_buffering", "write_through")}
            # A name that cannot be encoded (PYTHONIOENCODING=ascii) must not fail a finished run.
            kept["errors"] = "backslashreplace"
            buffer: Any = raw if unbuffered else io.BufferedWriter(raw)
            setattr(sys, name, io.TextIOWrapper(buffer, **kept))
        raw.silent = name in silent


def _open_closed() -> None:
    """Open the null device for closed standard streams (``>&-``).

    Otherwise the next opened file would get their descriptors, and libraries' output.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115
