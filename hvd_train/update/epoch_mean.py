"""Stochastic weight averaging (SWA): the mean of the weights of the last epochs.

Izmailov et al. 2018, "Averaging Weights Leads to Wider Optima and Better Generalization".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvd_train.protocol import EXCHANGE_PREFIX, Tensor
from hvd_train.update.replicated import Replicated
from hvd_train.update.weight_average import Number, WeightAverage


class EpochMean(WeightAverage):
    """The plain mean of the weights at the ends of the last ``epochs`` epochs, ready when the training has ended.

    It has ``count`` epochs so far, the latest of which is number ``last`` (from 1). A run that is resumed for more
    epochs begins a new mean if this one holds an epoch that is no longer among the last ``epochs``.
    """

    needs_statistics = True

    def __init__(self, update: Replicated, *, epochs: int) -> None:
        super().__init__(update)
        self.epochs, self.count, self.last, self._finished = epochs, 0, 0, False
        self._means = [self._ops.keep(np.zeros_like(self._ops.to_numpy(x))) for x in self._weights.read()]

    @property
    def ready(self) -> bool:
        return self._finished and self.count > 0

    def step(self, gradients: Sequence[Tensor], learning_rate: Any) -> None:
        self._update_weights(gradients, learning_rate)

    def end_epoch(self, epoch: int, epochs: int) -> None:
        # The end of an epoch is repeated if its evaluation was interrupted.
        if self.count and self.last == epoch:
            return
        first = epochs - self.epochs + 1
        if self.last != epoch - 1 or self.last - self.count + 1 < first:
            self.count = 0
        if epoch >= first:
            self.count, self.last = self.count + 1, epoch
            for cell, x in zip(self._means, self._copies(), strict=True):
                if self.count > 1:
                    self._ops.move_towards([cell], [x], 1 / self.count)
                else:
                    cell.write(x)

    def end_training(self) -> bool:
        before, self._finished = self.ready, True
        return self.ready and not before

    def note(self) -> str:
        if not self._finished:
            return ""
        if not self.count:
            return "swa: the run ended before the first epoch of the mean; it has the weights of its last step"
        if self.count == 1:
            return f"swa: the weights are those after epoch {self.last}, the only one among the last {self.epochs}"
        first = self.last - self.count + 1
        return f"swa: the weights are the mean of those after epochs {first} to {self.last}"

    def global_weights(self) -> list[Tensor]:
        return [cell.read() for cell in self._means]

    def begin_average(self) -> None:
        self._finished = False
        self.take_average(self._copies())

    def take_average(self, averages: Sequence[Tensor]) -> None:
        for cell, x in zip(self._means, averages, strict=True):
            cell.write(x)

    def _copies(self) -> list[Tensor]:
        # TensorFlow's tensors may lie in memory that ranks share.
        return [self._ops.from_numpy(self._ops.to_numpy(x)) for x in self._weights.read()]

    def numbers(self) -> Mapping[str, Number]:
        return {f"{EXCHANGE_PREFIX}mean_{name}": self._number(name) for name in ("count", "last")}

    def _number(self, name: str) -> Number:
        return Number(lambda: np.array(getattr(self, name), np.int64), lambda x: setattr(self, name, int(x)))
