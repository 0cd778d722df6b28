"""What the operating system knows about this process: its host and cores, and what it waited for."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# Of USAGE: seconds on cores; seconds in which a thread could have run and no core was free; page faults that had to
# read from a disk; MB read from disks.
USAGE = ("cpu", "queued", "faults", "read_mb")
THREADS_SECONDS = 5.0  # between readings of all threads: 10 us each
TASKS, IO = Path("/proc/self/task"), Path("/proc/self/io")


class ProcessUsage:
    """The figures of USAGE for this process, since the object was made. None: the system does not tell."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._read_at = clock, clock()
        self._queued = _queued_seconds()
        self._first = self._figures()

    def read(self) -> list[float | None]:
        """Return the figures, one for each of USAGE."""
        if self._clock() - self._read_at >= THREADS_SECONDS:
            self._read_at = self._clock()
            # Threads that have ended took their seconds with them.
            self._queued = _larger(self._queued, _queued_seconds())
        pairs = zip(self._figures(), self._first, strict=True)
        return [None if now is None or first is None else round(now - first, 3) for now, first in pairs]

    def _figures(self) -> list[float | None]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return [used.ru_utime + used.ru_stime, self._queued, used.ru_majflt, _read_mb()]


def place() -> tuple[str, list[int]]:
    """Return the host of this process, and the cores on which it may run."""
    return socket.gethostname(), sorted(os.sched_getaffinity(0))


def _queued_seconds() -> float | None:
    """Return the seconds in which threads of this process waited for a core."""
    total, known = 0, False
    for thread in os.listdir(TASKS):
        try:
            with open(TASKS / thread / "schedstat", "rb") as stream:
                total += int(stream.read().split()[1])
                known = True
        except OSError:  # it has ended, or the kernel keeps no such figures
            continue
    return total / 1e9 if known else None


def _larger(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else max(one, other)


def _read_mb() -> float | None:
    with suppress(OSError, ValueError, IndexError):
        for line in IO.read_bytes().splitlines():
            if line.startswith(b"read_bytes:"):
                return int(line.split()[1]) / 1e6
    return None
