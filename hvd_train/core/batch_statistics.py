"""Recompute running statistics for given weights by a pass over the training data."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import closing

from hvd_train.core.training import Training


def gather(training: Training, between: Callable[[], None]) -> None:
    """Replace the running statistics by those of the training samples under the model's current weights.

    The batches are those of the last epoch. A layer normalizes by the statistics of the global batch, whatever
    ``sync_batchnorm`` says, and stores those of all samples: the mean, and the variance with n - 1. So they do not
    depend on the number of ranks. Dropout is off. ``between`` is called after each step.
    """
    frontend = training.frontend
    frontend.run_queued()
    before = frontend.running_statistics()
    if not frontend.begin_statistics():
        return
    with closing(training.train_loader.epoch(max(training.progress.epoch - 1, 0))) as steps:
        for step in itertools.islice(steps, training.limit):
            for batch in step.micro_batches:
                frontend.add_statistics(frontend.to_device(batch))
            between()
    frontend.take_statistics()
    training.update.keep_statistics(before)
