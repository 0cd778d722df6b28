"""Where the time of a rank goes: waiting for input, computing, waiting for transfers, saving, evaluating, the rest.

Every reading of the clock ends one part and begins the next, so the parts add up to the time that has passed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

# The indices of PARTS. ``waited``: for transfers; ``bubble``: for other stages of a pipeline; ``rest``: hooks and log.
INPUT, COMPUTE, REST, SAVE, EVALUATE, START, WAITED, BUBBLE = range(8)
PARTS = ("input", "compute", "rest", "save", "evaluate", "start", "waited", "bubble")
IN_CELL = (INPUT, COMPUTE, WAITED, REST)  # parts of a cell; waiting for other stages counts as WAITED
CELLS = 16  # at most, of a window
MOST_SEGMENTS, SEGMENT_NS = 128, 2_000_000
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class TimeAccount:
    """The time of this rank since the last sync (a window), in integer nanoseconds.

    ``waited(fresh)``: seconds that this rank has waited for transfers since its start. With ``fresh`` False it may
    leave out those of the last steps. ``bubble``: the seconds of these in which it waited for other stages. ``clock``:
    in nanoseconds.

    Time until the end of the first step and its hooks is of the part ``start``: graphs are traced, buffers allocated
    and files opened in it.
    """

    def __init__(
        self,
        waited: Callable[[bool], float],
        bubble: Callable[[], float] | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._waited, self._bubble, self._clock = waited, bubble, clock
        self._part, self._started = START, False
        self._ran = False  # whether the first step has
        self._since, self._counter, self._stages = clock(), waited(False), bubble() if bubble else 0.0
        self._spent = [0] * len(PARTS)  # of this window
        self.steps = self._open = 0  # of this window; those of them that are in no segment yet
        # (steps, time of each part in IN_CELL): consecutive steps of this window, which ran in one call or are short
        self._segments: list[tuple[int, ...]] = []
        self._cut = self._since  # when the last one ended
        self._in_segments = [0] * len(IN_CELL)

    def add_start(self, seconds: float) -> None:
        """Add time before this object was made."""
        self._spent[START] += int(max(seconds, 0.0) * 1e9)

    def enter(self, part: int, fresh: bool = False) -> int:
        """End the current part and begin ``part``; return the time. ``fresh``: steps have run, and none is queued."""
        now, counter, ended, spent = self._clock(), self._waited(fresh), self._part, self._spent
        stages = self._bubble() if self._bubble else 0.0
        elapsed, self._since, self._part = now - self._since, now, part
        if not self._started and ended <= REST:
            ended, self._started = START, self._ran and part != REST
        if ended <= REST:
            waits = min(max(round((counter - self._counter) * 1e9), 0), elapsed)
            of_stages = min(max(round((stages - self._stages) * 1e9), 0), waits) if self._bubble else 0
            spent[BUBBLE] += of_stages
            spent[WAITED] += waits - of_stages
            elapsed -= waits
        spent[ended] += elapsed
        self._counter, self._stages = counter, stages
        return now

    @contextmanager
    def within(self, part: int) -> Iterator[None]:
        """Count the block as ``part``, with its waits."""
        before = self._part
        self.enter(part)
        try:
            yield
        finally:
            self.enter(before)

    def stepped(self, queued: bool, steps: int = 1) -> int:
        """End the computation of a step, and begin ``rest``; return the time.

        ``queued``: it has not run yet. ``steps``: that ran in one call.
        """
        now = self.enter(REST, fresh=not queued)
        self._ran = self._ran or not queued
        if not self._started:
            return now
        self.steps += steps
        self._open += steps
        if not queued and now - self._cut >= SEGMENT_NS:
            self._end_segment()
        return now

    def hooks_ended(self, late: bool) -> int:
        """End the hooks of a step, and begin ``input``; return the time. ``late``: the queued steps ran in them."""
        if late and self._part == REST:
            self._part = COMPUTE
        return self.enter(INPUT, fresh=late)

    def _end_segment(self) -> None:
        spent, before = self._spent, self._in_segments
        now = [spent[INPUT], spent[COMPUTE], spent[WAITED] + spent[BUBBLE], spent[REST]]
        self._segments.append((self._open, *(a - b for a, b in zip(now, before, strict=True))))
        self._in_segments, self._open, self._cut = now, 0, self._since
        if len(self._segments) == MOST_SEGMENTS:  # ranks that do not wait for one another sync rarely
            pairs = zip(self._segments[::2], self._segments[1::2], strict=True)
            self._segments = [tuple(a + b for a, b in zip(*pair, strict=True)) for pair in pairs]

    def window(self) -> list[Any]:
        """End the window; return [steps, time of each part (ns), resident memory (bytes), cells (us)].

        Cells are equal numbers of consecutive steps, at most ``CELLS``; each has the parts IN_CELL, one after another.
        Steps that ran in one call share its time evenly, and so do steps that take less than 2 ms together. Must be
        called when no step is queued.
        """
        self.enter(self._part, fresh=True)
        if self.steps:
            self._end_segment()  # the hooks of the last step
        result = [self.steps, self._spent, resident_bytes(), cells(self._segments, self.steps)]
        self._spent, self.steps, self._open = [0] * len(PARTS), 0, 0
        self._segments, self._in_segments = [], [0] * len(IN_CELL)
        return result


def cells(segments: Sequence[tuple[int, ...]], steps: int) -> list[int]:
    """Distribute the time of segments over cells of ``cell_steps(steps)`` steps: flat, in microseconds."""
    if not steps:
        return []
    table = np.cumsum(segments, axis=0)  # (segments, 1 + parts)
    ends = np.append(np.arange(cell_steps(steps), steps, cell_steps(steps)), steps)
    # A last segment without steps adds its time to the last cell.
    known = np.concatenate([[0], table[:, 0]])
    keep = np.append(known[1:] != known[:-1], True)
    totals = [np.interp(ends, known[keep], np.concatenate([[0], column])[keep]) for column in table[:, 1:].T]
    parts = np.diff(np.round(np.array(totals) / 1000), axis=1, prepend=0)  # (parts, cells)
    return parts.T.astype(int).reshape(-1).tolist()


def cell_steps(steps: int) -> int:
    """Return the number of steps of a cell, in a window of so many."""
    return max(1, -(-steps // CELLS))


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * PAGE_BYTES
