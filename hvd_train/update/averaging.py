"""Each rank trains by its own gradients; now and then weights are averaged."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hvd_train.protocol import Communicator, Exchange, FrontEnd, TensorSpec, Tree


class Averaging(ABC):
    """A subclass says which weights after which step. The optimizer's slots are each rank's own."""

    own_gradients = True

    def __init__(self) -> None:
        self.diverged = False

    @abstractmethod
    def due(self, specs: Sequence[TensorSpec], step: int) -> Sequence[str]:
        """Names of the weights to average after step number ``step`` (from 1)."""

    def exchange(self, build: Callable[[Communicator], Exchange], world: Communicator, alone: Communicator) -> Exchange:
        return build(alone)

    def stepped(self, frontend: FrontEnd, step: int) -> None:
        self.diverged = True
        names = self.due(frontend.specs(), step)
        if names:
            frontend.average(names)

    def converge(self, frontend: FrontEnd) -> None:
        frontend.average()
        self.diverged = False

    def local_state(self, frontend: FrontEnd) -> Tree:
        return {key: x for key, x in frontend.state().items() if key.startswith("slots/")}

    def load_local(self, frontend: FrontEnd, tree: Mapping[str, np.ndarray]) -> None:
        frontend.load({key: x for key, x in tree.items() if key.startswith("slots/")})
