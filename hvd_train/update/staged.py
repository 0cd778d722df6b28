"""The exchange of one pipeline stage: tied weights, and the norm of the whole gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from hvd_train.protocol import Parameters, State, Tensor
from hvd_train.update.exchange import Exchange, Started
from hvd_train.update.replicated import Replicated


class StagedParameters(Parameters, Protocol):
    """The parameters of a stage (frontends/stages/frontend.py)."""

    stages: int
    stage: int
    ties: Sequence[tuple[int, tuple[int, ...]]]  # (index into specs, stages that hold the tensor)

    def joined(self, x: Tensor, stages: Sequence[int], word: str) -> Tensor:
        """Sum ``x`` over some stages, in their order."""


class StagedExchange(Exchange):
    """The exchange of one stage's part of the model over the replicas.

    The gradient of a tied weight is first summed over the ranks of each stage, then over its stages in order. So all
    stages update their copies with the same bits.
    """

    def __init__(self, whole: Exchange, frontend: StagedParameters) -> None:
        self.__dict__.update(whole.__dict__)
        self._frontend = frontend
        self.clip = replace(self.clip, total=self._total)
        self._of_other_stages: Any = 0.0

    def _received(self, started: Sequence[Started]) -> tuple[list[Tensor], list[State]]:
        gradients, states = super()._received(started)
        ties = self._frontend.ties
        if ties:
            tensors = self.from_buckets(gradients)
            for i, stages in ties:
                tensors[i] = self._frontend.joined(tensors[i], stages, f"tied {self._specs[i].name}")
            twice = [tensors[i] for i, stages in ties if stages[0] != self._frontend.stage]
            self._of_other_stages = sum(self.ops.sum_of_squares(x) for x in twice)
            gradients = self.to_buckets(tensors)
        return gradients, states

    def _total(self, squares: Tensor) -> Tensor:
        """Sum the squares of the gradients of all stages; each tied weight counts once."""
        local = self.ops.reshape(squares - self._of_other_stages, (1,))
        total = self._frontend.joined(local, range(self._frontend.stages), "gradient norm")
        return self.ops.reshape(total, ())


class Staged(Replicated):
    """The update of one pipeline stage, over the ranks that hold the same part of the model."""

    def __init__(self, frontend: StagedParameters, exchange: Exchange) -> None:
        super().__init__(frontend, StagedExchange(exchange, frontend))
