"""Local training: each rank steps by its own gradients, and now and then the weights are joined."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial

import numpy as np

from hvd_train.protocol import Entry, Exchange, Parameters, Placement, Tree
from hvd_train.update.replicated import Replicated
from hvd_train.update.state import weight_names, weights


class LocalUpdate(Replicated, ABC):
    """An update over this rank alone; a subclass says what the ranks' weights have in common, and when they join.

    An evaluation or a checkpoint takes the common weights for a while, and then each rank goes on with its weights:
    how often either happens changes no number.

    The optimizer's slots differ between ranks. A checkpoint keeps those of each rank and each rank's weights, and the
    common weights and rank 0's slots for a run that goes on with another number of ranks.
    """

    def __init__(self, frontend: Parameters, exchange: Exchange) -> None:
        super().__init__(frontend, exchange)
        self.diverged, self.local_gradients = False, True
        self._local: Tree = {}  # this rank's weights, while the model has the common ones

    @abstractmethod
    def _load_common_weights(self) -> None:
        """Give the model the weights that are evaluated and saved; all ranks call it."""

    def take_global_weights(self) -> None:
        if self.diverged:
            self._local = weights(self.frontend)
            self._load_common_weights()
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
            self._local = {}
            self.diverged = bool(tree.keys() & weight_names(self.frontend))
