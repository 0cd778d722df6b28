"""The state of a sharded optimizer, for every front-end: parts of tensors by canonical name."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from hvd_train.frontends.named_arrays import TensorLayout
from hvd_train.protocol import Entry, Placement


class ShardedSlots(ABC):
    """``entries`` and ``load`` over a subclass' pieces, each with ``layout``, ``first`` and ``last``.

    ``_pieces``: those of each bucket. ``slots``: {slot: a tensor for each piece}. A piece is cut from the flat tensor,
    in memory order.
    """

    kernel: Any  # its ``counts_steps``: whether the formula needs the number of steps
    slots: Mapping[str, list[Any]]
    _pieces: list[list[Any]]

    def _all(self) -> Iterator[Any]:
        """Return the pieces, in the order of a slot's tensors."""
        return itertools.chain(*self._pieces)

    def _of_bucket(self, slot: str, bucket: int) -> list[Any]:
        """Return the tensors of a slot for the pieces of a bucket."""
        start = sum(map(len, self._pieces[:bucket]))
        return self.slots[slot][start : start + len(self._pieces[bucket])]

    @abstractmethod
    def _read_step(self) -> np.ndarray:
        """Return the number of steps, () float32."""

    @abstractmethod
    def _load_step(self, step: np.ndarray) -> None: ...

    @abstractmethod
    def _read(self, slot: Any) -> np.ndarray:
        """Read the memory of a slot's piece, (n,)."""

    @abstractmethod
    def _write(self, slot: Any, part: np.ndarray) -> None:
        """Write (n,) to a slot's piece."""

    @abstractmethod
    def _to_native(self, piece: Any, stored: np.ndarray) -> np.ndarray:
        """Return a whole tensor in the framework's axis order, from its flat memory."""

    @abstractmethod
    def _to_stored(self, piece: Any, native: np.ndarray) -> np.ndarray:
        """Return the whole tensor in memory order."""

    def entries(self) -> list[Entry]:
        counts = self.kernel.counts_steps
        entries = [Entry("slots/step", Placement.REPLICATED, self._read_step)] if counts else []
        for key, piece, slot in self._named():
            shape, whole = tuple(piece.layout.shape), partial(self._canonical, piece)
            entries.append(Entry(key, Placement.SHARDED, partial(self._read, slot), shape, whole))
        return entries

    def load(self, tree: Mapping[str, np.ndarray]) -> None:
        """Assign this rank's pieces of whole slots; slots that are not in ``tree`` do not change."""
        for key, piece, slot in self._named():
            if key in tree:
                stored = self._to_stored(piece, piece.layout.from_canonical(tree[key]))
                self._write(slot, np.ascontiguousarray(stored).reshape(-1)[piece.first : piece.last])
        if self.kernel.counts_steps and "slots/step" in tree:
            self._load_step(tree["slots/step"])

    def _named(self) -> Iterable[tuple[str, Any, Any]]:
        for name, slots in self.slots.items():
            for piece, slot in zip(self._all(), slots, strict=True):
                yield f"slots/{name}/{piece.layout.name}", piece, slot

    def _canonical(self, piece: Any, stored: np.ndarray) -> np.ndarray:
        layout: TensorLayout = piece.layout
        return layout.to_canonical(self._to_native(piece, stored))
