"""The state of a training that the loop, its hooks and saving share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hvd_train.checkpoint.manifest import Progress
from hvd_train.checkpoint.resume_rules import data_facts
from hvd_train.config import Config
from hvd_train.core.control_sync import StopSource
from hvd_train.core.learning_rate import Schedule
from hvd_train.core.loss_scale import FIRST_SCALE
from hvd_train.core.straggler import Stragglers
from hvd_train.core.time_account import TimeAccount
from hvd_train.data.loader import Loader
from hvd_train.protocol import FrontEnd, Source, Update
from hvd_train.run_folder.log import NullLog, RunLog


class Training:
    """The components, lengths and progress of a training. Hooks get it as ``trainer``.

    ``compression``: the compressor that ``auto`` chose, which a resumed run keeps. ``until``: epoch at which the run
    pauses, to be resumed later.
    """

    samples_per_second: Callable[[], float]  # over all ranks; 0 before the first step
    speeds: Callable[[], tuple[float, float]]  # see callbacks.speed.Speed.spread

    def __init__(
        self,
        config: Config,
        frontend: FrontEnd,
        update: Update,
        train: Source,
        val: Source,
        run_dir: Path,
        log: RunLog | NullLog,
        compression: str,
        stop_source: StopSource,
        until: int | None,
    ) -> None:
        self.config, self.frontend, self.update, self.log = config, frontend, update, log
        self.compression, self.stop_source, self.until = compression, stop_source, until
        self.run_dir, self.folder = run_dir, run_dir / "checkpoints"
        self.groups, self.communicator = frontend.groups, frontend.groups.world
        self.global_batch = config.global_batch(self.groups.data.size)
        self.train_loader, self.val_loader = self._loader(train), self._loader(val)
        self.steps_per_epoch = self.train_loader.steps_per_epoch
        self.schedule = Schedule.of(config, self.steps_per_epoch, self.groups.data.size)
        self.train_size, self.val_size = len(train), len(val)
        self.sample = train.sample.joined(val.sample)
        self.data = data_facts(train, val)
        self.limit = self.schedule.steps_per_epoch  # of those, so many are made
        self.limited = self.limit < self.steps_per_epoch
        self.scaled = config.precision == "16-mixed"
        self.progress = Progress(loss_scale=FIRST_SCALE if self.scaled else 1.0, warmup=self.schedule.mixed_warmup)
        self.stop_reason = ""  # why a hook on this rank requests to stop; the ranks agree on it at a log line
        self.stragglers = Stragglers()
        links = self.groups.links
        self.time = TimeAccount(self._waited, (lambda: links.waited) if links else None)

    def _waited(self, fresh: bool) -> float:
        """Return the seconds that this rank has waited for transfers. ``fresh``: steps may have run since."""
        world = self.communicator.waited if self.groups.links else 0.0  # otherwise the front-end counts them
        return self.frontend.waited(fresh) + world

    def _loader(self, source: Source) -> Loader:
        return Loader(
            source,
            global_batch=self.global_batch,
            accumulate=self.config.micro_batches,
            rank=self.groups.data.rank,
            size=self.groups.data.size,
            seed=self.config.seed,
            workers=self.config.data.workers,
        )

    def stop(self, why: str) -> None:
        """End the training on all ranks, with evaluation and checkpoint, whichever rank calls this.

        It ends with the epoch if called in ``on_epoch``, else at the next log line.
        """
        self.stop_reason = why

    @property
    def exchange_share(self) -> float | None:
        """Return the share of time that every rank spends in the exchange; None: not yet measured."""
        return self.stragglers.least_wait

    @property
    def steps_done(self) -> int:
        """Return the number of steps of the current epoch that were taken."""
        return self.train_loader.steps_done(self.progress.epoch, self.progress.consumed)

    @property
    def epoch_size(self) -> int:
        """Return the number of samples of the current epoch: all, or those of ``limit_train_batches``."""
        return self.train_loader.samples(self.progress.epoch, self.limit) if self.limited else self.train_size

    def learning_rate(self, place: int, step: int) -> float:
        """Return the rate of the run's step ``step`` (from 0), at position ``place`` of its epoch.

        Lengths in epochs follow the position in the epoch, so that they stay valid after a resume on another number of
        ranks. A warm-up in the other unit keeps its initial length.
        """
        p = self.progress
        in_epochs = p.epoch * self.schedule.steps_per_epoch + place
        rate = self.schedule.rate(step if self.schedule.counts_steps else in_epochs)
        # Apply the factor of plateaus.
        return rate if p.rate_factor == 1 else max(rate * p.rate_factor, self.config.optim.min_lr)

    # ---- whether it has ended

    @property
    def finished(self) -> bool:
        """Return whether the training is finished: stopped, or at ``max_steps`` or ``max_epochs``."""
        p, c = self.progress, self.config
        return (
            p.stopped or bool(c.max_steps and p.step >= c.max_steps) or bool(c.max_epochs and p.epoch >= c.max_epochs)
        )

    @property
    def paused(self) -> bool:
        """Return whether the run has reached epoch ``until``, where it pauses, but not its end."""
        return self.until is not None and self.progress.epoch >= self.until and not self.finished

    @property
    def complete(self) -> str:
        """Return why a restored run has nothing left to train; "" if it has."""
        if self.progress.ending or not self.finished:
            return ""
        p, c = self.progress, self.config
        word = "nothing is left to train"
        if c.early_stopping and p.stopped and p.waited >= c.early_stopping.patience:
            return f"{word}: early stopping ended the run; a larger early_stopping.patience, or none, continues"
        if p.stopped:
            return f"{word}: the run was stopped before its end; --overwrite starts it again"
        key = "max_steps" if c.max_steps and p.step >= c.max_steps else "max_epochs"
        return f"{word}: {key} {getattr(c, key)} is reached; a larger one continues"
