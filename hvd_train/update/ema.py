"""An exponential mean of the weights (EMA).

Polyak and Juditsky 1992; the recursion is that of torch.optim.swa_utils.get_ema_multi_avg_fn and of Keras' use_ema.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hvd_train.protocol import EXCHANGE_PREFIX, Tensor
from hvd_train.update.replicated import Replicated
from hvd_train.update.weight_average import Number, WeightAverage


class ExponentialMean(WeightAverage):
    """The mean a of the weights w: a = decay a + (1 - decay) w after each ``every`` steps.

    a begins as w. Steps that leave the weights unchanged do not count. The mean has the type of the weights.
    """

    def __init__(self, update: Replicated, *, decay: float, every: int) -> None:
        super().__init__(update)
        self.decay, self.every = decay, every
        # A cell for each part of a tensor: to concatenate a bucket's weights would take a copy.
        self._sizes = [[math.prod(part.shape) for part in self._parts(b)] for b, _ in enumerate(self._weights.read())]
        self._means = [[self._ops.keep(x) for x in parts] for parts in self._cut()]
        self._steps = self._ops.keep_number(0)  # since the mean was updated

    def step(self, gradients: Sequence[Tensor], learning_rate: Any) -> None:
        self._update_weights(gradients, learning_rate)
        if self.every == 1:
            self._move()
            return
        # Counted in a cell: a graph runs several steps in one call.
        steps = self._steps.read() + 1
        self._ops.do_if(steps >= self.every, self._move)
        self._steps.write(steps % self.every)

    def _move(self) -> None:
        for bucket, cells in enumerate(self._means):
            self._ops.move_towards(cells, self._parts(bucket), 1 - self.decay)

    def _parts(self, bucket: int) -> list[Tensor]:
        return [block for part in self._weights.parts(bucket) for block in self._ops.blocks(part)]

    def global_weights(self) -> list[Tensor]:
        return [self._ops.concat([cell.read() for cell in cells]) for cells in self._means]

    def begin_average(self) -> None:
        for cells, parts in zip(self._means, self._cut(), strict=True):
            for cell, x in zip(cells, parts, strict=True):
                cell.write(self._ops.from_numpy(x))

    def _cut(self) -> Iterator[list[np.ndarray]]:
        """Copy the weights that this rank updates, (n,) for each part of each bucket."""
        for sizes, x in zip(self._sizes, self._weights.read(), strict=True):
            # Copied: TensorFlow's tensors may lie in memory that ranks share.
            yield np.split(self._ops.to_numpy(x), np.cumsum(sizes)[:-1])

    def numbers(self) -> Mapping[str, Number]:
        steps = Number(lambda: np.array(int(self._steps.read())), lambda x: self._steps.write(int(x)))
        return {f"{EXCHANGE_PREFIX}average_steps": steps} if self.every > 1 else {}
