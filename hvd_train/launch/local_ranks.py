"""The ranks of one host, seen from another process there: their status, stacks and end."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvd_train.launch.hosts_watchdog import NO_PROCESS
from hvd_train.launch.launchers import LAUNCHERS
from hvd_train.launch.status import StatusTable
from hvd_train.launch.watchdog import stacks, state

STACK_BYTES = 32 << 10  # of a thread, because a report is limited (LINE_BYTES in heartbeat.py)
KILL_SECONDS = 6.0  # for a rank to end by itself
CODE = 5


class LocalRanks:
    """The ranks of this host, read from their status table. ``company``: their global ranks."""

    def __init__(self, path: str, company: Sequence[int]) -> None:
        self.table, self.company = StatusTable(len(company), path), list(company)
        # The first rank of this host has started this process.
        self._parent = os.pidfd_open(os.getppid())
        self._launcher = _endless(os.getppid())
        self._dead: set[int] = set()

    def wait(self, seconds: float, *more: Any) -> bool:
        """Wait until a rank ends or one of ``more`` is readable. Returns whether one of those is."""
        self.table.refresh()
        living = [self.table.open[place] for place in self.table.open.keys() - self._dead]
        ready, _, _ = select.select([*living, *more], [], [], seconds)
        self._dead |= {place for place, descriptor in self.table.open.items() if descriptor in ready}
        return any(one in ready for one in more)

    @property
    def ended(self) -> bool:
        """Return whether all ranks have ended. One that never reported counts as ended when the first rank has."""
        if len(self._dead | self.table.gone) == len(self.company):
            return True
        return bool(select.select([self._parent], [], [], 0)[0]) and len(self.table.open) == len(self._dead)

    def report(self) -> list[list[Any]]:
        """Return a row for each rank, in the format of ``Host.update``."""
        rows = []
        for place in range(len(self.company)):
            status = self.table.read(place)
            dead = place in self._dead or place in self.table.gone
            record = {key: status.record[key] for key in ("code", "lost") if key in status.record}
            letter = NO_PROCESS if dead else state(status.pid)
            rows.append([status.pid, status.step, status.phase, record, status.beats, letter])
        return rows

    def stacks(self) -> list[list[str]]:
        """Return the stacks of each rank's last threads; the main thread is the last."""
        all_stacks = stacks(self.table, [self.table.read(place) for place in range(len(self.company))])
        return [[thread[-STACK_BYTES:] for thread in all_stacks[place][-8:]] for place in range(len(self.company))]

    def finish(self, delay: float, starter: StatusTable | None = None) -> None:
        """Tell the ranks after ``delay`` to end with code 5, and kill those that do not."""
        if starter:
            starter.publish({"code": CODE})
        self.table.publish({"end": delay})
        self.table.signal(signal.SIGCONT)  # a stopped rank, too, must end with its own code: srun reports the highest
        stop = time.monotonic() + delay + KILL_SECONDS
        while not self.ended and time.monotonic() < stop:
            self.wait(0.2)
        self.table.signal(signal.SIGKILL)

    def end_launcher(self) -> None:
        """End the launcher (or its daemon here) and its ssh processes if it waits for an unreachable host for ever."""
        if self._launcher is None:
            return
        # Its remaining children are ssh processes. They are collected while it lives, because later they have another
        # parent.
        pid, descriptor = self._launcher
        children = []
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(OSError):
                children += [os.pidfd_open(int(child)) for child in task.read_text().split()]
        if not select.select([descriptor], [], [], KILL_SECONDS)[0]:
            for one in (descriptor, *children):
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(one, signal.SIGKILL)


def _endless(rank: int) -> tuple[int, int] | None:
    """Return the process that started this rank and its pidfd, if it may wait for ever for another host."""
    with suppress(OSError, ValueError):
        parent = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
        program = Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0")[0]
        if Path(os.fsdecode(program)).name in [name for launcher in LAUNCHERS for name in launcher.endless_programs]:
            return parent, os.pidfd_open(parent)
    return None
