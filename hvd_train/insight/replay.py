"""What a run would have taken if one of its times were different.

A cell of steps takes T = max over ranks (input + compute + rest) + exchange + tail. The exchange is as long as the rank
that waits least waits; the tail is what is left. So the recorded T is reproduced exactly, and a change of one term says
what it would have saved (what-if analysis: Lin et al. 2025, arXiv 2505.05713).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvd_train.insight.recorded_steps import RecordedSteps


class Replay:
    """The times of the recorded steps, which can be computed again with changed terms.

    ``input``, ``compute``, ``rest``: (cells, ranks); ``exchange``, ``tail``: (cells,); in seconds.
    """

    def __init__(self, recorded: RecordedSteps) -> None:
        self.input, self.compute, waited, self.rest = recorded.seconds.transpose(2, 0, 1)
        self.exchange = waited.min(axis=1)
        taken = recorded.seconds.sum(axis=2).mean(axis=1)
        self.tail = taken - self.own.max(axis=1) - self.exchange
        self.weights, self.steps = recorded.weights, recorded.steps

    @property
    def own(self) -> np.ndarray:
        """Return what each rank does itself, (cells, ranks)."""
        own: np.ndarray = self.input + self.compute + self.rest
        return own

    @property
    def seconds(self) -> float:
        """Return the seconds of all recorded steps."""
        return self.with_changes()

    def with_changes(
        self,
        *,
        input: np.ndarray | float | None = None,
        compute: np.ndarray | float | None = None,
        rest: np.ndarray | float | None = None,
        exchange: np.ndarray | float | None = None,
    ) -> float:
        """Return the seconds of all steps with other terms, (cells, ranks); exchange (cells,). None: recorded."""
        pairs = ((input, self.input), (compute, self.compute), (rest, self.rest))
        own = sum(recorded if changed is None else changed for changed, recorded in pairs)
        longest = np.broadcast_to(own, self.input.shape).max(axis=1)
        return float(self.weights @ (longest + (self.exchange if exchange is None else exchange) + self.tail))

    def as_others(self, values: np.ndarray, ranks: Sequence[int]) -> np.ndarray:
        """Return ``values`` (cells, ranks) with at most the median of the other ranks for these."""
        changed, others = values.copy(), np.median(np.delete(values, ranks, axis=1), axis=1)
        changed[:, ranks] = np.minimum(values[:, ranks], others[:, None])
        return changed
