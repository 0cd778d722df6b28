"""What front-ends with blocks share: measuring, splitting and checking the blocks."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hvd_train.config import FrontEndConfig
from hvd_train.core.agreement import collectively
from hvd_train.errors import ConfigError, amount, reason
from hvd_train.frontends.base import StateTree
from hvd_train.frontends.stages.split import Cost, balanced, stage_of
from hvd_train.protocol import Batch, Sample, broadcast_json, made_up

TURNS = 3  # measurements of a block; the fastest counts


class InBlocks(StateTree):
    """A front-end whose model is a list of blocks; mixed in before the framework's class.

    ``PART``: the word for what holds some of the blocks; ``KEY``: the key with the number of parts.
    """

    PART = "stage"
    KEY = "parallel.pipeline"
    UNTAKEN: tuple[type[Exception], ...]  # what a block raises if its input does not fit
    config: FrontEndConfig
    _blocks: Sequence[Any]
    block_costs: Sequence[Cost] = ()  # on rank 0, once the blocks are divided
    _sample: Sample
    _trainable: dict[str, Any]
    _fixed: dict[str, Any]

    @abstractmethod
    def check_blocks(self) -> None:
        """Raise ConfigError unless each block's input and output is one tensor of numbers."""

    @abstractmethod
    def _title(self, block: Any) -> str:
        """Return the name of a block for messages."""

    @abstractmethod
    def _check_between(self, x: Any, block: str, where: str) -> None:
        """Raise ConfigError unless ``x``, the output of ``block``, is one tensor of floating-point numbers."""

    def _in_turn(self, x: Any, each: Callable[[int, Any, Any], Any]) -> None:
        """Run the blocks in order by ``each(number, block, input)``; ``x``: the input of the first."""
        where = f"model.name: {self.config.model.name}"
        for number, block in enumerate(self._blocks):
            title = f"block {number} ({self._title(block)})"
            try:
                x = each(number, block, x)
            except self.UNTAKEN as error:
                if number == 0:
                    raise
                what = f"{title} does not take the one tensor of the block before it: {reason(error)}"
                fix = "let each block take one tensor, the output of the one before it"
                raise ConfigError(what, where=where, fix=fix) from error
            if number < len(self._blocks) - 1:
                self._check_between(x, title, where)

    def _costs(self, seconds: Sequence[float], weights: Sequence[int], activations: Sequence[int]) -> list[Cost]:
        titles = [f"{self._title(block)} {number}" for number, block in enumerate(self._blocks)]
        return [Cost(*row) for row in zip(titles, seconds, weights, activations, strict=True)]

    @abstractmethod
    def costs(self, batch: Batch) -> list[Cost]:
        """Measure each block, forward and backward, without changing the model."""

    @abstractmethod
    def _names_of_blocks(self) -> list[set[str]]:
        """Return the native names of the tensors of each block."""

    @abstractmethod
    def take_split(self, split: Sequence[int]) -> None:
        """Assign each part its blocks; ``split``: the number of blocks of each."""

    def _holders(self, split: Sequence[int]) -> dict[str, set[int]]:
        """Return {native name of a tensor: parts that hold it}. Raises ConfigError for an impossible split."""
        names, part_of_block = self._names_of_blocks(), stage_of(split)
        holders: dict[str, set[int]] = {}
        for tensors, part in zip(names, part_of_block, strict=True):
            for name in tensors:
                holders.setdefault(name, set()).add(part)
        where = f"model.name: {self.config.model.name}"
        left = [name for name in (*self._trainable, *self._fixed) if name not in holders]
        if left:
            what = f"{', '.join(left[:8])} is in no block of the model"
            raise ConfigError(what, where=where, fix="use all weights in the blocks")
        twice = [name for name in self._fixed if len(holders[name]) > 1]
        if twice:
            what = f"{', '.join(twice[:8])}: frozen weights or statistics that blocks of several {self.PART}s use"
            raise ConfigError(
                what, where=where, fix=f"choose parallel.split such that one {self.PART} has these blocks"
            )
        return holders


def check_count(wanted: Sequence[int] | str, blocks: int, parts: int, part: str, key: str) -> None:
    """Raise ConfigError if there are more parts than blocks, or if the split ``wanted`` misses some blocks."""
    if blocks < parts:
        what = f"{amount(parts, part)} for {amount(blocks, 'block')}"
        raise ConfigError(what, where=f"{key}: {parts}", fix=f"set {key} to at most {blocks}")
    if not isinstance(wanted, str) and sum(wanted) != blocks:
        what = f"{sum(wanted)} blocks, and the model has {blocks}"
        raise ConfigError(what, where=f"parallel.split: {wanted}", fix="count them all")


def divide(frontend: InBlocks, parts: int, global_batch: int) -> list[int]:
    """Divide the model, which each rank has built as a whole, into ``parts``; return the number of blocks of each.

    All ranks call it. Rank 0 measures the blocks on its share of ``global_batch`` samples.
    """
    config, world = frontend.config, frontend.groups.world
    wanted = config.parallel.split

    def measured() -> tuple[list[Cost], list[int]]:
        frontend.check_blocks()
        names = frontend._names_of_blocks()
        check_count(wanted, len(names), parts, frontend.PART, frontend.KEY)
        if world.rank:
            return [], []
        # The rows of the longest part of a micro-batch.
        rows = math.ceil(math.ceil(global_batch / config.micro_batches) / frontend.groups.data.size)
        costs = frontend.costs(tiled(made_up(frontend._sample), rows))
        live = config.parallel.pipeline  # micro-batches whose activations are kept
        shares = [(cost.seconds, float(cost.weights + live * cost.activations), float(cost.weights)) for cost in costs]
        return costs, balanced(shares, parts) if wanted == "auto" else list(wanted)

    costs, split = collectively(world, measured)
    split = broadcast_json(world, split)
    collectively(world, lambda: frontend.take_split(split))
    frontend.block_costs = costs
    return split


def tiled(batch: Batch, rows: int) -> Batch:
    """Return a batch of ``rows`` samples, by repeating those of ``batch``."""

    def each(fields: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: np.resize(x, (rows, *x.shape[1:])) for name, x in fields.items()}

    weights = np.ones(rows, np.float32)
    return replace(
        batch, inputs=each(batch.inputs), labels=each(batch.labels), weights=weights, indices=np.arange(rows)
    )


def one_tensor(x: Any, block: str, where: str, kind: type, is_floating: Callable[[Any], bool]) -> None:
    """Raise ConfigError unless the output of ``block`` is one tensor of floating-point numbers."""
    if not isinstance(x, kind):
        what = f"{block} gives {type(x).__name__}, and not one tensor"
    elif not is_floating(x):
        what = f"{block} gives whole numbers, through which no gradient flows"
    else:
        return
    raise ConfigError(what, where=where, fix="let each block but the last give one tensor of floating-point numbers")
