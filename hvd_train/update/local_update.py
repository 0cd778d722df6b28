"""Local training: each rank steps by its own gradients, and the weights are synchronized now and then."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial

import numpy as np

from hvd_train.protocol import Entry, Exchange, Parameters, Placement, Tree
from hvd_train.update.replicated import Replicated
from hvd_train.update.state import weight_names, weights


class LocalUpdate(Replicated, ABC):
    """The base of updates by local gradients; a subclass defines the common weights and when ranks synchronize.

    An evaluation or a checkpoint uses the common weights for a while; then each rank continues with its own. So how
    often either happens changes no result.

    The optimizer state differs between ranks. A checkpoint keeps each rank's weights and optimizer state, and for a
    run on another number of ranks the common weights and rank 0's optimizer state.
    """

    def __init__(self, frontend: Parameters, exchange: Exchange) -> None:
        super().__init__(frontend, exchange)
        self.diverged, self.local_gradients = False, True
        self._local: Tree = {}  # this rank's weights, while the model holds the common ones

    @abstractmethod
    def _load_common_weights(self) -> None:
        """Load the weights that are evaluated and saved into the model; all ranks call it."""

    def take_global_weights(self) -> None:
        if self.diverged:
            self._local = weights(self.frontend)
            self._load_common_weights()
        self.diverged = False

    def take_local_weights(self) -> None:
        self.frontend.load(self._local)
        self.diverged, self._local = bool(self._local), {}

    def state(self) -> list[Entry]:
        # The optimizer state is saved twice: rank 0's, for another number of ranks, and each rank's.
        slots = self._slots(Placement.PER_RANK)
        # None if the ranks have the same weights.
        local = [Entry(name, Placement.PER_RANK, partial(self._local.__getitem__, name)) for name in self._local]
        return [*super().state(), *slots, *local]

    def load(self, tree: Mapping[str, np.ndarray], placement: Placement) -> None:
        super().load(tree, placement)
        if placement is Placement.PER_RANK:
            self.optimizer.load(tree)
            self.frontend.load(tree)
            self._local = {}
            self.diverged = bool(tree.keys() & weight_names(self.frontend))
