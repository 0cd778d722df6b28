"""Asynchronous parameter server (Dean et al. 2012, "Large Scale Distributed Deep Networks", Downpour SGD)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hvd_train.protocol import Exchange, Parameters, Placement
from hvd_train.update.central import Central


class ParameterServer(Central):
    """Asynchronous training with the weights on rank 0: after each step a rank pushes its change and pulls the weights.

    With plain SGD the change is the gradient times the learning rate. Each rank keeps its optimizer state. Rank 0
    trains as well. The staleness of a change is the number of other ranks' changes since the pull before it.
    """

    def __init__(self, frontend: Parameters, exchange: Exchange) -> None:
        super().__init__(frontend, exchange)
        first = self._ranks.rank == 0
        self._pulled = self._flat.copy()  # the weights that this rank's next step begins with
        self._version = 0  # how many changes the pulled weights contain
        # On rank 0: changes so far; since the last note: changes, sum and maximum of their staleness.
        self._counts = self._ranks.window(4 if first else 0, "int64")

    def _shares(self, entries: int, ranks: int) -> list[int]:
        return [entries, *[0] * (ranks - 1)]

    def _add_steps(self) -> None:
        self._window.add(0, self._flat - self._pulled)
        version = self._version

        def count(old: np.ndarray) -> np.ndarray:
            stale = old[0] - version
            return np.array([old[0] + 1, old[1] + 1, old[2] + stale, max(old[3], stale)])

        # Counted before the pull: the weights may contain more changes, not fewer.
        self._version = int(self._counts.change(0, count)[0]) + 1
        self._window.read(0, self._flat)
        self._pulled[:] = self._flat

    def load(self, tree: Mapping[str, np.ndarray], placement: Placement) -> None:
        super().load(tree, placement)
        if placement is Placement.PER_RANK:
            self._read()
            self._pulled[:] = self._flat

    def note(self) -> str:
        if self._ranks.rank:
            return ""
        _, changes, total, most = self._counts.change(0, lambda old: old * [1, 0, 0, 0]).tolist()
        if not changes:
            return ""
        return f"staleness: {total / changes:.1f} changes of other ranks on average, {most} at most"

    def close(self) -> None:
        self._counts.close()
        super().close()
