"""Hooks: what looks on while the loop trains. The product's own and the user's are called alike, on every rank."""

from __future__ import annotations

import math
import os
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hvd_train.config.keys import EarlyStoppingConfig
from hvd_train.core.agreement import NONFINITE_FIX, agree_on_weights
from hvd_train.core.mean import ordered_sum
from hvd_train.data.loader import Step
from hvd_train.errors import ConfigError, NonFiniteError, TrainError

if TYPE_CHECKING:
    from hvd_train.core.loop import Trainer

CROWDED, ENOUGH_STEPS, SMALL_SECONDS = 3.0, 50, 0.005  # of ``Crowded``: 494 samples/s were 31 675 with one thread
# ``FewerRanks``: on 2 cores the exchange took 16 to 34 % of the time of an MLP with 24 million weights, whose one
# process is 1.7 times as fast; 4 to 5 % of that of ResNet-18 and 3 % of that of BERT. Ranks with models of a few MB
# wait for one another: the CNN's 16 % of the time, and one process has 0.95 of their speed.
EXCHANGE_SHARE, HEAVY_BYTES, BUSY = 0.1, 16 << 20, 1.25
WARMUP_STEPS = 20  # steps left out of samples_per_second: tracing, allocation and caches settle in them


@dataclass(frozen=True)
class Taken:
    """A step that was taken; its number is ``trainer.progress.step``.

    batch: this rank's micro-batches and the samples of all ranks; rate: the learning rate; sums: this rank's, of each
    micro-batch, on the device: to read one waits for the step, and in TensorFlow ends the call of several steps early;
    seconds: since the step before, without what hooks took; told, compared: whether a line of the log and a comparison
    of the weights are due.
    """

    batch: Step
    rate: float
    sums: Sequence[Any]
    seconds: float
    told: bool
    compared: bool


@dataclass(frozen=True)
class Epoch:
    """An epoch that ended, or was left (``complete`` False).

    number: from 0; metrics: train_NAME of all that the task tells and, where it was evaluated, val_NAME and
    val_samples, equal on all ranks.
    """

    number: int
    complete: bool
    metrics: Mapping[str, float]


class Hook:
    """Override what you need; ``trainer`` has ``config``, ``progress``, ``frontend`` (with its ``model``),
    ``communicator`` (``rank``, ``size``), ``log.message(text)``, ``samples_per_second()`` and ``stop(why)``.

    What raises ends the job on all ranks.
    """

    def on_start(self, trainer: Trainer) -> None:
        """Called before the first step, with the weights that all ranks share."""

    def on_step(self, trainer: Trainer, taken: Taken) -> None:
        """Called after each optimizer step."""

    def on_epoch(self, trainer: Trainer, epoch: Epoch) -> None:
        """Called after each epoch and its evaluation, before its checkpoint."""

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """Called when rank 0 has written the checkpoint ``path``, some steps after its own.

        It comes before the next one, and not for one that is gone again, as it was none of the k best.
        """

    def on_end(self, trainer: Trainer, summary: Mapping[str, Any]) -> None:
        """Called when training has come to its end."""


def guarded(hook: Hook, event: str, *given: Any) -> None:
    """Calls a hook of the user's own: what it raises becomes one line that names it."""
    try:
        getattr(hook, event)(*given)
    except TrainError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(hook).__name__}.{event} raised {type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(what, where=f"{frame.filename}:{frame.lineno}", fix="mend the hook") from error


# ---- the product's own


class Speed(Hook):
    """Global and steady: the median over training steps after the first 20, evaluation and saving left out."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=10_000)
        self._steps, self._warm = 0, False
        self._open = 0, 0.0  # samples and seconds since the last rate

    def on_step(self, trainer: Trainer, taken: Taken) -> None:
        self.count(taken.batch.count, taken.seconds, bool(trainer.frontend.queued))

    def count(self, samples: int, seconds: float, queued: bool) -> None:
        """``queued``: the step has not run; steps that run in one call count together."""
        self._steps += 1
        self._open = self._open[0] + samples, self._open[1] + seconds
        if queued:
            return
        if self._steps > WARMUP_STEPS and not self._warm:
            self._rates.clear()
            self._warm = True
        self._rates.append(self._open[0] / max(self._open[1], 1e-9))
        self._open = 0, 0.0

    def median(self) -> float:
        """Samples per second of all ranks; 0 before the first step."""
        return float(np.median(self._rates)) if self._rates else 0.0

    def spread(self) -> tuple[float, float]:
        """Samples per second of all steps together and of the fastest tenth; zeros before there are enough steps."""
        if len(self._rates) < ENOUGH_STEPS:
            return 0.0, 0.0
        return 1 / float(np.mean(1 / np.array(self._rates))), float(np.quantile(self._rates, 0.9))


class Crowded(Hook):
    """Say once that one thread is likely faster: with other work on the cores, the ``threads`` of a rank wait for one
    another in each operation, and a small step is all waiting.

    To choose one thread here would change the order of sums, and with it the last bits of the results.
    """

    def __init__(self, threads: int) -> None:
        self._threads, self._said = threads, False

    def on_step(self, trainer: Trainer, taken: Taken) -> None:
        if self._said or not taken.told or os.getloadavg()[0] <= (os.cpu_count() or 1):
            return
        usual, fast = trainer.speeds()
        if usual and fast > CROWDED * usual and taken.batch.count / fast < SMALL_SECONDS:
            self._said = True
            trainer.log.message(
                f"threads: auto took {self._threads}, and other work shares the cores: {usual:,.0f} samples/s, "
                f"{fast:,.0f} in the fastest steps; for so small a model --set threads=1 is likely faster"
            )


class FewerRanks(Hook):
    """Advise once to start fewer ranks with more threads, where all are on one host and much of the time is exchange.

    Each rank sends and updates all weights; the threads of one rank share that work. ``threads``: of each rank.
    """

    def __init__(self, threads: int) -> None:
        self._threads, self._done = threads, False

    def on_step(self, trainer: Trainer, taken: Taken) -> None:
        share = trainer.exchange_share
        if self._done or share is None or share < EXCHANGE_SHARE:
            return
        specs = trainer.frontend.specs()
        # Beside other work ranks lose their cores, and others wait for them: the share says nothing about the exchange.
        busy = os.getloadavg()[0] > BUSY * (os.cpu_count() or 1)
        if busy or sum(spec.nbytes for spec in specs) < HEAVY_BYTES:
            return
        self._done = True
        ranks = trainer.communicator.size
        fewer = max(n for n in range(1, ranks) if ranks % n == 0)
        threads, batch = self._threads * ranks // fewer, trainer.config.batch_size
        words = [f"-np {fewer}", f"--set threads={threads}"]
        words += [f"--set batch_size={batch * ranks // fewer}"] if batch else []
        who = f"1 rank with {threads} threads is" if fewer == 1 else f"{fewer} ranks with {threads} threads each are"
        millions = sum(spec.size for spec in specs) / 1e6
        trainer.log.message(
            f"note: {ranks} ranks spend {share:.0%} of the time in the exchange of {millions:,.1f} million weights; "
            f"{who} likely to be faster on this host ({' '.join(words)})"
        )


class Lines(Hook):
    """The log: a line for the samples since the line before it; so that lines add up by their ``samples``."""

    def __init__(self) -> None:
        self.pending: list[Any] = []  # this rank's sums on the device, not yet read

    def local(self, trainer: Trainer) -> np.ndarray:
        """(n,) float64: this rank's sums since the last line, added in the order of the steps, and its counts."""
        rows = [trainer.frontend.ops.to_numpy(sums) for sums in self.pending]
        sums = np.sum(rows, axis=0) if rows else np.zeros(trainer.frontend.task.length)
        return np.append(sums, trainer.counts)

    def on_start(self, trainer: Trainer) -> None:
        """Goes on with the line in which an interrupted run stopped."""
        rows, communicator, length = trainer.progress.pending, trainer.communicator, trainer.frontend.task.length
        trainer.progress.pending = []
        row = np.zeros(0)
        if len(rows) == communicator.size:
            row = np.array(rows[communicator.rank])
        elif rows and communicator.rank == 0:
            row = np.sum(rows, axis=0)
        if len(row) == length + len(trainer.counts):
            self.pending, trainer.counts = [trainer.frontend.ops.from_numpy(row[:length])], row[length:]

    def on_step(self, trainer: Trainer, taken: Taken) -> None:
        p = trainer.progress
        self.pending += taken.sums
        trainer.log.progress(p.epoch, p.consumed, trainer.epoch_size, trainer.samples_per_second)
        if not taken.told:
            return
        local = self.local(trainer)
        self.pending.clear()
        task = trainer.frontend.task
        sums = ordered_sum(local, trainer.groups.data)
        if task.weighted_by_data:
            task.check(sums, sums[task.length :])
            trainer.counts, sums = np.zeros(len(task.objectives)), sums[: task.length]
        result = task.results(sums)
        if result["samples"] and not math.isfinite(result["loss"]):
            where = f"epoch {p.epoch + 1}, up to step {p.step}"
            raise NonFiniteError(f"the training loss is {result['loss']}", where=where, fix=NONFINITE_FIX, common=True)
        p.epoch_sums = [float(x) for x in np.add(p.epoch_sums or 0.0, sums)]
        if result["samples"]:  # else all steps were left out
            trainer.log.train(p.epoch, p.step, result, taken.rate, trainer.samples_per_second())


class Agreement(Hook):
    """All ranks must hold the same weights, wherever they have not been let go apart."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines

    def on_step(self, trainer: Trainer, taken: Taken) -> None:
        if taken.compared:
            self.compare(trainer)

    def compare(self, trainer: Trainer) -> None:
        if not trainer.config.agreement_every_n_steps or trainer.update.diverged or trainer.groups.data.size == 1:
            return
        finite = all(np.isfinite(trainer.frontend.ops.to_numpy(sums)).all() for sums in self._lines.pending)
        where = f"epoch {trainer.progress.epoch + 1}, step {trainer.progress.step}"
        agree_on_weights(trainer.groups.data, trainer.frontend.checksums(), where, finite=finite)


class EarlyStopping(Hook):
    """``early_stopping``; ``best`` and ``waited`` are kept in the checkpoint's progress."""

    def __init__(self, rule: EarlyStoppingConfig) -> None:
        self._rule = rule

    def on_epoch(self, trainer: Trainer, epoch: Epoch) -> None:
        rule, p = self._rule, trainer.progress
        if not epoch.complete or "val_loss" not in epoch.metrics:
            return  # an interruption within an epoch must not change when training stops
        value = epoch.metrics[rule.monitor] * (1 if trainer.config.mode_of(rule) == "min" else -1)
        if math.isfinite(value) and (p.best is None or value < p.best - rule.min_delta):
            p.best, p.waited = value, 0
            return
        p.waited += 1
        if p.waited >= rule.patience:
            trainer.stop(f"early stopping: {rule.monitor} has not improved for {p.waited} evaluations")
