"""What front-ends share without knowing a framework: neutral names and axes, bytes over Horovod, model look-up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_train.core.initialization import first_weight
from hvd_train.core.mean import differing, mean
from hvd_train.protocol import (
    Batch,
    Communicator,
    Ops,
    Sample,
    Scale,
    Tree,
    made_up,
)
from hvd_train.task.task import Task


def checksum(x: np.ndarray) -> int:
    """The sum of an array's memory as 64-bit words, mod 2^64: any one changed bit changes it."""
    memory = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    whole = len(memory) // 8 * 8
    words = int(memory[:whole].view(np.uint64).sum(dtype=np.uint64))
    return (words + int.from_bytes(memory[whole:].tobytes(), "little")) % 2**64


@dataclass(frozen=True)
class Layout:
    """A tensor's neutral name and axis order: neutral = own.reshape(view).transpose(axes).reshape(shape)."""

    name: str
    own_shape: tuple[int, ...]
    view: tuple[int, ...]
    axes: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, own_shape: Sequence[int], entry: tuple) -> Layout:
        name, view, axes, shape = entry
        own = tuple(int(n) for n in own_shape)
        view = tuple(view or own)
        return cls(name, own, view, tuple(axes or range(len(view))), tuple(shape))

    def to_neutral(self, x: np.ndarray) -> np.ndarray:
        return x.reshape(self.view).transpose(self.axes).reshape(self.shape)  # who writes it lays it out

    def from_neutral(self, x: np.ndarray) -> np.ndarray:
        permuted = tuple(self.view[axis] for axis in self.axes)
        own = x.reshape(permuted).transpose(np.argsort(self.axes)).reshape(self.own_shape)
        return np.ascontiguousarray(own).reshape(self.own_shape)


def layouts_of(shapes: Mapping[str, Sequence[int]], table: Mapping[str, tuple]) -> dict[str, Layout]:
    """Of tensors by their own names; one that the model's ``table`` leaves out keeps its name and its axes."""
    return {
        own: Layout.of(shape, table.get(own, (own.replace("/", "."), None, None, shape)))
        for own, shape in shapes.items()
    }


class StateTree(ABC):
    """``state`` and ``load`` over a subclass' own arrays.

    Own keys are ``weights/OWN``, ``statistics/OWN`` and ``slots/SLOT/OWN``; neutral keys have the neutral name in place
    of OWN. A key that ends in no known name (``slots/step``) is the same in both.
    """

    ops: Ops
    task: Task
    communicator: Communicator
    layouts: dict[str, Layout]
    _exchange_state: Sequence[tuple[Any, ...]]  # the compressor's, per bucket

    queued: Sequence[Any] = ()

    def run_queued(self) -> None:
        """Nothing waits, unless a front-end says so."""
        return

    def finite(self) -> bool:
        return True

    def waited(self) -> float:
        return self.communicator.waited

    def counts(self, batch: Batch) -> np.ndarray:
        return self.ops.to_numpy(self.task.counts(*self._judged(batch)))

    def _ask(self, sample: Sample) -> None:
        """Shows the task what the model gives, where functions of the user's own are asked."""
        if self.task.has_user_functions:
            inputs, labels, weights = self.to_device(made_up(sample))
            self.task.probe(self._evaluated(inputs), labels, weights)

    @abstractmethod
    def to_device(self, batch: Batch) -> Any:
        """(inputs, labels, weights) on the device."""

    @abstractmethod
    def _judged(self, batch: Batch) -> tuple[Mapping[str, Any], Any]:
        """(labels, weights) of it."""

    @abstractmethod
    def _evaluated(self, inputs: Any) -> Any:
        """What the model gives in evaluation, as tensors."""

    def _scales(self, scale: Scale) -> np.ndarray:
        """(losses,)."""
        return np.broadcast_to(np.atleast_1d(scale), (len(self.task.objectives),))

    @abstractmethod
    def _measure(self, placed: Any, scale: Scale, seed: int) -> Any: ...

    def compression_error(self, placed: Any, scale: Scale, seed: int) -> Any:
        """The figures of ``update/error_meter.py`` for this batch's gradient; running statistics stay as they were."""
        kept = self.statistics()
        figures = self._measure(placed, scale, seed)
        self.put_back(kept)
        return figures

    def statistics(self) -> Tree:
        return self._arrays([key for key in self._keys() if key.startswith("statistics/")])

    def put_back(self, kept: Tree) -> None:
        self._assign(kept)

    def neutral(self, own: Tree) -> Tree:
        return dict(self._neutral(key, array) for key, array in own.items())

    def _neutral(self, key: str, array: np.ndarray) -> tuple[str, np.ndarray]:
        prefix, layout = self._split(key)
        return (prefix + layout.name, layout.to_neutral(array)) if layout else (key, array)

    def checksums(self) -> dict[str, int]:
        return {self.layouts[own].name: checksum(x) for own, x in self._weights()}

    @abstractmethod
    def _weights(self) -> Iterable[tuple[str, np.ndarray]]:
        """(own name, trainable weight as it lies in memory, not copied where that can be helped)."""

    def _first_weights(self, names: Iterable[str], seed: int) -> Iterator[tuple[str, np.ndarray]]:
        """(own name, first weight in its own axis order)."""
        for own in names:
            layout = self.layouts[own]
            yield own, layout.from_neutral(first_weight(layout.name, layout.shape, seed))

    def local_state(self) -> Tree:
        return {
            f"{b}/{k}": self.ops.to_numpy(x)
            for b, state in enumerate(self._exchange_state)
            for k, x in enumerate(state)
        }

    def load_local(self, tree: Mapping[str, np.ndarray]) -> None:
        self._exchange_state = [
            tuple(self.ops.from_numpy(tree[f"{b}/{k}"]) for k in range(len(state)))
            for b, state in enumerate(self._exchange_state)
        ]

    @abstractmethod
    def _keys(self) -> list[str]:
        """Own keys of all arrays."""

    @abstractmethod
    def _views(self, keys: Collection[str] | None = None) -> Iterator[tuple[str, np.ndarray]]:
        """(own key, array) of these own keys, or of all; one at a time, not copied where that can be helped."""

    def _arrays(self, keys: Collection[str] | None = None) -> Tree:
        """Copies of them."""
        return {key: x.copy() for key, x in self._views(keys)}

    @abstractmethod
    def _assign(self, arrays: Mapping[str, np.ndarray]) -> None: ...

    def _split(self, key: str) -> tuple[str, Layout | None]:
        prefix = "/".join(key.split("/")[: 2 if key.startswith("slots/") else 1]) + "/"
        return prefix, self.layouts.get(key[len(prefix) :])

    def state(self, into: Tree | None = None) -> Tree:
        tree = {}
        for key, array in self._views():
            name, x = self._neutral(key, array)
            tree[name] = np.empty_like(x) if into is None else into[name]
            np.copyto(tree[name], x, casting="no")
        return tree

    def load(self, tree: Mapping[str, np.ndarray]) -> None:
        own = {}
        for key in self._keys():
            prefix, layout = self._split(key)
            neutral = prefix + layout.name if layout else key
            if neutral in tree:
                own[key] = layout.from_neutral(tree[neutral]) if layout else tree[neutral]
        self._assign(own)

    def average(self, names: Sequence[str] | None = None) -> None:
        """In place, over the ranks: the weights of these neutral names, or all weights and statistics."""
        keys = []
        for key in self._keys():
            _, layout = self._split(key)
            if not key.startswith("slots/") and (names is None or (layout and layout.name in names)):
                keys.append(key)
        self._average(keys)

    def average_statistics(self) -> None:
        """Makes running statistics equal on all ranks; they are the only part that each rank gathers for itself."""
        self._average([key for key in self._keys() if key.startswith("statistics/")])

    def _average(self, keys: Collection[str]) -> None:
        if self.communicator.size > 1:
            apart = differing(self._views(keys), self.communicator)
            if apart:
                self._assign(mean(self._arrays(apart), self.communicator, self.ops))
