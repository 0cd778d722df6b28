"""The base class of averages of the weights over time, which are evaluated and saved instead of the weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvd_train.protocol import Tensor
from hvd_train.update.replicated import Replicated


class Number(NamedTuple):
    """Access to a number that an average keeps between steps, an array of shape ()."""

    read: Callable[[], np.ndarray]
    write: Callable[[np.ndarray], None]


class WeightAverage(ABC):
    """An average of the weights of ``update``. Weights and averages are flat, (n,) for each bucket."""

    def __init__(self, update: Replicated) -> None:
        self._ops = update.frontend.ops
        self._optimizer: Any = update.optimizer
        self._update_weights, self._weights = update.update_weights, update.owned

    needs_statistics = False  # whether running statistics must be gathered for the averages

    @property
    def ready(self) -> bool:
        """Return whether the averages are now evaluated and saved instead of the weights."""
        return True

    @abstractmethod
    def step(self, gradients: Sequence[Tensor], learning_rate: Any) -> None:
        """Update the weights, the optimizer state and the averages."""

    @abstractmethod
    def global_weights(self) -> Sequence[Tensor]:
        """Return the averages of the weights that this rank updates, (n,) for each bucket; between steps."""

    def begin_average(self) -> None:  # noqa: B027  some are functions of weights and slots
        """Restart, with the model's weights as the averages."""

    def take_average(self, averages: Sequence[Tensor]) -> None:  # noqa: B027  most are always ready
        """Load the averages, as ``global_weights`` returned them, from a checkpoint in which they were not ready."""

    def end_epoch(self, epoch: int, epochs: int) -> None:  # noqa: B027  most count steps
        """Handle the end of epoch number ``epoch`` (from 1) of ``epochs``."""

    def end_training(self) -> bool:
        """Handle the end of the training; return whether it made the averages ready."""
        return False

    def note(self) -> str:
        """Return a message for the user after an epoch; empty: none."""
        return ""

    def numbers(self) -> Mapping[str, Number]:
        """Return the numbers that a checkpoint keeps, by their names in it."""
        return {}

    def load_numbers(self, tree: Mapping[str, np.ndarray]) -> None:
        for name, number in self.numbers().items():
            if name in tree:
                number.write(np.asarray(tree[name]))
