"""Find stuck ranks from outside, by their status in shared memory: no rank must answer.

Horovod's own stall check runs in a thread of each rank, which itself hangs with a stopped rank.
"""

from __future__ import annotations

import re
import sysconfig
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvd_train.launch.status import EXCHANGE, SCRIPT, RankStatus, StatusTable

WATCHED = ("training", "evaluation")  # phases that report steps; a save may take as long as the disk needs
VARIABLE = "HVD_TRAIN_WATCHDOG_S"  # limit for a user's script, in seconds; 0: never stuck
ANSWER_SECONDS, LATE_SECONDS = 1.0, 10.0  # for a rank's stack: usually, and at most on a busy machine
DEAD_SECONDS = 10.0  # for ranks to notice that another has ended; launchers take up to 8 to end them all
DEAD = "XZ?-"  # kernel state letters of a process that has ended; ?, -: no process
PAUSE_SECONDS = 3.0  # a longer time between polls means that this process was stopped itself
PACKAGES = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[1]), "<")
DUMP = re.compile(r"(?<=[^\n]\n)(?=(?:Current t|T)hread 0x)")  # an empty line separates the answers of one rank
# Modules in which a rank's main thread waits for the others, or computes.
INSIDE = re.compile(
    "/(horovod|tensorflow|keras|torch)/|/hvd_train/(core|update|metrics|task|checkpoint|run_folder|frontends|script)/"
)


class Watchdog:
    """A watchdog for stuck ranks, polled by ``look()``. ``stuck``: {rank: (what is wrong, its stack)}.

    Ranks are stuck if there was no progress for ``limit`` seconds (0: they never are). The culprit is the rank that is
    stopped or is not waiting in a collective; all of them if that cannot be known. After a rank has died, the others
    may make no progress for only ``DEAD_SECONDS``: Gloo does not always notice that a peer is gone.
    """

    def __init__(self, table: StatusTable | None, limit: float) -> None:
        """``table`` None: a subclass gets the ranks' status elsewhere."""
        self._table, self._limit = table, limit
        self._beats: list[int] = []
        self._stopped: dict[int, float] = {}
        self._moved: dict[int, tuple[int, float]] = {}  # {rank: (beats, time of the last change)} for user scripts
        self._asked = 0.0  # when to request stacks again
        self._living: set[int] = set()  # ranks that were seen alive
        self._waiting: tuple[list[Any], float] = ([], 0.0)  # dead ranks that others may wait for, since when
        self._since = self._before = time.monotonic()
        self.stuck: dict[int, tuple[str, str]] = {}

    def look(self) -> bool:
        """Check all ranks. Returns whether any is stuck."""
        if not self._limit:
            return False
        now, statuses = time.monotonic(), self._read_all()
        if now - self._before > PAUSE_SECONDS:  # this process was stopped, as perhaps all were
            self._beats, self._stopped, self._moved = [], {}, {}
        self._before = now
        # The clock restarts when any rank makes progress, and while one is in a phase that may take long.
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
        """Return ranks that have died while no other rank made progress for ``DEAD_SECONDS``."""
        # A rank never seen alive may be in another container, where its process is not visible.
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
        """Return ranks of a user's script that do not join the collective in which others wait.

        A TensorFlow graph's other work, such as fetching a batch, also counts as being in a collective. Then the ranks
        with a thread in user code are late.
        """
        for rank, one in enumerate(statuses):
            if self._moved.get(rank, (0, 0.0))[0] != one.beats:
                self._moved[rank] = one.beats, now
        if any(one.record or one.phase not in (SCRIPT, EXCHANGE) for one in statuses):
            return {}
        still = [rank for rank in range(len(statuses)) if now - self._moved[rank][1] > self._limit]
        away = [rank for rank in still if statuses[rank].phase == SCRIPT]
        # If all are outside, none waits for another: they may just compute for long.
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
        # A stopped process cannot write its stack, and its state is reason enough.
        if stopped:
            return {rank: (f"is stopped (SIGSTOP), for more than {self._limit:g} s", "") for rank in stopped}
        stacks = {rank: threads[-1] for rank, threads in self._stacks(statuses).items()}
        what = f"has not moved for {self._limit:g} s"
        rows = {rank: (f"{what}{_top(stack)}", stack) for rank, stack in stacks.items()}
        # A rank whose main thread is within Horovod or a framework seems to wait for others. One that is elsewhere
        # keeps them waiting.
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
    """Return whether a rank that is gone ended neither on request nor because of another rank."""
    return one.record.get("code", 1) != 0 and not one.record.get("lost")


def stacks(table: StatusTable, statuses: list[RankStatus]) -> dict[int, list[str]]:
    """Return the stacks of each rank's threads, main thread last, most recent call first; [""] without an answer."""
    before = [_read(one.stack) for one in statuses]  # skip the answers to earlier requests, which stay in the file
    stop = time.monotonic() + LATE_SECONDS
    table.request_stacks()
    while True:
        time.sleep(ANSWER_SECONDS)
        answers = [_read(one.stack).removeprefix(old) for one, old in zip(statuses, before, strict=True)]
        late = [one for one, answer in zip(statuses, answers, strict=True) if one.stack and not answer]
        # A stopped or ended process writes nothing.
        if all(state(one.pid) in DEAD + "Tt" for one in late) or time.monotonic() > stop:
            # Take the last answer, because others may ask at the same time. It goes from the newest thread to the
            # first.
            return {k: DUMP.split(answer)[-1].split("\n\n") for k, answer in enumerate(answers)}


def _read(path: str) -> str:
    with suppress(OSError, ValueError):
        return Path(path).read_text() if path else ""
    return ""


def _lines(stack: str) -> list[str]:
    return [line.strip() for line in stack.splitlines() if line.startswith("  File")] or [""]


def _user_thread(threads: list[str]) -> str:
    """Return a thread in user code: the main thread's last call must be in it, other threads' any call."""
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
    """Return the kernel's state letter of a process; T: stopped."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "?"
