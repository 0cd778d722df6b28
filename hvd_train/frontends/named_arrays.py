"""Arrays by canonical names and in canonical axis order, independent of the framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hvd_train.protocol import Tree, is_vector


@dataclass(frozen=True)
class TensorLayout:
    """A tensor's canonical name and axis order: canonical = native.reshape(view).transpose(axes).reshape(shape)."""

    name: str
    native_shape: tuple[int, ...]
    view: tuple[int, ...]
    axes: tuple[int, ...]
    shape: tuple[int, ...]
    scales: bool = False  # whether it is the scale of a normalization

    @property
    def is_vector(self) -> bool:
        return self.scales or is_vector(self.name, self.shape)

    @classmethod
    def of(cls, native_shape: Sequence[int], entry: tuple) -> TensorLayout:
        name, view, axes, shape = entry
        native = tuple(int(n) for n in native_shape)
        view = tuple(view or native)
        return cls(name, native, view, tuple(axes or range(len(view))), tuple(shape))

    def to_canonical(self, x: np.ndarray) -> np.ndarray:
        # A view where possible; the writer makes it contiguous.
        return x.reshape(self.view).transpose(self.axes).reshape(self.shape)

    def from_canonical(self, x: np.ndarray) -> np.ndarray:
        # The axes of ``view`` in canonical order.
        permuted = tuple(self.view[axis] for axis in self.axes)
        native = x.reshape(permuted).transpose(np.argsort(self.axes)).reshape(self.native_shape)
        # ascontiguousarray turns shape () into (1,), so restore the shape.
        return np.ascontiguousarray(native).reshape(self.native_shape)


def layouts_of(shapes: Mapping[str, Sequence[int]], table: Mapping[str, tuple]) -> dict[str, TensorLayout]:
    """Return layouts by native name. A tensor that is not in the model's ``table`` keeps its name and axes."""
    return {
        native: TensorLayout.of(shape, table.get(native, (native.replace("/", "."), None, None, shape)))
        for native, shape in shapes.items()
    }


class NamedArrays(ABC):
    """``state`` and ``load`` over a subclass' arrays.

    A native key is a prefix, such as ``weights`` or ``slots/momentum``, and the framework's name of the tensor. A
    canonical key has the canonical name instead. A key without a tensor's name (``slots/step``) is the same in both.
    """

    layouts: dict[str, TensorLayout]
    words = 1  # of a key's prefix

    @abstractmethod
    def _readers(self) -> Mapping[str, Callable[[], np.ndarray]]:
        """Return {native key: function that returns its array, without a copy where possible}."""

    @abstractmethod
    def _assign(self, arrays: Mapping[str, np.ndarray]) -> None: ...

    def _keys(self) -> list[str]:
        """Return the native keys of all arrays."""
        return list(self._readers())

    def _views(self, keys: Collection[str] | None = None) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (native key, array) one at a time, of these keys or of all."""
        return ((key, read()) for key, read in self._readers().items() if keys is None or key in keys)

    def _arrays(self, keys: Collection[str] | None = None) -> Tree:
        """Copy the arrays of these keys, or of all."""
        return {key: x.copy() for key, x in self._views(keys)}

    def _split(self, key: str) -> tuple[str, TensorLayout | None]:
        prefix = "/".join(key.split("/")[: self.words]) + "/"
        return prefix, self.layouts.get(key[len(prefix) :])

    def _canonical(self, key: str, array: np.ndarray) -> tuple[str, np.ndarray]:
        prefix, layout = self._split(key)
        return (prefix + layout.name, layout.to_canonical(array)) if layout else (key, array)

    def views(self) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
        """Yield (canonical key, function that returns its array) for all arrays."""
        for key, native in self._readers().items():
            prefix, layout = self._split(key)
            if layout:
                yield prefix + layout.name, lambda read=native, layout=layout: layout.to_canonical(read())  # type: ignore
            else:
                yield key, native

    def state(self, into: Tree | None = None) -> Tree:
        """Copy all arrays, by canonical key. ``into``: earlier copies, whose memory is reused."""
        tree = {}
        for key, array in self._views():
            name, x = self._canonical(key, array)
            tree[name] = np.empty_like(x) if into is None else into[name]
            np.copyto(tree[name], x, casting="no")
        return tree

    def load(self, tree: Mapping[str, np.ndarray]) -> None:
        """Assign arrays by canonical key; arrays that are not in ``tree`` do not change."""
        native = {}
        for key in self._keys():
            prefix, layout = self._split(key)
            canonical = prefix + layout.name if layout else key
            if canonical in tree:
                native[key] = layout.from_canonical(tree[canonical]) if layout else tree[canonical]
        self._assign(native)
