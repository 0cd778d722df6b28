"""A report of slow ranks in scripts: the ranks compare their waiting times up to four times a second."""

from __future__ import annotations

from collections.abc import Callable

from hvd_train.core.control_sync import ControlSync
from hvd_train.core.straggler import Stragglers
from hvd_train.protocol import Communicator
from hvd_train.run_folder.terminal import say


class SlowRankReport:
    """The report of slow ranks, one per process. ``waited`` returns this rank's waiting time so far, in seconds."""

    def __init__(self, communicator: Communicator, waited: Callable[[], float]) -> None:
        self._communicator, self._waited = communicator, waited
        self._sync, self._stragglers = ControlSync(communicator), Stragglers()
        self._step = 0

    def stepped(self, steps: int = 1) -> None:
        """Count ``steps`` more steps; all ranks call it. Rank 0 prints a slow rank."""
        self._step += steps
        if self._communicator.size == 1 or not self._sync.due():
            return
        if self._stragglers.look(self._step, self._sync.sync(self._waited())) and self._communicator.rank == 0:
            say(f"step {self._step}: {self._stragglers.slow_rank}", err=True)

    def pause(self) -> None:
        """Ignore the time until the next step, for example of an evaluation; all ranks call it."""
        self._stragglers.pause()
        self._sync.begin()
