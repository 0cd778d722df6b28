"""Efficiency as a product of factors (POP project: Wagner et al. 2018, "A structured approach to performance
analysis"), for the recorded steps of a training.

Useful time is computing. Each factor is the quotient of two times, and the next one begins where the last one ended:
so their product is the efficiency exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvd_train.insight.recorded_steps import RecordedSteps
from hvd_train.insight.replay import Replay


@dataclass(frozen=True)
class Factors:
    """Each from 0 to 1; 1 is the best.

    ``load_balance``: computing of the mean rank, of that of the rank with most. ``serialization``: that of the rank
    with most, of the sum of the slowest rank's in each cell of steps. ``preparation``: this, of the steps without
    exchange: input, hooks and log are lost. ``transfer``: the steps without exchange, of the steps.
    """

    load_balance: float
    serialization: float
    preparation: float
    transfer: float

    @property
    def communication(self) -> float:
        """Return the efficiency of communication: serialization x preparation x transfer."""
        return self.serialization * self.preparation * self.transfer

    @property
    def parallel(self) -> float:
        """Return the parallel efficiency: the share of the steps' time in which the mean rank computes."""
        return self.load_balance * self.communication


def factors(recorded: RecordedSteps) -> Factors | None:
    """Return the factors of the recorded steps; None if nothing was computed in them, or in stages of a pipeline.

    The ranks must exchange in each step. Otherwise they do not wait for the slowest of a step.
    """
    if recorded.stages > 1:
        return None
    replay = Replay(recorded)
    useful = recorded.weights @ replay.compute  # (ranks,)
    slowest = float(recorded.weights @ replay.compute.max(axis=1))
    unexchanged, taken = float(recorded.weights @ replay.own.max(axis=1)), replay.seconds
    if not (slowest > 0 and taken > 0):
        return None
    most = float(np.max(useful))
    return Factors(float(np.mean(useful)) / most, most / slowest, slowest / unexchanged, unexchanged / taken)
