"""The part of a front-end with pipeline stages that knows no framework: a step's turns, and what a stage keeps."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvd_train.config import Config
from hvd_train.core.agreement import collectively
from hvd_train.data.order import share
from hvd_train.errors import ConfigError, amount
from hvd_train.frontends.base import StateTree
from hvd_train.frontends.stages.links import Message
from hvd_train.frontends.stages.schedule import turns
from hvd_train.frontends.stages.split import Cost, balanced, listed, stage_of
from hvd_train.protocol import Batch, Sample, Scale, StageLinks, Tree, made_up

TURNS = 3  # of a block that is measured; the fastest counts


@dataclass
class Micro:
    """A micro-batch of a step; ``sums`` is filled where its forward pass has run, on the last stage."""

    placed: Any
    scale: Scale
    seed: int
    sums: Any


class Staged(StateTree):
    """The methods of a front-end whose rank holds some consecutive blocks of the model; comes before the framework's.

    Micro-batches are collected until ``train_step``, which takes them through the stages. Gradients are added in the
    order of the micro-batches, so a step has the numbers of one process that accumulates them.
    """

    config: Config
    UNTAKEN: tuple[type[Exception], ...]  # what a block raises that does not take its input
    _blocks: Sequence[Any]
    stage_table = ""
    # (index into specs, stages that hold the tensor) of weights that several stages use.
    ties: Sequence[tuple[int, tuple[int, ...]]] = ()
    _sample: Sample
    _trainable: dict[str, Any]
    _fixed: dict[str, Any]

    def _begin_stages(self, links: StageLinks | None) -> None:
        assert links is not None
        self.links, self.stage, self.stages = links, links.stage, links.size
        self.first, self.last = self.stage == 0, self.stage == self.stages - 1
        self._micros: list[Micro] = []
        # {key: an array of the shape, without memory} of the whole model.
        self.whole: Tree = {}
        for prefix, tensors in (("weights", self._trainable), ("statistics", self._fixed)):
            layouts = [self.layouts[name] for name in tensors]
            self.whole |= {f"{prefix}/{one.name}": np.broadcast_to(0.0, one.shape) for one in layouts}

    # ---- the blocks, once

    @abstractmethod
    def check_blocks(self) -> None:
        """Raise ConfigError if a block takes or gives anything but one tensor of numbers."""

    @abstractmethod
    def _title(self, block: Any) -> str:
        """Return the name of a block for messages."""

    @abstractmethod
    def _check_between(self, x: Any, block: str, where: str) -> None:
        """Raise ConfigError if ``x``, the output of ``block``, is not one tensor of floating-point numbers."""

    def _in_turn(self, x: Any, each: Callable[[int, Any, Any], Any]) -> None:
        """Run the blocks in turn by ``each(number, block, input)``; ``x``: the input of the first."""
        where = f"model.name: {self.config.model.name}"
        for number, block in enumerate(self._blocks):
            title = f"block {number} ({self._title(block)})"
            try:
                x = each(number, block, x)
            except self.UNTAKEN as error:
                if number == 0:
                    raise
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                what = f"{title} does not take the one tensor of the block before it: {reason}"
                fix = "let each block take one tensor, the output of the one before it"
                raise ConfigError(what, where=where, fix=fix) from error
            if number < len(self._blocks) - 1:
                self._check_between(x, title, where)

    def _costs(self, seconds: Sequence[float], weights: Sequence[int], activations: Sequence[int]) -> list[Cost]:
        titles = [f"{self._title(block)} {number}" for number, block in enumerate(self._blocks)]
        return [Cost(*row) for row in zip(titles, seconds, weights, activations, strict=True)]

    @abstractmethod
    def costs(self, batch: Batch) -> list[Cost]:
        """Measure each block, forward and backward; nothing of the model changes."""

    @abstractmethod
    def _names_of_blocks(self) -> list[set[str]]:
        """Return the native names of the tensors of each block."""

    @abstractmethod
    def _cut(self, first: int, last: int) -> None:
        """Keep the blocks from ``first`` up to ``last``, and free all others."""

    def keep_stage(self, split: Sequence[int]) -> None:
        """Keep this rank's blocks; ``split``: how many each stage has."""
        names, stage_of_block = self._names_of_blocks(), stage_of(split)
        holders: dict[str, set[int]] = {}
        for tensors, stage in zip(names, stage_of_block, strict=True):
            for name in tensors:
                holders.setdefault(name, set()).add(stage)
        where = f"model.name: {self.config.model.name}"
        left = [name for name in (*self._trainable, *self._fixed) if name not in holders]
        if left:
            what = f"{', '.join(left[:8])} is in no block of the model"
            raise ConfigError(what, where=where, fix="use all weights in the blocks")
        twice = [name for name in self._fixed if len(holders[name]) > 1]
        if twice:
            what = f"blocks of several stages change {', '.join(twice[:8])}"
            raise ConfigError(what, where=where, fix="choose parallel.split such that one stage has these blocks")
        empty = [k for k in range(self.stages) if not any(k in holders[name] for name in self._trainable)]
        if empty:
            what = f"stage {empty[0]} has no trainable weight"
            raise ConfigError(what, where=f"parallel.split: {[*split]}", fix="give it another block")
        first = sum(split[: self.stage])
        self._trainable = {n: x for n, x in self._trainable.items() if self.stage in holders[n]}
        self._fixed = {n: x for n, x in self._fixed.items() if self.stage in holders[n]}
        held = [tuple(sorted(holders[name])) for name in self._trainable]
        self.ties = [(i, stages) for i, stages in enumerate(held) if len(stages) > 1]
        self._cut(first, first + split[self.stage])

    # ---- within a step

    @abstractmethod
    def _forward_stage(self, micro: Micro, x: Any) -> tuple[Any, Any]:
        """Return the stage's output and what its backward pass needs; ``x``: the input, None on the first stage.

        On the last stage the output is the sums, and what is kept includes the loss.
        """

    @abstractmethod
    def _backward_stage(self, kept: Any, gradient: Any) -> Any:
        """Add the gradients of the stage's weights; return that of its input. ``gradient``: None on the last stage."""

    @abstractmethod
    def _finish_step(self, learning_rate: float, unscale: float) -> None:
        """Exchange the gradients, and move the weights."""

    @abstractmethod
    def _evaluate_stage(self, placed: Any, x: Any) -> Any:
        """Return the stage's output in evaluation, on the last stage the sums."""

    @abstractmethod
    def _pack(self, x: Any) -> Message: ...

    @abstractmethod
    def _unpack(self, message: Message) -> Any: ...

    @abstractmethod
    def _no_sums(self) -> Any:
        """Return sums of zeros, which ``_fill`` can change."""

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
        """Receive from the stage before (-1) or behind (1); None where there is none."""
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
        raise NotImplementedError  # refused by the configuration

    def waited(self) -> float:
        return super().waited() + self.links.waited

    # ---- for the update

    @abstractmethod
    def joined(self, x: Any, stages: Sequence[int], word: str) -> Any:
        """Return the sum of ``x`` over some stages, in their order; called eagerly or while a graph is traced."""

    @property
    def counted_here(self) -> Mapping[int, bool]:
        """Return, for each tied weight's index into specs, whether this stage counts it in the gradient's norm."""
        return {i: stages[0] == self.stage for i, stages in self.ties}


def cut(frontend: Any, config: Config) -> Config:
    """Divide the model, which each rank has built whole, into stages; return the configuration with the split.

    All ranks call it. Rank 0 measures.
    """
    world, wanted, stages = frontend.groups.world, config.parallel.split, config.parallel.pipeline

    def measured() -> tuple[list[Cost], list[int]]:
        frontend.check_blocks()
        names = frontend._names_of_blocks()
        if len(names) < stages:
            what = f"{amount(stages, 'stage')} for {amount(len(names), 'block')}"
            fix = f"set parallel.pipeline to at most {len(names)}"
            raise ConfigError(what, where=f"parallel.pipeline: {stages}", fix=fix)
        if wanted != "auto" and sum(wanted) != len(names):
            what = f"{sum(wanted)} blocks, and the model has {len(names)}"
            raise ConfigError(what, where=f"parallel.split: {wanted}", fix="count them all")
        if world.rank:
            return [], []
        global_batch = config.global_batch(frontend.groups.data.size)
        rows = share(share(global_batch, config.micro_batches, 0)[1], frontend.groups.data.size, 0)[1]
        costs = frontend.costs(tiled(made_up(frontend._sample), rows))
        shares = [
            (cost.seconds, float(cost.weights + stages * cost.activations), float(cost.weights)) for cost in costs
        ]
        return costs, balanced(shares, stages) if wanted == "auto" else list(wanted)

    costs, split = collectively(world, measured)
    split = json.loads(world.broadcast_bytes(json.dumps(split).encode()))
    collectively(world, lambda: frontend.keep_stage(split))
    frontend.stage_table = listed(costs, split) if costs else ""
    return config.model_copy(update={"parallel": config.parallel.model_copy(update={"split": split})})


def tiled(batch: Batch, rows: int) -> Batch:
    """Return a batch of ``rows`` samples, those of ``batch`` again and again."""

    def each(fields: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: np.resize(x, (rows, *x.shape[1:])) for name, x in fields.items()}

    weights = np.ones(rows, np.float32)
    return replace(
        batch, inputs=each(batch.inputs), labels=each(batch.labels), weights=weights, indices=np.arange(rows)
    )


def one_tensor(x: Any, block: str, where: str, kind: type, is_floating: Callable[[Any], bool]) -> None:
    """Raise ConfigError if the output of ``block`` is not one tensor of floating-point numbers."""
    if not isinstance(x, kind):
        what = f"{block} gives {type(x).__name__}, and not one tensor"
    elif not is_floating(x):
        what = f"{block} gives whole numbers, through which no gradient flows"
    else:
        return
    raise ConfigError(what, where=where, fix="let each block but the last give one tensor of floating-point numbers")
