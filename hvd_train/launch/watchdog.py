"""Find ranks that are stuck, from outside: read where they are in shared memory, so that none must answer.

Horovod's own check for stalled tensors runs in a thread of each rank, which waits for a stopped rank as all others do.
"""

from __future__ import annotations

import re
import sysconfig
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvd_train.launch.status import EXCHANGE, SCRIPT, RankStatus, StatusTable

WATCHED = ("training", "evaluation")  # phases that report steps; a save takes as long as the disk does
VARIABLE = "HVD_TRAIN_WATCHDOG_S"  # the limit for a script of the user: seconds, 0: never stuck
ANSWER_SECONDS, LATE_SECONDS = 1.0, 10.0  # for a rank's stack: as a rule, and at most, on a machine that is busy
DEAD_SECONDS = 10.0  # for ranks to notice that another has ended; launchers that end them all take up to 8
DEAD = "XZ?-"  # the kernel's letters of a process that has ended; ?, -: there is none
PAUSE_SECONDS = 3.0  # a longer time between two looks means that this process was stopped itself
PACKAGES = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[1]), "<")
DUMP = re.compile(r"(?<=[^\n]\n)(?=(?:Current t|T)hread 0x)")  # between two answers of one rank no line is empty
# Where a rank's main thread is while it waits for the others, or computes.
INSIDE = re.compile(
    "/(horovod|tensorflow|keras|torch)/|/hvd_train/(core|update|metrics|task|checkpoint|run_folder|frontends|script)/"
)


class Watchdog:
    """Call ``look()`` every now and then. ``stuck``: {rank: (what is wrong, its stack)} once ranks are stuck.

    Ranks are stuck if nothing has moved for ``limit`` seconds (0: they never are). Of ranks that wait for one another
    the culprit is the one that is stopped or computes something else, or all of them if that cannot be known. If a rank
    has died, the others may stand still for ``DEAD_SECONDS`` only: Gloo does not always notice that a peer is gone.
    """

    def __init__(self, table: StatusTable | None, limit: float) -> None:
        """``table`` None: of a subclass that reads the ranks elsewhere."""
        self._table, self._limit = table, limit
        self._beats: list[int] = []
        self._stopped: dict[int, float] = {}
        self._moved: dict[int, tuple[int, float]] = {}  # of ranks of scripts: their beats, since when
        self._asked = 0.0  # when to ask for stacks again
        self._living: set[int] = set()  # ranks that were seen alive
        self._waiting: tuple[list[Any], float] = ([], 0.0)  # ranks that may wait for a dead one, since when
        self._since = self._before = time.monotonic()
        self.stuck: dict[int, tuple[str, str]] = {}

    def look(self) -> bool:
        """Return whether ranks are stuck."""
        if not self._limit:
            return False
        now, statuses = time.monotonic(), self._read_all()
        if now - self._before > PAUSE_SECONDS:  # this process was stopped itself, as perhaps all were
            self._beats, self._stopped, self._moved = [], {}, {}
        self._before = now
        # The clock starts anew when any rank moves, and while one is in a phase that may take long.
        beats = [one.beats for one in statuses]
        if beats != self._beats or not all(one.pid and one.phase in WATCHED and not one.record for one in statuses):
            self._beats, self._since = beats, now
        states = self._states(statuses)
        self._stopped = {rank: self._stopped.get(rank, now) for rank, state in states.items() if state in "Tt"}
        stopped = [rank for rank, since in self._stopped.items() if now - since > self._limit]
        if dead := self._awaited(statuses, states, now):
            self.stuck = {rank: ("has ended, and the others wait for it", "") for rank in dead}
        elif stopped or now - self._since > self._limit:
            self.stuck = self._culprits(statuses, stopped or list(self._stopped))
        elif any(one.phase == EXCHANGE for one in statuses):
            self.stuck = self._late(statuses, now)
        return bool(self.stuck)

    def _awaited(self, statuses: list[RankStatus], states: dict[int, str], now: float) -> list[int]:
        """Return ranks that have died while all others have stood still for ``DEAD_SECONDS``."""
        # A rank that was never seen alive may be one whose process cannot be seen from here (a container's).
        gone = {rank for rank in states if states[rank] in DEAD}
        self._living |= states.keys() - gone
        dead = [rank for rank in sorted(gone & self._living) if _has_died(statuses[rank])]
        left = [
            (rank, one.phase, one.beats) for rank, one in enumerate(statuses) if rank not in gone and not one.record
        ]
        if left != self._waiting[0] or not dead:
            self._waiting = left, now
        wait = left and all(phase in (*WATCHED, EXCHANGE) for _, phase, _ in left)
        return dead if wait and now - self._waiting[1] > min(DEAD_SECONDS, self._limit) else []

    def _late(self, statuses: list[RankStatus], now: float) -> dict[int, tuple[str, str]]:
        """Return ranks of a user's script that stay away from what others are in.

        What a graph does besides its exchanges, as to ask for the next batch, is within a step like these. Then it is
        the rank that has a thread in user code, if others have none.
        """
        for rank, one in enumerate(statuses):
            if self._moved.get(rank, (0, 0.0))[0] != one.beats:
                self._moved[rank] = one.beats, now
        if any(one.record or one.phase not in (SCRIPT, EXCHANGE) for one in statuses):
            return {}
        still = [rank for rank in range(len(statuses)) if now - self._moved[rank][1] > self._limit]
        away = [rank for rank in still if statuses[rank].phase == SCRIPT]
        # If all are away, none waits for another: they may just compute for long.
        if len(away) == len(still) or (not away and (len(still) < len(statuses) or now < self._asked)):
            return {}
        stacks = self._stacks(statuses)
        self._asked = now + self._limit
        busy = {rank: _user_thread(threads) for rank, threads in stacks.items()}
        late = {rank: busy[rank] or stacks[rank][-1] for rank in away or [k for k, stack in busy.items() if stack]}
        what, fix = f"has kept the others waiting for {self._limit:g} s", f"if its work takes so long, raise {VARIABLE}"
        blamed = {rank: (f"{what}{_top(stack)}; {fix}", stack) for rank, stack in late.items()}
        return blamed if len(blamed) < len(statuses) else {}

    def _culprits(self, statuses: list[RankStatus], stopped: list[int]) -> dict[int, tuple[str, str]]:
        # A process that is stopped cannot write its stack, and its state says enough.
        if stopped:
            return {rank: (f"is stopped (SIGSTOP), for more than {self._limit:g} s", "") for rank in stopped}
        stacks = {rank: threads[-1] for rank, threads in self._stacks(statuses).items()}
        what = f"has not moved for {self._limit:g} s"
        rows = {rank: (f"{what}{_top(stack)}", stack) for rank, stack in stacks.items()}
        # A rank whose main thread is within Horovod or a framework waits for others, or looks as if it did.
        # One that is elsewhere keeps them waiting.
        busy = {rank: row for rank, row in rows.items() if row[1] and not INSIDE.search(_lines(row[1])[0])}
        return busy or rows

    def _read_all(self) -> list[RankStatus]:
        assert self._table is not None
        return [self._table.read(rank) for rank in range(self._table.ranks)]

    def _states(self, statuses: list[RankStatus]) -> dict[int, str]:
        """Return the state of each rank's process, if it has reported it."""
        return {rank: state(one.pid) for rank, one in enumerate(statuses) if one.pid}

    def _stacks(self, statuses: list[RankStatus]) -> dict[int, list[str]]:
        assert self._table is not None
        return stacks(self._table, statuses)


def _has_died(one: RankStatus) -> bool:
    """Return whether a rank that is gone was not asked to end, nor ended because of another."""
    return one.record.get("code", 1) != 0 and not one.record.get("lost")


def stacks(table: StatusTable, statuses: list[RankStatus]) -> dict[int, list[str]]:
    """Return what each rank's threads do, the main one last, most recent call first; [""] if it does not answer."""
    before = [_read(one.stack) for one in statuses]  # answers to earlier requests, which stay in the file
    stop = time.monotonic() + LATE_SECONDS
    table.request_stacks()
    while True:
        time.sleep(ANSWER_SECONDS)
        answers = [_read(one.stack).removeprefix(old) for one, old in zip(statuses, before, strict=True)]
        late = [one for one, answer in zip(statuses, answers, strict=True) if one.stack and not answer]
        # A process that is stopped or has ended writes nothing.
        if all(state(one.pid) in DEAD + "Tt" for one in late) or time.monotonic() > stop:
            # The last answer, for others may ask at the same time; within it from the newest thread to the first.
            return {k: DUMP.split(answer)[-1].split("\n\n") for k, answer in enumerate(answers)}


def _read(path: str) -> str:
    with suppress(OSError, ValueError):
        return Path(path).read_text() if path else ""
    return ""


def _lines(stack: str) -> list[str]:
    return [line.strip() for line in stack.splitlines() if line.startswith("  File")] or [""]


def _user_thread(threads: list[str]) -> str:
    """Return the thread that is in user code: the main one in its last call, others in any."""
    calls = [_lines(threads[-1])[:1], *(_lines(stack) for stack in threads[:-1])]
    for stack, lines in zip([threads[-1], *threads[:-1]], calls, strict=True):
        files = [match[1] for line in lines if (match := re.match(r'File "(.*)", line', line))]
        if any("/site-packages/" not in file and not file.startswith(PACKAGES) for file in files):
            return stack
    return ""


def _top(stack: str) -> str:
    match = re.match(r'File "(.*)", line (\d+) in (.*)', _lines(stack)[0])
    return f" (in {match[3]}, {match[1]}:{match[2]})" if match else ""


def state(pid: int) -> str:
    """Return the kernel's letter of a process' state; T: stopped."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "?"
