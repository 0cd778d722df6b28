"""Standard streams that may fail: the reader leaves (``| head``), the terminal closes, the disk is full."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

from hvd_train.errors import ConfigError


class ReaderLeftError(BrokenPipeError):
    """Standard output's reader has ended (``| head``)."""


class _Guarded(io.FileIO):
    """A stream that goes to the null device once it cannot be written any more. ``silent``: without an error."""

    silent = False

    def write(self, data: Any) -> int:
        # click writes nothing, to learn what kind of stream this is. A full disk refuses even that.
        if not memoryview(data).nbytes:
            return 0
        try:
            return super().write(data)
        except OSError as error:
            # Python flushes streams once more when it ends. To the null device that cannot fail.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            if self.silent:
                return memoryview(data).nbytes
            if isinstance(error, BrokenPipeError):
                raise ReaderLeftError from error
            what = f"the output cannot be written: {error.strerror}"
            raise ConfigError(what, where="standard output", fix="send it to another file") from error


def guard(*silent: str) -> None:
    """Open the standard streams that are closed, and guard stdout and stderr.

    Printing to a stream that failed raises ReaderLeftError or ConfigError; to one of ``silent`` ("stdout", "stderr") it
    raises nothing.
    """
    _open_closed()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):
            continue  # a test has put another stream there
        raw = getattr(stream.buffer, "raw", stream.buffer)
        if not isinstance(raw, _Guarded):
            raw = _Guarded(stream.fileno(), "wb", closefd=False)
            unbuffered = isinstance(stream.buffer, io.FileIO)  # python -u
            kept = {key: getattr(stream, key) for key in ("encoding", "errors", "line_buffering", "write_through")}
            # A name that the encoding does not know (PYTHONIOENCODING=ascii) must not end a run that is done.
            kept["errors"] = "backslashreplace"
            buffer: Any = raw if unbuffered else io.BufferedWriter(raw)
            setattr(sys, name, io.TextIOWrapper(buffer, **kept))
        raw.silent = name in silent


def _open_closed() -> None:
    """Open the null device in place of closed standard streams (``>&-``).

    The next file would get their numbers, and what a library prints would go into it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115
