"""What follows a step (log, compare weights, save, sync): it depends on configuration and step, so ranks agree."""

from __future__ import annotations

from typing import NamedTuple

from hvd_train.config import Config


class StepActions(NamedTuple):
    """The actions after a step. ``last``: the epoch ends here, at its last step or at ``max_steps``."""

    last: bool
    save: bool
    snapshot: bool  # a checkpoint in memory
    log: bool
    check: bool  # of the weights
    sync: bool  # the ranks agree on signals and requests to stop
    times: bool  # and exchange their times, which costs more


class StepRules:
    """The rules of ``config`` for each step. ``snapshots``: there is a folder for in-memory checkpoints."""

    def __init__(self, config: Config, snapshots: bool) -> None:
        self._max_steps = config.max_steps
        self._save_every = config.checkpoint.every_n_steps
        self._snapshot_every = config.checkpoint.snapshot_every_n_steps if snapshots else 0
        self._log_every = config.log_every_n_steps
        self._check_every = config.agreement_every_n_steps
        self._line_owed = False

    def steps_left(self, step: int, most: int) -> int:
        """Return the number of steps after ``step`` up to one that saves or ends the run, at most ``most``."""
        every = [self._save_every, self._snapshot_every]
        spans = [n - step % n for n in every if n]
        return min([most, *spans, *([self._max_steps - step] if self._max_steps else [])])

    def log(self, step: int) -> bool:
        """Return whether a log line is due after ``step``."""
        return step % self._log_every == 0

    def due(self, step: int, at_end: bool, sync: bool, in_flight: bool = False) -> StepActions:
        """Return the actions after step number ``step`` (from 1). ``at_end``: of the epoch; ``sync``: by the clock.

        ``in_flight``: a transfer is in flight, so a log line, which would have to wait for it, is postponed.
        """
        last = at_end or bool(self._max_steps and step >= self._max_steps)
        # At the end of an epoch its own checkpoint follows, with its metrics.
        save = not at_end and bool(self._save_every) and step % self._save_every == 0
        snapshot = not (last or save) and bool(self._snapshot_every) and step % self._snapshot_every == 0
        # Check before saving: a log line reveals non-finite losses, a weight check differing weights.
        looks = last or save or snapshot
        self._line_owed = self._line_owed or self.log(step)
        log = looks or (self._line_owed and not in_flight)
        self._line_owed = self._line_owed and not log
        check = looks or bool(self._check_every and step % self._check_every == 0)
        # A request to stop takes effect at a log line, because the end of a run must not depend on clocks.
        return StepActions(last, save, snapshot, log, check, sync or log, sync or looks)
