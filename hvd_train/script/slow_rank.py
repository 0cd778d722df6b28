"""A report of the rank of a script that is slow: the ranks compare their waits up to four times a second."""

from __future__ import annotations

from collections.abc import Callable

from hvd_train.core.control_sync import ControlSync
from hvd_train.core.straggler import Stragglers
from hvd_train.protocol import Communicator
from hvd_train.run_folder.terminal import say


class SlowRankReport:
    """Name the slow rank, for all models of a process. ``waited``: seconds for which this rank waited so far."""

    def __init__(self, communicator: Communicator, waited: Callable[[], float]) -> None:
        self._communicator, self._waited = communicator, waited
        self._sync, self._stragglers = ControlSync(communicator), Stragglers()
        self._step = 0

    def stepped(self, steps: int = 1) -> None:
        """Count ``steps`` more steps; on all ranks together. Rank 0 names a slow rank."""
        self._step += steps
        if self._communicator.size == 1 or not self._sync.due():
            return
        if self._stragglers.look(self._step, self._sync.sync(self._waited())) and self._communicator.rank == 0:
            say(f"step {self._step}: {self._stragglers.slow_rank}", err=True)

    def pause(self) -> None:
        """Leave out the time until the next step: an evaluation, a save. On all ranks together."""
        self._stragglers.pause()
        self._sync.begin()
