"""The time of a script's ranks: which one is slow, and what the time is spent on.

The ranks exchange their times up to four times a second.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np

from hvd_train.core.control_sync import ControlSync
from hvd_train.core.shares import SHOWN, shown
from hvd_train.core.straggler import Stragglers, look_at
from hvd_train.core.time_account import COMPUTE, EVALUATE, INPUT, START, TimeAccount
from hvd_train.protocol import Communicator
from hvd_train.run_folder.terminal import say


class SlowRankReport:
    """The times of all ranks, one per process. ``waited``: see ``TimeAccount``.

    What is no wait for input or transfers counts as computing.
    """

    def __init__(self, communicator: Communicator, waited: Callable[[bool], float]) -> None:
        self._communicator, self._account = communicator, TimeAccount(waited)
        self._sync, self._stragglers = ControlSync(communicator), Stragglers()
        self._step = 0
        self._seconds = np.zeros((communicator.size, len(SHOWN)))  # since they were last asked for

    def stepped(self, steps: int = 1) -> None:
        """Count ``steps`` more steps; all ranks call it. Rank 0 prints a slow rank."""
        self._step += steps
        self._account.stepped(False, steps)
        if self._sync.due():
            windows = self._sync.sync(self._account.window())
            self._seconds = self._seconds + shown([spent for _, spent, *_ in windows])
            if look_at(self._stragglers, self._step, windows) and self._communicator.rank == 0:
                say(f"step {self._step}: {self._stragglers.slow_rank}", err=True)
        self._account.enter(COMPUTE)

    def pause(self, evaluates: bool) -> None:
        """Count the time until ``resume`` as evaluation, or as the start of a training; all ranks call it."""
        self._account.enter(EVALUATE if evaluates else START)
        self._sync.begin()

    def evaluates(self) -> None:
        """Count the time until ``resume`` as evaluation."""
        self._account.enter(EVALUATE)

    def resume(self) -> None:
        """Count the time from here on as computing."""
        self._account.enter(COMPUTE)

    def input(self) -> AbstractContextManager[None]:
        """Count the block, in which a batch is fetched, as waiting for input."""
        return self._account.within(INPUT)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part of 1 ms or more since the last call, as the mean over ranks.

        They end with the last exchange of times.
        """
        parts, self._seconds = self._seconds.mean(axis=0), np.zeros_like(self._seconds)
        return {name: float(x) for name, x in zip(SHOWN, parts, strict=True) if x >= 0.001}
