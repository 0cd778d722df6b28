"""Find the rank for which all others wait in every step.

At each sync every rank reports how long it has waited for transfers. The slowest rank waits least, and costs as much
time as the others wait longer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SYNCS = 8  # syncs, which are 0.25 to 1 s or one step apart
SHARE, SECONDS = 0.2, 0.001  # share of a step; less is irrelevant or noise
NAMED = 3  # limit of immediate reports: on a busy machine each rank is slow for a while


@dataclass(frozen=True)
class Straggler:
    """A slow ``rank``: the others wait for it for ``share`` of the time, ``seconds`` a step, since step ``since``."""

    rank: int
    share: float
    seconds: float
    since: int

    def __str__(self) -> str:
        lost = f"{self.share:.0%} of each step, {1000 * self.seconds:,.1f} ms"
        return f"rank {self.rank} is slow: the others wait for it {lost}, since step {self.since}"


class Stragglers:
    """Detects stragglers. ``slow_rank``: the current one, or None. ``least_wait``: the minimum over ranks of the share
    of time spent in transfers, None: not yet known."""

    def __init__(self) -> None:
        self.slow_rank: Straggler | None = None
        self.least_wait: float | None = None
        self._named: set[int] = set()
        self._before: tuple[int, float, np.ndarray] | None = None
        self._rows: list[tuple[int, float, np.ndarray]] = []  # steps, seconds, seconds that each rank waited
        self._first = 0

    def pause(self) -> None:
        """Exclude the time that follows: an evaluation or a save."""
        self._before = None

    def look(self, step: int, waited: Sequence[float]) -> bool:
        """Look for a straggler at ``step``. ``waited``: seconds that each rank has waited since its start.

        Returns whether to report it at once: the first time for each rank, and for at most three ranks.
        """
        now, before = (step, time.monotonic(), np.array(waited)), self._before
        self._before = now
        if before is None or before[0] >= step:
            return False
        if not self._rows:
            self._first = before[0] + 1
        self._rows.append((step - before[0], now[1] - before[1], now[2] - before[2]))
        if len(self._rows) < SYNCS:
            return False
        self.slow_rank = self._judge()
        self._rows.clear()
        if self.slow_rank is None or self.slow_rank.rank in self._named or len(self._named) == NAMED:
            return False
        self._named.add(self.slow_rank.rank)
        return True

    def _judge(self) -> Straggler | None:
        # Medians over syncs, because any rank may be late once.
        steps, seconds, waits = (np.array(column) for column in zip(*self._rows, strict=True))  # waits (syncs, ranks)
        self.least_wait = float(np.median(waits.min(axis=1) / seconds))
        others = [np.median(np.delete(waits, rank, axis=1), axis=1) for rank in range(waits.shape[1])]
        lost = np.stack(others, axis=1) - waits  # (syncs, ranks)
        shares = np.median(lost / seconds[:, None], axis=0)  # (ranks,)
        rank = int(shares.argmax())
        each = float(np.median(lost[:, rank] / steps))
        if shares[rank] < SHARE or each < SECONDS:
            return None
        since = self.slow_rank.since if self.slow_rank and self.slow_rank.rank == rank else self._first
        return Straggler(rank, float(shares[rank]), each, since)
