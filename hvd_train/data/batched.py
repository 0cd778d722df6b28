"""Read the single samples of data sets that give whole batches: tf.data.Dataset and keras.utils.PyDataset."""

from __future__ import annotations

import copy
import hashlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from hvd_train.data.order import permute
from hvd_train.errors import DataError

MOST_SECONDS = 120.0  # to count samples
LOOKED_AT = 16  # first samples of a tf.data.Dataset, which make its fingerprint
PAIR = "let it give (inputs, labels), each an array or a dict of arrays by their names"


def gives_batches(part: Any) -> bool:
    """Return whether this is a tf.data.Dataset or a PyDataset of Keras, neither of which need be imported."""
    named = [f"{kind.__module__}.{kind.__name__}" for kind in type(part).__mro__]
    return any(
        name.startswith(("tensorflow.python.data.", "keras.")) and name.endswith((".DatasetV2", ".PyDataset"))
        for name in named
    )


def batched(part: Any, where: str) -> PyDatasetStream | PipelineStream:
    """Return a stream of the samples of such a data set. Raises DataError if their number cannot be known."""
    stream = PyDatasetStream(part, where) if hasattr(part, "on_epoch_end") else PipelineStream(part, where)
    names = getattr(part, "class_names", None)  # of image_dataset_from_directory
    stream.num_classes = getattr(part, "num_classes", len(names) if names else None)
    stream.class_names = tuple(names or ())
    return stream


class PyDatasetStream:
    """The samples of a PyDataset. After the first epoch its batches, not their samples, are shuffled, as Keras does.

    ``numbers``: those of its batches that are read; None: all.
    """

    num_classes: int | None = None
    class_names: tuple[str, ...] = ()
    advice = "let __getitem__ give the same batch each time; random changes belong into data.transforms"

    def __init__(self, data: Any, where: str, numbers: np.ndarray | None = None) -> None:
        self._data, self._where = data, where
        if data.num_batches is None:
            raise DataError(
                "the PyDataset has no length", where=where, fix="let __len__ return how many batches it has"
            )
        self._numbers = (np.arange(data.num_batches) if numbers is None else numbers).tolist()
        batches = len(self._numbers)
        # How many samples each batch has is known from the first and the last one; ``iterate`` checks the others.
        self._batches, self._size, last = batches, 0, 0
        if batches:
            self._size, last = (self._rows(data[self._numbers[k]]) for k in (0, -1))
        self._count = max(batches - 1, 0) * self._size + last
        ends = sorted({0, batches - 1}) if batches else []
        self.fingerprint = (
            f"{type(data).__module__}.{type(data).__qualname__} {self._count} "
            f"{_digest(data[self._numbers[k]] for k in ends)}"
        )

    def __len__(self) -> int:
        return self._count

    def iterate(self, epoch: int, start: int) -> Iterator[tuple[Any, Any]]:
        """Iterate over the samples of an epoch after its first ``start``."""
        order = np.arange(self._batches)
        if epoch:  # the last batch may be short, and stays at its place
            order[:-1] = permute(order[:-1], self._batches - 1, 0, epoch)
        # The last batch may also be larger than the others.
        first = min(start // self._size, self._batches - 1)
        skipped = start - first * self._size
        for number in order[first:].tolist():
            batch = self._pair(self._data[self._numbers[number]])
            if (rows := self._rows(batch)) != self._size and number < self._batches - 1:
                sizes = f"{rows} samples, and the first has {self._size}"
                what = f"batch {self._numbers[number]} of the PyDataset has {sizes}"
                raise DataError(what, where=self._where, fix="give all batches but the last the same size")
            for k in range(skipped, rows):
                yield _row(batch[0], k), _row(batch[1], k)
            skipped = 0

    def divided(self, held_out: Callable[[int], np.ndarray]) -> tuple[PyDatasetStream, PyDatasetStream]:
        """Return the stream without and with the batches for which ``held_out(number of batches)`` is true."""
        held = held_out(self._batches)
        numbers = np.array(self._numbers)
        train, val = (PyDatasetStream(self._data, self._where, numbers[rows]) for rows in (~held, held))
        for part in (train, val):
            part.num_classes, part.class_names = self.num_classes, self.class_names
        return train, val

    def _rows(self, batch: Any) -> int:
        return len(_first(self._pair(batch)[0]))

    def _pair(self, batch: Any) -> tuple[Any, Any]:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            what = "sample weights" if isinstance(batch, tuple | list) and len(batch) == 3 else "no pair"
            raise DataError(f"a batch of the PyDataset has {what}", where=self._where, fix=PAIR)
        _check_no_list(batch, self._where)
        return batch[0], batch[1]


class PipelineStream:
    """The samples of a tf.data.Dataset, with or without batches, in its own order."""

    num_classes: int | None = None
    class_names: tuple[str, ...] = ()
    advice = "shuffle it with seed=... and reshuffle_each_iteration=False, and draw random numbers with fixed seeds"

    def __init__(self, data: Any, where: str) -> None:
        self._where = where
        if not isinstance(data.element_spec, tuple) or len(data.element_spec) != 2:
            raise DataError("an element of the tf.data.Dataset is no pair", where=where, fix=PAIR)
        _check_no_list(data.element_spec, where)
        if int(data.cardinality()) == -1:
            fix = "leave repeat() out: max_epochs says how often it is read"
            raise DataError("the tf.data.Dataset never ends", where=where, fix=fix)
        specs = sys.modules["tensorflow"].nest.flatten(data.element_spec)
        if any(hasattr(spec, "ragged_rank") for spec in specs):
            what = "the tf.data.Dataset has ragged tensors, and all samples need one shape"
            raise DataError(what, where=where, fix="pad them: padded_batch with padded_shapes")
        batches = _are_batches(specs)
        self._samples = data.unbatch() if batches else data
        count = int(self._samples.cardinality())
        self._count = count if count >= 0 else _counted(data, batches, where)
        kind = "a batch, as model.fit takes it" if batches else "one sample"
        self.remark = f"an element of the tf.data.Dataset is {kind}: {self._count:,} samples"
        spec = hashlib.sha256(repr(data.element_spec).encode()).hexdigest()
        first = self._samples.take(LOOKED_AT).as_numpy_iterator()
        self.fingerprint = f"tf.data {self._count} {spec} {_digest(first)}"

    def __len__(self) -> int:
        return self._count

    def iterate(self, epoch: int, start: int) -> Iterator[tuple[Any, Any]]:
        """Iterate over the samples after the first ``start``; each epoch has the same order."""
        yield from self._samples.skip(start).as_numpy_iterator()

    def divided(self, held_out: Callable[[int], np.ndarray]) -> tuple[PipelineStream, PipelineStream]:
        """Return the stream without and with the samples for which ``held_out(number of samples)`` is true."""
        held = held_out(self._count)
        train, val = self._with(~held), self._with(held)
        return train, val

    def _with(self, rows: np.ndarray) -> PipelineStream:
        gather, part = sys.modules["tensorflow"].gather, copy.copy(self)
        numbered = self._samples.enumerate().filter(lambda number, _: gather(rows, number))
        part._samples, part._count = numbered.map(lambda _, sample: sample), int(rows.sum())
        part.fingerprint = f"{self.fingerprint} {hashlib.sha256(rows.tobytes()).hexdigest()}"
        return part


def _check_no_list(pair: Any, where: str) -> None:
    """Refuse several arrays without names: their meaning would depend on the model."""
    for name, part in zip(("inputs", "labels"), pair, strict=True):
        if isinstance(part, tuple | list):
            raise DataError(f"{name} are a {type(part).__name__} of {len(part)}", where=where, fix=PAIR)


def _are_batches(specs: list[Any]) -> bool:
    """Return whether elements are batches: their arrays have the first axis in common, as ``model.fit`` wants it."""
    shapes = [spec.shape for spec in specs]
    return all(shape.rank for shape in shapes) and len({shape[0] for shape in shapes}) == 1


def _counted(data: Any, batches: bool, where: str) -> int:
    """Count the samples in a pass: only that shows how many the last batch has, or how long a generator is."""
    count, ends = 0, time.perf_counter() + MOST_SECONDS
    for element in data.as_numpy_iterator():
        count += len(_first(element[0])) if batches else 1
        if time.perf_counter() > ends:
            what = f"the tf.data.Dataset has not ended after {MOST_SECONDS:.0f} s and {count:,} samples"
            fix = "let its generator end; or give single samples and their number: data.apply(tf.data.experimental."
            fix += "assert_cardinality(n))"
            raise DataError(what, where=where, fix=fix)
    return count


def _first(value: Any) -> Any:
    return _first(next(iter(value.values()))) if isinstance(value, dict) else value


def _row(value: Any, k: int) -> Any:
    return {key: _row(x, k) for key, x in value.items()} if isinstance(value, dict) else np.asanyarray(value[k])


def _digest(pairs: Iterable[Any]) -> str:
    """Return a hash of samples or batches."""
    digest = hashlib.sha256()
    for pair in pairs:
        for part in pair:
            for x in part.values() if isinstance(part, dict) else [part]:
                digest.update(np.ascontiguousarray(x).tobytes())
    return digest.hexdigest()
