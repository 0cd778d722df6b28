"""Loss and metrics over the samples of all ranks: add sums and counts over ranks, then divide."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing

import numpy as np

from hvd_train.core.reductions import ordered_sum
from hvd_train.metrics.ranking import Ranking
from hvd_train.protocol import Batch, Evaluable


def evaluate(
    model: Evaluable, batches: Generator[Batch, None, None], between: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Evaluate the task over the batches of all ranks, each sample once.

    ``between`` is called after each batch, on all ranks alike.
    """
    # Average the ranks' running statistics, so that all evaluate the same model.
    model.average_statistics()
    task, ranks = model.task, model.groups.sums
    sums, rankings = np.zeros(task.length), {k: Ranking(labels) for k, labels in task.ranked.items()}
    gatherings = task.gatherings()
    with closing(batches):
        for batch in batches:
            if batch.count:
                row = model.ops.to_numpy(model.evaluate_batch(model.to_device(batch)))
                sums += row[: task.length]
                if len(row) > task.length:  # a stage but the last has no outputs
                    task.gather(task.rank(row[task.length :], rankings), gatherings, batch)
            between()
    total = ordered_sum(sums, ranks)
    everyone = {k: one.joined(ranks.allgather_bytes(one.to_bytes(), "ranking")) for k, one in rankings.items()}
    return task.results(total, everyone) | task.of_gathered(gatherings, ranks)
