"""Checkpoint entries for flat buckets that are equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial

import numpy as np

from hvd_train.protocol import Cell, Entry, Model, Placement, Tensor, TensorSpec, Tree


class FlatState:
    """The conversion of flat buckets to checkpoint entries, one for each tensor, and back.

    ``buckets``: indices into the front-end's specs. An entry's name is ``prefix`` and the tensor's canonical name.
    """

    def __init__(self, frontend: Model, buckets: Iterable[Sequence[int]]) -> None:
        self._frontend, specs = frontend, frontend.specs()
        self._places: list[list[tuple[TensorSpec, slice]]] = []
        for members in buckets:
            stops = np.cumsum([specs[i].size for i in members]).tolist()
            places = map(slice, [0, *stops[:-1]], stops)
            self._places.append([(specs[i], place) for i, place in zip(members, places, strict=True)])

    def names(self, prefix: str, bucket: int) -> list[str]:
        return [prefix + spec.name for spec, _ in self._places[bucket]]

    def entries(self, prefix: str, bucket: int, read: Callable[[], Tensor]) -> list[Entry]:
        """List the entries of a bucket; ``read`` returns it, (n,)."""
        # Copied once, for all tensors of the bucket.
        flat = cache(lambda: self._frontend.ops.to_numpy(read()))

        def array(spec: TensorSpec, place: slice) -> np.ndarray:
            return self._array(spec, flat()[place])

        return [
            Entry(prefix + spec.name, Placement.REPLICATED, partial(array, spec, place))
            for spec, place in self._places[bucket]
        ]

    def tree(self, prefix: str, bucket: int, flat: np.ndarray) -> Tree:
        """Cut a flat bucket, (n,), into named arrays."""
        return {prefix + spec.name: self._array(spec, flat[place]) for spec, place in self._places[bucket]}

    def _array(self, spec: TensorSpec, flat: np.ndarray) -> np.ndarray:
        return self._frontend.to_canonical(spec.name, flat.reshape(spec.shape))

    def load(self, prefix: str, bucket: int, cell: Cell, tree: Mapping[str, np.ndarray]) -> None:
        """Write the tensors of a bucket that are in ``tree`` into a flat cell; others stay unchanged."""
        there = [(spec, place) for spec, place in self._places[bucket] if prefix + spec.name in tree]
        if there:
            flat = self._frontend.ops.to_numpy(cell.read())
            for spec, place in there:
                flat[place] = self._frontend.to_stored(spec.name, tree[prefix + spec.name]).reshape(-1)
            cell.write(self._frontend.ops.from_numpy(flat))

    def flat(self, prefix: str, bucket: int, tree: Mapping[str, np.ndarray]) -> Tensor:
        """Build a flat bucket, (n,), from ``tree``, which has all its tensors."""
        named = [(spec, tree[prefix + spec.name]) for spec, _ in self._places[bucket]]
        parts = [self._frontend.to_stored(spec.name, x).reshape(-1).astype(spec.dtype) for spec, x in named]
        return self._frontend.ops.from_numpy(np.concatenate(parts))
