"""Ranks that stop without an end: who starts ranks (``-np``) reads where they are, and does not need their answer.

Horovod's own look at stalled tensors is a thread of the ranks, which waits for the stopped one as all others do.
"""

from __future__ import annotations

import re
import time
from contextlib import suppress
from pathlib import Path

from hvd_train.launch.board import Board, Told

WATCHED = ("training", "evaluation")  # which go on by themselves; a save takes as long as the disk does
ANSWER_SECONDS = 1.0
# Where a rank's main thread is while it waits for the others, or computes.
INSIDE = re.compile(r"/(horovod|tensorflow|keras|torch)/|/hvd_train/(core|frontends|attach)/(?!faults)")


class Watchdog:
    """``look()`` every now and then; ``stuck``: {rank: (what is wrong with it, its stack)} once nothing has moved for
    ``limit`` seconds (0: for ever). Of ranks that wait for one another the culprit is the one that is stopped, or
    computes something else; all of them where that cannot be told."""

    def __init__(self, board: Board, limit: float) -> None:
        self._board, self._limit = board, limit
        self._beats: list[int] = []
        self._stopped: dict[int, float] = {}
        self._since = time.monotonic()
        self.stuck: dict[int, tuple[str, str]] = {}

    def look(self) -> bool:
        """Whether ranks are stuck."""
        if not self._limit:
            return False
        now, told = time.monotonic(), [self._board.read(rank) for rank in range(self._board.ranks)]
        beats = [one.beats for one in told]
        if beats != self._beats or not all(one.pid and one.phase in WATCHED and not one.record for one in told):
            self._beats, self._since = beats, now
        states = {rank: _state(one.pid) for rank, one in enumerate(told) if one.pid}
        self._stopped = {rank: self._stopped.get(rank, now) for rank, state in states.items() if state in "Tt"}
        stopped = [rank for rank, since in self._stopped.items() if now - since > self._limit]
        if stopped or now - self._since > self._limit:
            self.stuck = self._culprits(told, stopped or list(self._stopped))
        return bool(self.stuck)

    def _culprits(self, told: list[Told], stopped: list[int]) -> dict[int, tuple[str, str]]:
        if stopped:
            return {rank: (f"is stopped (SIGSTOP), for more than {self._limit:g} s", "") for rank in stopped}
        stacks = self._stacks(told)
        what = f"has not moved for {self._limit:g} s"
        found = {rank: (f"{what}{_top(stack)}", stack) for rank, stack in stacks.items()}
        own = {rank: row for rank, row in found.items() if row[1] and not INSIDE.search(_lines(row[1])[0])}
        return own or found

    def _stacks(self, told: list[Told]) -> dict[int, str]:
        """What each rank's main thread does, most recent call first; "" where it does not say."""
        self._board.ask()
        time.sleep(ANSWER_SECONDS)
        found = {}
        for rank, one in enumerate(told):
            text = ""
            with suppress(OSError):
                text = Path(one.stack).read_text()
            found[rank] = text.rpartition("\n\n")[2]  # threads stand from the newest to the first
        return found


def _lines(stack: str) -> list[str]:
    return [line.strip() for line in stack.splitlines() if line.startswith("  File")] or [""]


def _top(stack: str) -> str:
    match = re.match(r'File "(.*)", line (\d+) in (.*)', _lines(stack)[0])
    return f" (in {match[3]}, {match[1]}:{match[2]})" if match else ""


def _state(pid: int) -> str:
    """The kernel's letter of a process' state; T: stopped."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "?"
