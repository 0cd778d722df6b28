"""The base of averages of the weights over time, which are evaluated and saved in place of the weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvd_train.protocol import Tensor
from hvd_train.update.replicated import Replicated


class Number(NamedTuple):
    """A number that an average keeps from step to step, an array of shape ()."""

    read: Callable[[], np.ndarray]
    write: Callable[[np.ndarray], None]


class WeightAverage(ABC):
    """An average of the weights that ``update`` moves. Weights and averages are flat, (n,) for each bucket."""

    def __init__(self, update: Replicated) -> None:
        self._ops = update.frontend.ops
        self._optimizer: Any = update.optimizer
        self._move_weights, self._weights = update.move, update.moved

    needs_statistics = False  # whether running statistics must be gathered for the averages

    @property
    def ready(self) -> bool:
        """Return whether the averages are evaluated and saved in place of the weights now."""
        return True

    @abstractmethod
    def step(self, gradients: Sequence[Tensor], learning_rate: Any) -> None:
        """Move the weights, their slots and the averages."""

    @abstractmethod
    def global_weights(self) -> Sequence[Tensor]:
        """Return (n,) for each bucket: the averages of what this rank moves, between steps."""

    def begin_average(self) -> None:  # noqa: B027  some are functions of weights and slots
        """Begin anew, with the weights that the model has as the averages."""

    def take_average(self, averages: Sequence[Tensor]) -> None:  # noqa: B027  most are always ready
        """Take what ``global_weights`` returned, from a checkpoint of a run whose averages were not ready."""

    def end_epoch(self, epoch: int, epochs: int) -> None:  # noqa: B027  most count steps
        """Do what follows the end of epoch number ``epoch`` (from 1) of ``epochs``."""

    def end_training(self) -> bool:
        """Do what follows the end of the training; return whether the averages have become ready by it."""
        return False

    def note(self) -> str:
        """Return what to tell the user after an epoch; empty: nothing."""
        return ""

    def numbers(self) -> Mapping[str, Number]:
        """Return the single numbers that a checkpoint keeps, by their names there."""
        return {}

    def load_numbers(self, tree: Mapping[str, np.ndarray]) -> None:
        for name, number in self.numbers().items():
            if name in tree:
                number.write(np.asarray(tree[name]))
