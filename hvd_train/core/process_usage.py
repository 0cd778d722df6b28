"""What the operating system knows about this process: its host and cores, and what it waited for."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# Of USAGE: seconds in all; seconds of this process and its children on cores; seconds in which a thread could have run
# and no core was free; seconds in which this process's cores were busy, whoever used them, their sum; page faults that
# had to read from a disk; MB read from disks.
USAGE = ("elapsed", "cpu", "queued", "busy", "faults", "read_mb")
READ_SHARE = 0.001  # of the time that reading the figures may take: many threads and cores take milliseconds
TASKS, IO, CORES = Path("/proc/self/task"), Path("/proc/self/io"), Path("/proc/stat")
TICK = 1 / os.sysconf("SC_CLK_TCK")  # seconds


class ProcessUsage:
    """The figures of USAGE for this process, since ``begin``. None: the system does not tell."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._first: list[float | None] | None = None

    def begin(self) -> None:
        """Begin to count, if it has not begun."""
        if self._first is None:
            self._first = self._last = self._figures()

    def read(self, last: bool = False) -> list[float | None]:
        """Return the figures, one for each of USAGE; None before they are read again.

        They may be those of a short time ago, but not if they are the ``last`` ones.
        """
        if self._first is None:
            return [None] * len(USAGE)
        if last or self._clock() >= self._next:
            now = self._figures()
            # Threads that have ended took their seconds with them, and so did children that nobody waited for.
            now[1:3] = [_larger(a, b) for a, b in zip(self._last[1:3], now[1:3], strict=True)]
            self._last = now
        if self._last is self._first:
            return [None] * len(USAGE)
        pairs = zip(self._last, self._first, strict=True)
        return [None if now is None or first is None else round(now - first, 3) for now, first in pairs]

    def _figures(self) -> list[float | None]:
        began = self._clock()
        used, ended = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        queued, children = _threads()
        cpu = used.ru_utime + used.ru_stime + ended.ru_utime + ended.ru_stime + children
        figures = [began, cpu, queued, _busy_seconds(), used.ru_majflt, _read_mb()]
        now = self._clock()
        self._next = now + (now - began) / READ_SHARE
        return figures


def place() -> tuple[str, list[int]]:
    """Return the host of this process, and the cores on which it may run."""
    return socket.gethostname(), sorted(os.sched_getaffinity(0))


def _threads() -> tuple[float | None, float]:
    """Return the seconds in which threads of this process waited for a core, and those of its children on cores."""
    total, known, children = 0, False, 0.0
    for thread in os.listdir(TASKS):
        with suppress(OSError, ValueError, IndexError):  # it has ended, or the kernel keeps no such figures
            total += int((TASKS / thread / "schedstat").read_bytes().split()[1])
            known = True
        with suppress(OSError, ValueError):
            children += sum(_child_seconds(pid) for pid in (TASKS / thread / "children").read_text().split())
    return (total / 1e9 if known else None), children


def _child_seconds(pid: str) -> float:
    with suppress(OSError, ValueError, IndexError):
        # Its name, in brackets, may hold spaces. User and system time, and those of its own children that have ended.
        fields = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) * TICK
    return 0.0


def _busy_seconds() -> float | None:
    """Return the seconds in which the cores of this process were busy, their sum."""
    own, total = {f"cpu{core}" for core in os.sched_getaffinity(0)}, 0
    with suppress(OSError, ValueError):
        for line in CORES.read_text().splitlines():
            name, *fields = line.split()
            if name in own:
                own.remove(name)
                user, nice, system, _idle, _disk, *others = map(int, fields[:8])
                total += user + nice + system + sum(others)
        return None if own else total * TICK
    return None


def _larger(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else max(one, other)


def _read_mb() -> float | None:
    with suppress(OSError, ValueError, IndexError):
        for line in IO.read_bytes().splitlines():
            if line.startswith(b"read_bytes:"):
                return int(line.split()[1]) / 1e6
    return None
