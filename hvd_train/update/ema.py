"""An exponential mean of the weights (EMA).

Polyak and Juditsky 1992; the recursion is that of torch.optim.swa_utils.get_ema_multi_avg_fn and of Keras' use_ema.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvd_train.protocol import OF_EXCHANGE, Tensor
from hvd_train.update.average import Average, Number


class ExponentialMean(Average):
    """The mean a of the weights w: a = decay a + (1 - decay) w after each ``every`` steps.

    a begins as w. Steps in which the optimizer moves nothing do not count. The mean is kept in the type of the weights.
    """

    def __init__(self, *arguments: Any, decay: float, every: int) -> None:
        super().__init__(*arguments)
        self.decay, self.every = decay, every
        self._means = [self._ops.keep(self._ops.to_numpy(x)) for x in self._first()]
        self._steps = self._ops.keep_number(0)  # since the mean moved

    def step(self, gradients: Sequence[Tensor], learning_rate: Any) -> None:
        self._optimizer.step(gradients, learning_rate)
        if self.every == 1:
            self._move()
            return
        # Counted in a cell: a graph runs several steps in one call.
        steps = self._steps.read() + 1
        self._ops.do_if(steps >= self.every, self._move)
        self._steps.write(steps % self.every)

    def _move(self) -> None:
        for bucket, cell in enumerate(self._means):
            cell.write(self._ops.lerp(cell.read(), self._here(bucket), 1 - self.decay))

    def global_weights(self) -> list[Tensor]:
        return [cell.read() for cell in self._means]

    def begin_average(self) -> None:
        for cell, x in zip(self._means, self._first(), strict=True):
            # Copied: TensorFlow's tensors may lie in memory that ranks share.
            cell.write(self._ops.from_numpy(self._ops.to_numpy(x)))

    def _numbers(self) -> Mapping[str, Number]:
        steps = Number(lambda: np.array(int(self._steps.read())), lambda x: self._steps.write(int(x)))
        return {f"{OF_EXCHANGE}average_steps": steps} if self.every > 1 else {}
