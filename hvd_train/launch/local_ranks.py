"""The ranks of one host as another process of it sees them: their status, their stacks and their end."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvd_train.launch.board import Board
from hvd_train.launch.launchers import LAUNCHERS
from hvd_train.launch.silence import DEAD
from hvd_train.launch.watchdog import stacks, state

STACK_BYTES = 32 << 10
KILL_SECONDS = 6.0  # for a rank to end by itself
CODE = 5


class LocalRanks:
    """The ranks of this host, as their status shows them; ``company``: which they are."""

    def __init__(self, path: str, company: Sequence[int]) -> None:
        self.board, self.company = Board(len(company), path), list(company)
        self._parent = os.pidfd_open(os.getppid())
        self._launcher = _endless(os.getppid())
        self._dead: set[int] = set()

    def wait(self, seconds: float, *more: Any) -> bool:
        """Until a rank ends or one of ``more`` can be read; whether one of those can."""
        self.board.look()
        living = [self.board.open[place] for place in self.board.open.keys() - self._dead]
        ready, _, _ = select.select([*living, *more], [], [], seconds)
        self._dead |= {place for place, descriptor in self.board.open.items() if descriptor in ready}
        return any(one in ready for one in more)

    @property
    def ended(self) -> bool:
        """Whether all ranks have; of one that never told where it is the one that started this process speaks."""
        if len(self._dead | self.board.gone) == len(self.company):
            return True
        return bool(select.select([self._parent], [], [], 0)[0]) and len(self.board.open) == len(self._dead)

    def report(self) -> list[list[Any]]:
        rows = []
        for place in range(len(self.company)):
            told = self.board.read(place)
            dead = place in self._dead or place in self.board.gone
            record = {key: told.record[key] for key in ("code", "lost") if key in told.record}
            rows.append([told.pid, told.step, told.phase, record, told.beats, DEAD if dead else state(told.pid)])
        return rows

    def stacks(self) -> list[list[str]]:
        found = stacks(self.board, [self.board.read(place) for place in range(len(self.company))])
        return [[thread[-STACK_BYTES:] for thread in found[place][-8:]] for place in range(len(self.company))]

    def finish(self, delay: float, starter: Board | None = None) -> None:
        """Let the ranks end by themselves with code 5 after ``delay``, and end those that do not."""
        if starter:
            starter.publish({"code": CODE})
        self.board.publish({"end": delay})
        self.board.signal(signal.SIGCONT)  # one that is stopped ends by itself as well: srun reports the highest code
        stop = time.monotonic() + delay + KILL_SECONDS
        while not self.ended and time.monotonic() < stop:
            self.wait(0.2)
        self.board.signal(signal.SIGKILL)

    def end_launcher(self) -> None:
        """End a launcher, or its daemon on this host, that waits for ever for a host out of reach; and its ssh."""
        if self._launcher is None:
            return
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
    """The process that started this rank, if it may wait for ever for another host, and a descriptor of it."""
    with suppress(OSError, ValueError):
        parent = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
        program = Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0")[0]
        if Path(os.fsdecode(program)).name in [name for launcher in LAUNCHERS for name in launcher.endless_programs]:
            return parent, os.pidfd_open(parent)
    return None
