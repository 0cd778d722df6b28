"""How ranks run through an epoch: in lockstep, or each at its own speed (async)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

import numpy as np

from hvd_train.core.step_actions import StepActions, StepRules
from hvd_train.core.training import Training
from hvd_train.data.loader import Step

# The counter holds the number of steps between two syncs times this, plus the number of parts taken.
LENGTH = 1 << 32


class LogBoard(Protocol):
    """Sums that ranks post for rank 0's log line without waiting for one another."""

    def leave(self, sums: np.ndarray) -> None: ...

    def take(self) -> np.ndarray:
        """Return the sums posted since the last call; zeros on ranks other than 0."""


class Pace(Protocol):
    """The steps of an epoch on this rank, and the actions after each."""

    board: LogBoard | None

    def steps(self) -> Generator[Step, None, None]:
        """Yield this rank's steps for the rest of the epoch, until closed."""

    def due(self, at_end: bool) -> StepActions:
        """Return the actions after the last step. ``at_end``: of the epoch."""

    def request_sync(self) -> None:
        """Ask all ranks to sync within a few steps. Called by a single rank, at any step."""

    def close(self) -> None: ...


class Lockstep:
    """All ranks take each step together, and sync by the clock, so no request is needed."""

    board: LogBoard | None = None

    def __init__(self, training: Training, rules: StepRules, sync_due: Callable[[bool], bool]) -> None:
        self._training, self._rules, self._sync_due = training, rules, sync_due

    def steps(self) -> Generator[Step, None, None]:
        p = self._training.progress
        return self._training.train_loader.epoch(p.epoch, p.consumed)

    def due(self, at_end: bool) -> StepActions:
        step, in_flight = self._training.progress.step, self._training.update.in_flight
        return self._rules.due(step, at_end, self._sync_due(in_flight), in_flight)

    def request_sync(self) -> None:
        pass

    def close(self) -> None:
        pass


class SharedBoard:
    """A board in an MPI window of rank 0. ``length``: number of sums."""

    def __init__(self, training: Training, length: int) -> None:
        self._first = training.groups.data.rank == 0
        self._window = training.groups.data.window(length if self._first else 0, "float64")
        self._zeros = np.zeros(length)
        self.close = self._window.close

    def leave(self, sums: np.ndarray) -> None:
        self._window.add(0, sums)

    def take(self) -> np.ndarray:
        return self._window.change(0, lambda _: self._zeros) if self._first else self._zeros


class AsyncSteps:
    """Asynchronous steps: no rank waits for another between two syncs, which are several global batches apart.

    Each global batch is split into the parts that ranks would have in lockstep. A free rank takes the next part, by a
    counter in an MPI window of rank 0. So a slow rank takes fewer, and each sample is used once. Parts are taken in
    order: at a sync the position in the epoch is one number, so logs, checkpoints and signals work as in lockstep.

    Ranks sync at a checkpoint and at the end of the epoch, or earlier if one requests it.
    """

    def __init__(self, training: Training, rules: StepRules) -> None:
        self._training, self._rules, ranks = training, rules, training.groups.data
        self.board: LogBoard | None
        task = training.frontend.task
        self._board = self.board = SharedBoard(training, task.length + len(task.objectives) * task.weighted_by_data)
        self._counter = ranks.window(int(ranks.rank == 0), "int64")
        self._met, self._asked, self._parts = True, False, 0
        self._begun = False

    def steps(self) -> Generator[Step, None, None]:
        training = self._training
        workers = training.config.data.workers
        with ThreadPoolExecutor(workers, "prefetch") as pool:
            while training.progress.consumed < training.train_size:
                yield from self._until_sync(pool, workers)

    def due(self, at_end: bool) -> StepActions:
        if self._met:
            return self._rules.due(self._training.progress.step, at_end, sync=True)._replace(log=True)
        return StepActions(False, False, False, log=self._rules.log(self._parts), check=False, sync=False, times=False)

    def request_sync(self) -> None:
        """Sync after the global batch whose part was taken last."""
        if self._asked or self._met:
            return
        self._asked = True
        ranks = self._training.groups.data.size

        def shortened(old: np.ndarray) -> np.ndarray:
            length, count = divmod(int(old[0]), LENGTH)
            return np.array([min(length, -(-count // ranks)) * LENGTH + count])

        self._counter.change(0, shortened)

    def close(self) -> None:
        self._counter.close()
        self._board.close()

    def _length(self) -> int:
        """Return the number of steps to the next sync, unless a rank requests an earlier one."""
        training, p = self._training, self._training.progress
        done = -(-p.consumed // training.global_batch)
        left = -(-(training.train_size - p.consumed) // training.global_batch)
        # All ranks must sync after the first step, when the run folder is written.
        most = (min(left, training.limit - done) if training.limited else left) if self._begun else 1
        self._begun = True
        return self._rules.steps_left(p.step, most)

    def _until_sync(self, pool: ThreadPoolExecutor, fetched: int) -> Generator[Step, None, None]:
        """Yield this rank's steps up to the next sync. ``fetched``: parts to prefetch."""
        training, p, ranks = self._training, self._training.progress, self._training.groups.data
        first_step, first, batch = p.step, p.consumed, training.global_batch

        def fetch(number: int) -> tuple[int, Future[Step]]:
            step, part = divmod(number, ranks.size)
            return number, pool.submit(training.train_loader.part, p.epoch, first + step * batch, part)

        length = self._length()
        if ranks.rank == 0:
            self._counter.change(0, lambda _: np.array([length * LENGTH + ranks.size]))
        ranks.barrier()
        self._asked, reached, more = False, first, True
        # The first part of each rank is fixed, so that every rank has a step after which it syncs.
        parts = deque([fetch(ranks.rank)])
        while parts:
            # Take at least one part ahead, because a rank must know which of its steps is the last.
            while more and len(parts) <= fetched:
                length, number = divmod(int(self._counter.change(0, lambda old: old + 1)[0]), LENGTH)
                more = number < length * ranks.size
                if more:
                    parts.append(fetch(number))
            place, part = parts.popleft()
            self._met = not parts
            # At a sync all ranks are at the same step, whichever parts they took.
            at = length - 1 if self._met else place // ranks.size
            p.step, p.consumed = first_step + at, first + at * batch
            end = min(first + (at + 1) * batch, training.train_size)
            here = end if self._met else min(first + (place + 1) * batch // ranks.size, end)
            self._parts += 1
            # Samples of all ranks since this rank's last step, so that each rank counts all of them.
            yield replace(part.result(), count=here - reached, consumed=end)
            reached = here
