"""The weights that a rank updates, as flat buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from hvd_train.protocol import Entry, Optimizer, Parameters, Tensor, Tree
from hvd_train.update.flat_state import FlatState
from hvd_train.update.state import EagerCell


class OwnedWeights:
    """The weights that a rank updates, (n,) for each bucket: all here, this rank's part in a sharded subclass."""

    def __init__(self, frontend: Parameters, optimizer: Optimizer, buckets: Sequence[Sequence[int]]) -> None:
        self._frontend, self._optimizer, self._buckets = frontend, optimizer, buckets

    def parts(self, bucket: int) -> Sequence[Tensor]:
        """Return the weights of a bucket, (n,) for each tensor; within a step."""
        return self._optimizer.parts(bucket)

    def read(self) -> list[Tensor]:
        """Return the weights, (n,) for each bucket; between steps."""
        return self._frontend.flat_weights()

    def write(self, weights: Sequence[Tensor]) -> None:
        """Load what ``read`` returned into the model; all ranks call it."""
        for bucket, x in enumerate(weights):
            self._optimizer.take(bucket, x)

    def entries(self, prefix: str, read: Callable[[], Sequence[Tensor]]) -> list[Entry]:
        """List checkpoint entries for what ``read`` returns, (n,) for each bucket."""
        flat, weights = FlatState(self._frontend, self._buckets), cache(read)
        return [
            entry
            for b in range(len(self._buckets))
            for entry in flat.entries(prefix, b, lambda b=b: weights()[b])  # type: ignore[misc]
        ]

    def read_from(self, prefix: str, tree: Tree) -> list[Tensor]:
        """Return the weights like ``read``, but take those under ``prefix`` in ``tree`` from there.

        Weights that were frozen in the run of ``tree`` are not in it; the model's are right for them.
        """
        flat, ops = FlatState(self._frontend, self._buckets), self._frontend.ops
        # Copied: TensorFlow's tensors may lie in memory that ranks share.
        cells = [EagerCell(ops.from_numpy(ops.to_numpy(x))) for x in self._frontend.flat_weights()]
        for b, cell in enumerate(cells):
            flat.load(prefix, b, cell, tree)
        return [cell.read() for cell in cells]
