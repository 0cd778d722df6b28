"""The evaluation of a training, which a signal may interrupt."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Generator
from contextlib import closing

from hvd_train import faults
from hvd_train.core.batch_statistics import gather
from hvd_train.core.callbacks.weight_check import WeightCheck
from hvd_train.core.control_sync import ControlSync
from hvd_train.core.evaluation import evaluate
from hvd_train.core.stopping import Interruption, StopSync
from hvd_train.core.time_account import EVALUATE
from hvd_train.core.training import Training
from hvd_train.protocol import Batch


class Validation:
    """Evaluates on the validation samples, every ``check_val_every_n_epoch`` epochs and at the end."""

    def __init__(
        self, training: Training, weight_check: WeightCheck, sync: StopSync, interruption: Interruption
    ) -> None:
        self._training, self._weight_check = training, weight_check
        self._sync, self._interruption = sync, interruption
        self._turns = ControlSync(training.communicator)  # batches
        self._before = training.progress
        self._warned = False

    def epoch_left(self) -> None:
        """Record the progress to save at an interruption: a resumed run repeats the evaluation and all that follows."""
        self._before = copy.deepcopy(self._training.progress)

    def due(self, complete: bool) -> bool:
        """Return whether to evaluate after an epoch that is ``complete`` or was interrupted."""
        every = self._training.config.check_val_every_n_epoch
        return self._training.finished or (complete and self._training.progress.epoch % every == 0)

    def run(self, epoch: int, learning_rate: float) -> None:
        """Evaluate, and log the result for epoch number ``epoch`` (from 0)."""
        training = self._training
        p = training.progress
        with training.time.within(EVALUATE), self._weight_check.global_weights(training):
            training.stop_source.at("evaluation", p.step)
            self._turns.begin()
            if training.update.needs_statistics:
                gather(training, self._between)
            batches = _limited(training.val_loader.evaluation(), training.config.limit_val_batches)
            results = evaluate(training.frontend, batches, self._between)
        p.val = {f"val_{name}": value for name, value in results.items()}
        self._warn_of_no_value()
        training.log.val(epoch, p.step, results, learning_rate, training.samples_per_second())

    def _warn_of_no_value(self) -> None:
        """Warn once if an evaluation has no value of a monitored metric."""
        training, val = self._training, self._training.progress.val
        missing = [name for name in training.config.monitors if math.isnan(val.get(name, 0.0))]
        if missing and val["val_samples"] and not self._warned:
            what = (
                f"the evaluation has no value of {' and '.join(missing)}: no label counts in it, or the model gives NaN"
            )
            training.log.warning(f"{what}; no checkpoint is the best by it, and it stops or lowers nothing")
            self._warned = True

    def _between(self) -> None:
        """Check for a signal between batches."""
        training = self._training
        training.stop_source.at("evaluation", training.progress.step)
        faults.at("evaluation")
        if self._turns.due():
            self._sync.sync_in_evaluation(self._turns)
            if self._sync.signal:
                training.progress = self._before
                self._interruption.leave()


def _limited(batches: Generator[Batch, None, None], limit: int | None) -> Generator[Batch, None, None]:
    with closing(batches):
        yield from itertools.islice(batches, limit)
