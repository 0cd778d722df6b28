"""Local training with averages of the weights over the ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

from hvd_train.protocol import Parameters, Replica, TensorSpec
from hvd_train.update.local_update import LocalUpdate


class AveragedParameters(Parameters, Replica, Protocol):
    """Parameters that can be averaged over the ranks."""


class RankAveraging(LocalUpdate):
    """Local training that averages weights now and then; a subclass says which ones after which step.

    The mean of the ranks' weights is evaluated and saved.
    """

    frontend: AveragedParameters

    @abstractmethod
    def due(self, specs: Sequence[TensorSpec], step: int) -> Sequence[str]:
        """Return the names of the weights to average after step number ``step`` (from 1)."""

    def after_step(self, step: int, samples: int) -> None:
        specs = self.frontend.specs()
        names = self.due(specs, step)
        if names:
            self.frontend.average(names)
        self.diverged = len(names) < len(specs)

    def _load_common_weights(self) -> None:
        self.frontend.average([spec.name for spec in self.frontend.specs()])
