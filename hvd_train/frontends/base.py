"""What all front-ends share: weights and running statistics, their averages and checksums."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hvd_train.core.initialization import first_weight
from hvd_train.core.reductions import differing, mean
from hvd_train.frontends.named_arrays import NamedArrays, TensorLayout
from hvd_train.protocol import (
    PARTNER,
    SHARE,
    Batch,
    Field,
    Groups,
    HostMemory,
    Ops,
    Sample,
    Scale,
    Tree,
    different,
    made_up,
)
from hvd_train.task.task import Task

TRIED = 5  # samples on which a user's step is tried


def started_at_once(start: Callable[..., Any], finish: Callable[[Any], Any]) -> Callable[..., Callable[[], Any]]:
    """Implement ``Parameters.in_background`` for a framework whose transfers start without blocking."""
    return lambda *tensors: partial(finish, start(*tensors))


def checksum(x: np.ndarray) -> int:
    """Add up an array's memory as 64-bit words, mod 2^64: any one changed bit changes the sum."""
    memory = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    whole = len(memory) // 8 * 8
    # Whole words first, then the remaining bytes, at most seven.
    words = int(memory[:whole].view(np.uint64).sum(dtype=np.uint64))
    return (words + int.from_bytes(memory[whole:].tobytes(), "little")) % 2**64


class StateTree(NamedArrays):
    """A model's weights (``weights/NAME``) and running statistics (``statistics/NAME``), for every front-end."""

    ops: Ops
    task: Task
    groups: Groups
    _sample: Sample
    queued: Sequence[Any] = ()
    traced = 0
    axes = ""
    sharded_from = sys.maxsize
    whole: Tree = {}  # of a model split into pipeline stages
    frozen: Collection[str] = ()  # canonical names
    fixed: Collection[str] = ()
    _trainable: Mapping[str, Any]  # by native names

    def freeze(self, names: Collection[str], fixed: Collection[str] = ()) -> None:
        """Exclude the trainable tensors of these canonical names from updates, from the next ``connect`` on.

        ``specs`` lists the others. A later call replaces an earlier one. ``fixed``: the frozen tensors whose batch
        normalization uses its running statistics.
        """
        self.frozen, self.fixed = frozenset(names), frozenset(fixed)

    def _fixed_statistics(self) -> list[str]:
        """Return the native names of ``fixed``."""
        return [name for name in self._trainable if self.layouts[name].name in self.fixed]

    def aliases(self, canonical: bool) -> dict[str, tuple[str, TensorLayout | None]]:
        """Return {name in a file: (key of ``state``, layout of the file's axes; None: canonical)}.

        ``canonical``: names and axes are those of checkpoints, else the framework's, with dots for slashes.
        """
        known: dict[str, tuple[str, TensorLayout | None]] = {}
        for key in self._keys():
            prefix, layout = self._split(key)
            if layout:
                name = layout.name if canonical else key.removeprefix(prefix).replace("/", ".")
                known[name] = prefix + layout.name, None if canonical else layout
        return known

    def names_here(
        self, path: Path | None, names: Collection[str], given: Callable[[str], bool], where: str
    ) -> dict[str, str]:
        """Return {}: in most frameworks names depend on the model alone."""
        return {}

    @property
    def _unfrozen(self) -> dict[str, Any]:
        """The trainable tensors that are not frozen, by native name."""
        return {name: x for name, x in self._trainable.items() if self.layouts[name].name not in self.frozen}

    def run_queued(self) -> None:
        """Run queued steps. Most front-ends queue none."""
        return

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Within this context the model may run on trial: weights and statistics are restored at the end."""
        before = {key: np.array(read()) for key, read in self._readers().items()}
        try:
            yield
        finally:
            now = self._readers()
            self._assign({key: x for key, x in before.items() if not np.array_equal(x, now[key](), equal_nan=True)})

    def host_memory(self, auto: bool = False) -> HostMemory | None:
        return None

    def may_change_weights(self) -> str:
        return ""

    def retrace(self) -> None:
        """Do nothing: most front-ends trace no step."""
        return

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    def in_background(
        self, start: Callable[..., Any], finish: Callable[[Any], Any]
    ) -> Callable[..., Callable[[], Any]]:
        return started_at_once(start, finish)

    def finite(self) -> bool:
        return True

    def peak_device_bytes(self) -> int:
        return 0

    def waited(self, fresh: bool = True) -> float:
        return self.groups.data.waited

    def counts(self, batch: Batch) -> np.ndarray:
        if self.task.step:  # weights may come after the model: it runs once more, without gradients
            return self.ops.to_numpy(self._step_counts(self.to_device(batch)))
        return self.ops.to_numpy(self.task.counts(*self._place_labels(batch)))

    def _step_counts(self, placed: Any) -> Any:
        """Run the user's step on a batch to count the weights of its losses (losses,)."""
        raise NotImplementedError  # of a framework that refuses task.step

    def _step_weights_vary(self, placed: Any) -> bool:
        """Return whether the weights that the user's step returns have a gradient."""
        raise NotImplementedError

    def _label_fields(self, batch: Batch) -> dict[str, Field]:
        """Return the fields of a batch's labels; labels of mixed samples have two more."""
        fields = dict(self._sample.labels)
        if SHARE in batch.labels:
            (label,) = fields.values()
            fields |= {PARTNER: label, SHARE: Field((), "float32")}
        return fields

    def _probe_task(self, sample: Sample) -> None:
        """Run the task on the model's outputs for two samples of zeros, to check the user's functions."""
        if self.task.has_user_functions:
            inputs, labels, weights = self.to_device(made_up(sample))
            self.task.probe(self._eval_of(inputs, labels), labels, weights)
        if self.task.step:
            batch = different(sample, TRIED)
            self.task.probe_step(lambda rows: self._eval_of(*self.to_device(batch.part(rows))[:2]), TRIED)
            if self.task.weighted_by_data and self._step_weights_vary(self.to_device(batch)):
                raise self.task.step.varying_weights()

    @abstractmethod
    def to_device(self, batch: Batch) -> Any:
        """Return (inputs, labels, weights) on the device."""

    @abstractmethod
    def _place_labels(self, batch: Batch) -> tuple[Mapping[str, Any], Any]:
        """Move the labels and weights of a batch to the device; return (labels, weights)."""

    def _eval_of(self, inputs: Any, labels: Any) -> Any:
        """Return the model's outputs in an evaluation; of a user's step what it returns (``StepResult``)."""
        return self._eval_outputs(inputs)

    @abstractmethod
    def _eval_outputs(self, inputs: Any) -> Any:
        """Return the model's outputs in evaluation mode, as tensors."""

    def _scales(self, scale: Scale) -> list[float]:
        """Return one scale for each loss. The last one is for losses per sample; it may equal the others."""
        # np.broadcast_to would take 6 us of each step.
        if isinstance(scale, float | int):
            return [float(scale)] * len(self.task.objectives)
        return [float(x) for x in scale]

    @abstractmethod
    def _measure_error(self, placed: Any, scale: Scale, seed: int) -> Any: ...

    def compression_error(self, placed: Any, scale: Scale, seed: int) -> Any:
        """Return the figures of ``update/error_meter.py`` for this batch's gradient. Statistics do not change."""
        kept = self.running_statistics()
        figures = self._measure_error(placed, scale, seed)
        self.load(kept)
        return figures

    def running_statistics(self) -> Tree:
        native = self._arrays({key for key in self._keys() if key.startswith("statistics/")})
        return dict(self._canonical(key, x) for key, x in native.items())

    def begin_statistics(self) -> bool:
        return False

    def add_statistics(self, placed: Any) -> None:
        raise NotImplementedError

    def take_statistics(self) -> None:
        raise NotImplementedError

    def to_canonical(self, name: str, stored: np.ndarray) -> np.ndarray:
        return self._layout(name).to_canonical(self._native(stored))

    def to_stored(self, name: str, canonical: np.ndarray) -> np.ndarray:
        return self._from_native(self._layout(name).from_canonical(canonical))

    def _layout(self, name: str) -> TensorLayout:
        return next(layout for layout in self.layouts.values() if layout.name == name)

    def _native(self, stored: np.ndarray) -> np.ndarray:
        """Convert an array from the axis order of ``specs`` to the framework's; in most frameworks they are equal."""
        return stored

    def _from_native(self, native: np.ndarray) -> np.ndarray:
        return native

    def checksums(self) -> dict[str, int]:
        return {self.layouts[native].name: checksum(x) for native, x in self._weights()}

    @abstractmethod
    def _weights(self) -> Iterable[tuple[str, np.ndarray]]:
        """Yield (native name, trainable weight in memory order), without a copy where possible."""

    def _first_weights(self, names: Iterable[str], seed: int) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (native name, first weight in the framework's axis order)."""
        for native in names:
            layout = self.layouts[native]
            yield native, layout.from_canonical(first_weight(layout.name, layout.shape, seed))

    def average(self, names: Collection[str]) -> None:
        weights = {f"weights/{native}" for native, layout in self.layouts.items() if layout.name in names}
        self._average([key for key in self._keys() if key in weights])

    def average_statistics(self) -> None:
        """Make running statistics equal on all ranks."""
        # Nothing else in a model comes from the samples of one rank alone.
        self._average([key for key in self._keys() if key.startswith("statistics/")])

    def _average(self, keys: Collection[str]) -> None:
        data = self.groups.data
        if data.size > 1:
            # What is already equal on all ranks is not exchanged, and keeps its bits.
            names = differing(self._views(keys), data)
            if names:
                self._assign(mean(self._arrays(names), data, self.ops))
