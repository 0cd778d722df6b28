"""Local SGD: average all weights every ``steps`` steps (Stich 2019, "Local SGD Converges Fast ...")."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_train.protocol import Exchange, Parameters, TensorSpec
from hvd_train.update.rank_averaging import RankAveraging


class LocalSGD(RankAveraging):
    def __init__(self, frontend: Parameters, exchange: Exchange, steps: int) -> None:
        super().__init__(frontend, exchange)
        self.steps = steps

    def due(self, specs: Sequence[TensorSpec], step: int) -> list[str]:
        return [spec.name for spec in specs] if step % self.steps == 0 else []
