"""Average one part of the weights after each step, in turn (Apache SINGA's partial synchronization)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hvd_train.protocol import Exchange, Parameters, TensorSpec
from hvd_train.update.rank_averaging import RankAveraging


def parts(specs: Sequence[TensorSpec], fraction: float) -> list[list[str]]:
    """Divide the names into ceil(1 / fraction) parts of about equal size; tensors are not split."""
    # 1 / (1 / 49) is a little more than 49, and must not make 50 parts.
    count = math.ceil(1 / fraction - 1e-9)
    total, done = sum(spec.size for spec in specs), 0
    names: list[list[str]] = [[] for _ in range(count)]
    for spec in specs:
        names[min(count - 1, done * count // total)].append(spec.name)
        done += spec.size
    return [part for part in names if part]


class Partial(RankAveraging):
    def __init__(self, frontend: Parameters, exchange: Exchange, fraction: float) -> None:
        super().__init__(frontend, exchange)
        self.fraction = fraction

    def due(self, specs: Sequence[TensorSpec], step: int) -> list[str]:
        cycle = parts(specs, self.fraction)
        return cycle[(step - 1) % len(cycle)]
