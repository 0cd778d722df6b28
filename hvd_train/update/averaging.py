"""Each rank trains by its local gradients; now and then weights are averaged."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from hvd_train.protocol import Entry, Exchange, FrontEnd, Placement, TensorSpec, Tree
from hvd_train.update.replicated import Replicated
from hvd_train.update.state import weight_names, weights


class Averaging(Replicated, ABC):
    """An update over this rank alone, and a mean of weights now and then. A subclass says which ones after which step.

    What the training stands for is the mean of the ranks' weights. An evaluation or a checkpoint takes it for a while,
    and then each rank goes on with its weights: how often either happens changes no number.

    The optimizer's slots differ between ranks. A checkpoint keeps those of each rank and each rank's weights, and the
    mean of the weights and rank 0's slots for a run that goes on with another number of ranks.
    """

    def __init__(self, frontend: FrontEnd, exchange: Exchange) -> None:
        super().__init__(frontend, exchange, local_gradients=True)
        self.diverged = False
        self._local: Tree = {}  # this rank's weights, while the model has their mean

    @abstractmethod
    def due(self, specs: Sequence[TensorSpec], step: int) -> Sequence[str]:
        """Return the names of the weights to average after step number ``step`` (from 1)."""

    def after_step(self, step: int, samples: int) -> None:
        specs = self.frontend.specs()
        names = self.due(specs, step)
        if names:
            self.frontend.average(names)
        self.diverged = len(names) < len(specs)

    def take_global_weights(self) -> None:
        if self.diverged:
            self._local = weights(self.frontend)
            self.frontend.average([spec.name for spec in self.frontend.specs()])
        self.diverged = False

    def take_local_weights(self) -> None:
        self.frontend.load(self._local)
        self.diverged, self._local = bool(self._local), {}

    def state(self) -> list[Entry]:
        # The slots stand twice: rank 0's, for another number of ranks, and those of each rank.
        slots = self._slots(Placement.PER_RANK)
        # None where the ranks have the same weights.
        local = [Entry(name, Placement.PER_RANK, partial(self._local.__getitem__, name)) for name in self._local]
        return [*super().state(), *slots, *local]

    def load(self, tree: Mapping[str, np.ndarray], placement: Placement) -> None:
        super().load(tree, placement)
        if placement is Placement.PER_RANK:
            self.optimizer.load(tree)
            self.frontend.load(tree)
            self.diverged = bool(tree.keys() & weight_names(self.frontend))
