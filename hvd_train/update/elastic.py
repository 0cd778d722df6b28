"""Asynchronous elastic averaging (Zhang, Choromanska and LeCun 2015, "Deep learning with Elastic Averaging SGD")."""

from __future__ import annotations

import numpy as np

from hvd_train.protocol import Exchange, Parameters
from hvd_train.update.central import Central


class Elastic(Central):
    """Asynchronous EASGD: every ``steps`` local steps a rank's weights theta and the centre c move towards each other.

    delta = alpha (theta - c); c += delta; theta -= delta, with alpha = ``pull`` / ranks. This leaves the sum of all
    ranks' weights and the centre unchanged. The centre is sharded over the ranks.
    """

    def __init__(self, frontend: Parameters, exchange: Exchange, steps: int, pull: float) -> None:
        super().__init__(frontend, exchange)
        self.steps, self._alpha = steps, pull / self._ranks.size
        first = [rank for rank, _ in self._places].index(self._ranks.rank) if self._holds_part() else 0
        # This rank's part first: else all ranks would read rank 0's at the same time.
        self._places = self._places[first:] + self._places[:first]
        self._centre = np.empty_like(self._flat[: max(place.stop - place.start for _, place in self._places)])

    def _shares(self, entries: int, ranks: int) -> list[int]:
        return [(entries + rank) // ranks for rank in range(ranks)]

    def _holds_part(self) -> bool:
        return any(rank == self._ranks.rank for rank, _ in self._places)

    def due(self, step: int) -> bool:
        return step % self.steps == 0

    def _add_steps(self) -> None:
        for rank, place in self._places:
            theta = self._flat[place]
            delta = self._centre[: len(theta)]
            self._window.read(rank, delta)
            np.subtract(theta, delta, out=delta)
            delta *= self._alpha
            self._window.add(rank, delta)
            theta -= delta
