"""Loss and metrics over samples of all ranks: sums and counts travel, the division comes last."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing

import numpy as np

from hvd_train.core.mean import ordered_sum
from hvd_train.protocol import Batch, FrontEnd


def evaluate(
    frontend: FrontEnd, batches: Generator[Batch, None, None], between: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Return the task's results over every sample of the batches of all ranks, once each.

    ``between`` is called after each batch, on all ranks alike.
    """
    # Each rank has gathered running statistics for itself: all evaluate one model.
    frontend.average_statistics()
    sums = np.zeros(frontend.task.length)
    with closing(batches):
        for batch in batches:
            if batch.count:
                sums += frontend.ops.to_numpy(frontend.evaluate_batch(frontend.to_device(batch)))
            between()
    return frontend.task.results(ordered_sum(sums, frontend.groups.sums))
