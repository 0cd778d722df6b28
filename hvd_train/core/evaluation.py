"""Loss and accuracy over samples of all ranks: sums and counts travel, the division comes last."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from hvd_train.core.mean import ordered_sum
from hvd_train.protocol import Batch, FrontEnd


@dataclass(frozen=True)
class Result:
    """Mean loss and accuracy over ``samples``."""

    loss: float
    accuracy: float
    samples: int

    @classmethod
    def of(cls, sums: np.ndarray) -> Result:
        count = max(float(sums[2]), 1.0)
        return cls(float(sums[0]) / count, float(sums[1]) / count, round(float(sums[2])))


def evaluate(frontend: FrontEnd, batches: Generator[Batch, None, None]) -> Result:
    """Every sample of the batches of all ranks once."""
    frontend.average_statistics()
    sums = np.zeros(3)
    with closing(batches):
        for batch in batches:
            if batch.count:
                sums += frontend.ops.to_numpy(frontend.score(frontend.place(batch)))
    return Result.of(ordered_sum(sums, frontend.communicator))
