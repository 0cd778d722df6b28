"""What front-ends with pipeline stages share: the order of forward and backward passes, and a stage's blocks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_train.errors import ConfigError
from hvd_train.frontends.stages.in_blocks import InBlocks
from hvd_train.frontends.stages.links import Message
from hvd_train.frontends.stages.schedule import turns
from hvd_train.protocol import Scale, StageLinks, Tree


@dataclass
class Micro:
    """A micro-batch of a step. The last stage fills ``sums`` after the forward pass."""

    placed: Any
    scale: Scale
    seed: int
    sums: Any


class StagedFrontEnd(InBlocks):
    """A front-end whose rank holds consecutive blocks of the model; mixed in before the framework's class.

    ``train_step`` runs all micro-batches collected since the last one. Gradients are added in the order of the
    micro-batches, so the numbers are those of one process that accumulates them.
    """

    # (index into specs, stages that hold the tensor) of weights shared by several stages.
    ties: Sequence[tuple[int, tuple[int, ...]]] = ()

    def _begin_stages(self, links: StageLinks | None) -> None:
        assert links is not None
        self.links, self.stage, self.stages = links, links.stage, links.size
        self.first, self.last = self.stage == 0, self.stage == self.stages - 1
        self._micros: list[Micro] = []
        # {key: an array of its shape that takes no memory} of the whole model.
        self.whole: Tree = {}
        for prefix, tensors in (("weights", self._trainable), ("statistics", self._fixed)):
            layouts = [self.layouts[name] for name in tensors]
            self.whole |= {f"{prefix}/{one.name}": np.broadcast_to(0.0, one.shape) for one in layouts}

    # ---- setting up the blocks

    @abstractmethod
    def _keep_blocks(self, first: int, last: int) -> None:
        """Keep the blocks from ``first`` to ``last`` - 1, and free all others."""

    def take_split(self, split: Sequence[int]) -> None:
        """Keep this rank's blocks; ``split``: the number of blocks of each stage."""
        holders = self._holders(split)
        empty = [k for k in range(self.stages) if not any(k in holders[name] for name in self._trainable)]
        if empty:
            what = f"stage {empty[0]} has no trainable weight"
            raise ConfigError(what, where=f"parallel.split: {[*split]}", fix="give it another block")
        first = sum(split[: self.stage])
        self._trainable = {n: x for n, x in self._trainable.items() if self.stage in holders[n]}
        self._fixed = {n: x for n, x in self._fixed.items() if self.stage in holders[n]}
        held = [tuple(sorted(holders[name])) for name in self._trainable]
        self.ties = [(i, stages) for i, stages in enumerate(held) if len(stages) > 1]
        self._keep_blocks(first, first + split[self.stage])

    # ---- during a step

    @abstractmethod
    def _forward_stage(self, micro: Micro, x: Any) -> tuple[Any, Any]:
        """Return the stage's output and what its backward pass needs; ``x``: the input, None on the first stage.

        On the last stage the output is the sums, and the second value includes the loss.
        """

    @abstractmethod
    def _backward_stage(self, kept: Any, gradient: Any) -> Any:
        """Add the gradients of the stage's weights; return the input's. ``gradient``: None on the last stage."""

    @abstractmethod
    def _finish_step(self, learning_rate: float, unscale: float) -> None:
        """Exchange the gradients, and update the weights."""

    @abstractmethod
    def _evaluate_stage(self, placed: Any, x: Any) -> Any:
        """Return the stage's output in evaluation mode, or on the last stage the sums."""

    @abstractmethod
    def _pack(self, x: Any) -> Message: ...

    @abstractmethod
    def _unpack(self, message: Message) -> Any: ...

    @abstractmethod
    def _no_sums(self) -> Any:
        """Return sums of zeros, to be filled by ``_fill``."""

    @abstractmethod
    def _fill(self, sums: Any, values: Any) -> None: ...

    def add_gradients(self, placed: Any, scale: Scale, seed: int) -> Any:
        self._micros.append(Micro(placed, scale, seed, self._no_sums()))
        return self._micros[-1].sums

    def train_step(self, placed: Any, scale: Scale, seed: int, learning_rate: float, unscale: float = 1.0) -> Any:
        sums = self.add_gradients(placed, scale, seed)
        micros, self._micros = self._micros, []
        kept: dict[int, Any] = {}
        for turn in turns(self.config.parallel.schedule, self.stages, len(micros), self.stage):
            micro, word = micros[turn.micro], str(turn)
            if turn.forward:
                output, kept[turn.micro] = self._forward_stage(micro, self._receive(-1, word))
                if self.last:
                    self._fill(micro.sums, output)
                else:
                    self._send(1, word, output)
            else:
                gradient = self._backward_stage(kept.pop(turn.micro), self._receive(1, word))
                self._send(-1, word, gradient)
        self._finish_step(learning_rate, unscale)
        return sums

    def _receive(self, side: int, word: str) -> Any:
        """Receive from the previous (-1) or next (1) stage; None if there is none."""
        other = self.stage + side
        return self._unpack(self.links.receive(other, word)) if 0 <= other < self.stages else None

    def _send(self, side: int, word: str, x: Any) -> None:
        other = self.stage + side
        if 0 <= other < self.stages:
            self.links.send(other, word, self._pack(x))

    def evaluate_batch(self, placed: Any) -> Any:
        output = self._evaluate_stage(placed, self._receive(-1, "evaluation"))
        if self.last:
            return output
        self._send(1, "evaluation", output)
        return self._no_sums()

    def predict(self, placed: Any) -> Any:
        raise ConfigError("no rank has the whole model", where="parallel.pipeline", fix="predict with the checkpoint")

    def _measure_error(self, placed: Any, scale: Scale, seed: int) -> Any:
        raise NotImplementedError  # the configuration rejects this

    def waited(self, fresh: bool = True) -> float:
        return super().waited(fresh) + self.links.waited

    # ---- called by the update

    @abstractmethod
    def joined(self, x: Any, stages: Sequence[int], word: str) -> Any:
        """Return the sum of ``x`` over some stages, in their order; called eagerly or while a graph is traced."""
