"""Find the rank for which all others wait in every step.

At each sync every rank reports how long it has waited for transfers. The slowest rank waits least, and costs as much
time as the others wait longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_train.core.time_account import COMPUTE, INPUT, REST, WAITED

SYNCS = 8  # syncs, which are 0.25 to 1 s or one step apart
NAMED = 3  # limit of immediate reports: on a busy machine each rank is slow for a while
SHARE, SECONDS = 0.2, 0.001  # share of a step; less is irrelevant or noise


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


def look_at(stragglers: Stragglers, step: int, windows: Sequence[list[Any]]) -> bool:
    """``Stragglers.look`` at the windows of all ranks (``TimeAccount.window``) up to ``step``."""
    steps, spent, *_ = windows[0]
    seconds = sum(spent[part] for part in (INPUT, COMPUTE, REST, WAITED)) / 1e9
    return len(windows) > 1 and stragglers.look(step, steps, seconds, [one[1][WAITED] / 1e9 for one in windows])


class Stragglers:
    """Detects stragglers. ``slow_rank``: the current one, or None. ``least_wait``: the minimum over ranks of the share
    of time spent in transfers, None: not yet known."""

    def __init__(self) -> None:
        self.slow_rank: Straggler | None = None
        self.least_wait: float | None = None
        self._named: set[int] = set()
        self._rows: list[tuple[int, float, np.ndarray]] = []  # steps, seconds, seconds that each rank waited
        self._first = 0

    def look(self, step: int, steps: int, seconds: float, waited: Sequence[float] | np.ndarray) -> bool:
        """Look for a straggler at ``step``. ``waited``: seconds of each rank in the last ``steps``, which took
        ``seconds``.

        Returns whether to report it at once: the first time for each rank, and for at most three ranks.
        """
        if not steps or seconds <= 0:
            return False
        if not self._rows:
            self._first = step - steps + 1
        self._rows.append((steps, seconds, np.array(waited)))
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
