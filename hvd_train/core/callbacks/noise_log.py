"""The gradient noise scale of a training, measured every so many steps."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np

from hvd_train.core.noise_scale import LEVEL, NoiseScale, estimate, small_batch
from hvd_train.core.training import Training
from hvd_train.data.loader import Step
from hvd_train.protocol import Scale, Tensor

KEY = "noise_scale_every_n_steps"
ALMOST = 1e-300  # a factor that is not 0
FEWEST, MOST = 8, 40  # log lines in an estimate; fewer only at the start


def missing(training: Training) -> str:
    """Return why the noise scale cannot be measured; "" if it can."""
    task = training.frontend.task
    if training.compression != "none":
        return f"what {training.compression} leaves out of the gradients would count as noise"
    if task.compares_samples:
        return "the loss compares the samples of a batch, so its gradient is no mean over samples"
    if task.weighted_by_data and len(task.objectives) > 1:
        return "several losses are divided by the numbers of their own labels, so no part of a batch has one size"
    if training.groups.data.size == 1 and training.config.accumulate_grad_batches == 1:
        return "one rank needs accumulate_grad_batches: 2, or more, to compare a part of a step's batch with all of it"
    return ""


@dataclass
class Measured:
    """A step that is measured. ``known``: the reciprocal sizes of its small and its whole batch, and 1 for the step.

    ``factor``: by which the squared norm of the small batch's gradient is multiplied. ``first``: that norm, on the
    device, if the small batch is the first micro-batch.
    """

    factor: float
    loss_scale: float
    known: np.ndarray
    first: Tensor | None = None


class NoiseLog:
    """Estimates the noise scale from the gradients of a rank and of all ranks, or with one rank of its first
    micro-batch and of the whole batch.

    Norms are added up on the device until a log line, whose transfer of losses takes them along. Not a hook,
    because it measures within a step.
    """

    def __init__(self, training: Training) -> None:
        self._every = getattr(training.config, KEY)  # steps; 0: never
        if self._every and (reason := missing(training)):
            training.log.message(f"note: {KEY}: the noise scale is not measured, because {reason}")
            self._every = 0
        self._alone = training.groups.data.size == 1
        self._first: list[tuple[float, Tensor]] = []  # (factor, squared norm on the device) of first micro-batches
        self._known = np.zeros(3)  # 1 / small size, 1 / size and number of the steps since the last log line
        self._sent = np.zeros(2)  # 1 / size and number of the steps that ``local`` returned last
        self._lines: deque[np.ndarray] = deque(maxlen=MOST)  # the groups of ``estimate``
        self._new = 0  # lines since the last row

    # ---- within a step

    def begin(self, training: Training, step: Step, scale: Scale, counts: np.ndarray | None) -> Measured | None:
        """Return what to measure of the next step; None: nothing. ``scale``, ``counts``: see ``gradient_scale``."""
        norms = training.update.norms
        if not self._every or norms is None:
            return None
        norms.factor = 0.0
        if (training.progress.step + 1) % self._every:
            return None
        batch = step.micro_batches[0]
        samples = batch.count if self._alone else step.local_count
        part, whole = float(samples), float(step.count)
        if counts is not None and not isinstance(scale, float | int):  # labels count, not samples
            part = float(training.frontend.counts(batch)[0] if self._alone else counts[0])
            whole = training.progress.loss_scale / scale[0] if scale[0] else 0.0
        if not whole or (self._alone and not part):
            return None
        factor, per_small = small_batch(part, whole, part if self._alone else whole, samples)
        # A rank without samples measures, too: its factor is almost 0, and its gradient is 0.
        norms.factor = factor or ALMOST
        return Measured(factor, training.progress.loss_scale, np.array([per_small, 1 / step.count, 1.0]))

    def first(self, training: Training, measured: Measured) -> None:
        """Keep the squared norm of the first micro-batch's gradient, if that is the small batch."""
        if self._alone:
            measured.first = training.frontend.accumulated_squares()

    def add(self, measured: Measured) -> None:
        """Add a measured step that was taken."""
        self._known += measured.known
        if measured.first is not None:
            self._first.append((measured.factor / measured.loss_scale**2, measured.first))

    # ---- at a log line, and at the end of an epoch

    def local(self, training: Training) -> np.ndarray:
        """Return what a log line adds over ranks: squared norms of small and whole batches, and 1 / small size, (3,)
        float64; (0,) if nothing is measured."""
        norms, frontend = training.update.norms, training.frontend
        if not self._every or norms is None:
            return np.zeros(0)
        total, per_small, self._sent = np.zeros(3), self._known[0], self._known[1:]
        if self._sent[1]:
            frontend.run_queued()
            small, large = norms.take()
            if self._alone:
                small = sum(factor * float(frontend.ops.to_numpy(x)) for factor, x in self._first)
            total += small, large, per_small
        self._first, self._known = [], np.zeros(3)
        return total

    def add_line(self, training: Training, sums: np.ndarray) -> None:
        """Add the sums over ranks of ``local``, and write a row if there are enough."""
        if len(sums) and self._sent[1] and np.isfinite(sums).all():
            self._lines.append(np.array([*sums, *self._sent]))
            self._new += 1
        if self._new == MOST:
            p = training.progress
            self._write(training, p.epoch, p.step)

    def epoch_ended(self, training: Training, epoch: int) -> str:
        """Write a row for the last steps; return the words for the row of the epoch."""
        return words(self._write(training, epoch, training.progress.step)) if self._new else ""

    def _write(self, training: Training, epoch: int, step: int) -> NoiseScale:
        """Write the estimate from the lines since the last row, or from the last ``FEWEST``."""
        lines = max(self._new, FEWEST)
        found = estimate(np.array(list(islice(self._lines, max(len(self._lines) - lines, 0), None))))
        row: dict[str, Any] = asdict(found)
        training.log.noise_scale(epoch, step, {"noise_scale": row.pop("scale"), **row})
        self._new = 0
        return found


def words(found: NoiseScale) -> str:
    """Describe an estimate for the row of an epoch; "" without an interval."""
    if found.low is None or (found.high is None and not found.low):
        return ""
    if found.high is None or found.scale is None:
        return f"noise scale above {found.low:,.0f} ({LEVEL:.0%})"
    return f"noise scale {found.scale:,.0f} ({LEVEL:.0%}: {found.low:,.0f} to {found.high:,.0f})"
