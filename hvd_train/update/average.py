"""The base of averages of the weights, for which a training stands in place of the weights that it moves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvd_train.protocol import Entry, Model, Placement, Tensor


class Number(NamedTuple):
    """A number that an average keeps from step to step, an array of shape ()."""

    read: Callable[[], np.ndarray]
    write: Callable[[np.ndarray], None]


class Average(ABC):
    """An optimizer around another one, ``optimizer``. Weights and averages are flat, (n,) for each bucket.

    ``here``: reads the weights of a bucket that this rank moves, within a step, a part for each tensor; ``first``:
    reads those of all buckets, between steps.
    """

    def __init__(
        self,
        frontend: Model,
        optimizer: Any,
        here: Callable[[int], Sequence[Tensor]],
        first: Callable[[], Sequence[Tensor]],
    ) -> None:
        self._ops, self._optimizer, self._here, self._first = frontend.ops, optimizer, here, first

    needs_statistics = False  # whether running statistics must be gathered for the averages

    @property
    def ready(self) -> bool:
        """Return whether the training stands for the averages now."""
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

    def _numbers(self) -> Mapping[str, Number]:
        """Return the single numbers that a checkpoint keeps, by their names there."""
        return {}

    # ---- the optimizer

    def weights(self, bucket: int) -> Tensor:
        return self._optimizer.weights(bucket)

    def parts(self, bucket: int) -> Sequence[Tensor]:
        return self._optimizer.parts(bucket)

    def slot(self, name: str, bucket: int) -> Tensor:
        return self._optimizer.slot(name, bucket)

    def take(self, bucket: int, *what: Any) -> None:
        self._optimizer.take(bucket, *what)

    def views(self) -> Iterable[tuple[str, Callable[[], np.ndarray]]]:
        return [*self._optimizer.views(), *self._readers()]

    def entries(self) -> list[Entry]:
        return [
            *self._optimizer.entries(),
            *(Entry(name, Placement.REPLICATED, read) for name, read in self._readers()),
        ]

    def load(self, tree: Mapping[str, np.ndarray]) -> None:
        self._optimizer.load(tree)
        for name, number in self._numbers().items():
            if name in tree:
                number.write(np.asarray(tree[name]))

    def _readers(self) -> list[tuple[str, Callable[[], np.ndarray]]]:
        return [(name, number.read) for name, number in self._numbers().items()]
