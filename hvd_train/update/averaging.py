"""Each rank trains by its local gradients; now and then weights are averaged."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np

from hvd_train.protocol import Entry, Exchange, FrontEnd, Placement, TensorSpec
from hvd_train.update.replicated import Replicated


class Averaging(Replicated, ABC):
    """An update over this rank alone, and a mean of weights now and then. A subclass says which ones after which step.

    The optimizer's slots differ between ranks. A checkpoint keeps those of each rank, and rank 0's for a run that goes
    on with another number of ranks.
    """

    def __init__(self, frontend: FrontEnd, exchange: Exchange) -> None:
        super().__init__(frontend, exchange, local_gradients=True)
        self.diverged = False

    @abstractmethod
    def due(self, specs: Sequence[TensorSpec], step: int) -> Sequence[str]:
        """Return the names of the weights to average after step number ``step`` (from 1)."""

    def after_step(self, step: int) -> None:
        self.diverged = True
        names = self.due(self.frontend.specs(), step)
        if names:
            self.frontend.average(names)

    def converge(self) -> None:
        self.frontend.average()
        self.diverged = False

    def state(self) -> list[Entry]:
        # The slots stand twice: rank 0's, for another number of ranks, and those of each rank.
        return [*super().state(), *self._slots(Placement.PER_RANK)]

    def load(self, tree: Mapping[str, np.ndarray], placement: Placement) -> None:
        super().load(tree, placement)
        if placement is Placement.PER_RANK:
            self.optimizer.load(tree)
