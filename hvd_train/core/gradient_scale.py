"""The division by N: gradients are added over ranks and micro-batches, so each one is divided by the global count."""

from __future__ import annotations

import numpy as np

from hvd_train.core.reductions import ordered_sum
from hvd_train.core.training import Training
from hvd_train.data.loader import Step
from hvd_train.protocol import Scale


def gradient_scale(training: Training, step: Step) -> tuple[Scale, np.ndarray | None]:
    """Return the factor of the losses of one step, and this rank's counts (losses,), or None if samples are counted.

    The factor is the loss scale over the number of samples of the global batch, or of this rank in local training.
    Where labels determine the counts, it is a list: a factor for each loss, then that of a sample.
    """
    loss_scale, local = training.progress.loss_scale, training.update.local_gradients
    of_sample = loss_scale / (max(step.local_count, 1) if local else step.count)
    if not training.frontend.task.weighted_by_data:
        return of_sample, None
    counts = np.sum([training.frontend.counts(batch) for batch in step.micro_batches], axis=0)  # (losses,)
    total = counts
    if not local:
        # Run queued steps first: other ranks may already be waiting for this rank's gradients.
        training.frontend.run_queued()
        # Before the first micro-batch, in one small transfer a step.
        total = ordered_sum(counts, training.groups.data)
    return [*(loss_scale / count if count else 0.0 for count in total.tolist()), of_sample], counts
