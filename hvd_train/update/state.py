"""The state of an update: copies of its entries, and cells for tensors kept between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from hvd_train.protocol import Communicator, Entry, Model, Placement, Tensor, Tree, Update


def read(entries: Iterable[Entry], placement: Placement, into: Tree | None = None) -> Tree:
    """Copy the entries of one placement; ``into``: earlier copies, whose memory is reused."""
    tree: Tree = {}
    for entry in entries:
        if entry.placement is placement:
            x = entry.read()
            # A copy, because the next step changes the entry while a thread still writes the checkpoint.
            tree[entry.name] = into[entry.name] if into and entry.name in into else np.empty_like(x)
            np.copyto(tree[entry.name], x, casting="no")
    return tree


def join_shards(entries: Iterable[Entry], communicator: Communicator) -> Tree:
    """Concatenate the parts of sharded entries on rank 0, in rank order; all ranks call it."""
    tree: Tree = {}
    for entry in entries:
        if entry.placement is Placement.SHARDED:
            x = np.ascontiguousarray(entry.read())
            parts = communicator.gather_bytes(x.tobytes())
            if communicator.rank == 0:
                joined = np.frombuffer(b"".join(parts), x.dtype)
                tree[entry.name] = entry.whole(joined) if entry.whole else joined.reshape(entry.shape)
    return tree


def is_residual(name: str) -> bool:
    """Return whether a PER_RANK entry is a residual, whose layout is that of the gradient buckets."""
    return name.partition("/")[0].isdigit()


def weight_names(frontend: Model) -> list[str]:
    """Return the state names of the trainable weights, in the order of ``specs``."""
    return [f"weights/{spec.name}" for spec in frontend.specs()]


def weights(frontend: Model) -> Tree:
    """Copy the trainable weights of this rank's model."""
    state = frontend.state()
    return {name: state[name] for name in weight_names(frontend)}


def training_state(frontend: Model, update: Update, into: Tree | None = None) -> Tree:
    """Copy the state that is equal on all ranks: weights, running statistics and optimizer state."""
    return frontend.state(into) | read(update.state(), Placement.REPLICATED, into)


class EagerCell:
    """A tensor kept for later steps, for eager frameworks."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def read(self) -> Tensor:
        return self._tensor

    def write(self, tensor: Tensor) -> None:
        self._tensor = tensor


class EagerControl:
    """The control-flow operations of ``Ops`` for eager frameworks."""

    block = 1 << 16  # entries: several blocks fit into the cache of a core

    def keep_number(self, x: int) -> EagerCell:
        return EagerCell(x)

    def do_if(self, condition: bool, work: Callable[[], None]) -> None:
        if condition:
            work()

    def start_if(
        self, condition: bool, start: Callable[[], Callable[[], Any]], otherwise: Callable[[], Any]
    ) -> Callable[[], Any]:
        return start() if condition else otherwise

    def blocks(self, x: Tensor) -> Sequence[Tensor]:
        return [x]

    def in_blocks(self, formula: Callable[..., Sequence[Tensor]], *tensors: Any) -> Sequence[Tensor]:
        count = 0
        for start in range(0, len(tensors[0]), self.block):
            blocks = [x[start : start + self.block] for x in tensors]
            results = formula(*blocks)
            count = len(results)
            for block, result in zip(blocks, results, strict=False):
                if result is not block:
                    block[...] = result
        return tensors[:count]
