"""Arrays, divided among ranks: each step is one global batch, of which a rank takes a contiguous part."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

from hvd_train.data.order import share
from hvd_train.errors import ConfigError
from hvd_train.protocol import Communicator
from hvd_train.script.keras.data.epochs import Epochs
from hvd_train.script.keras.data.leaves import columns, holds_texts, is_ragged, kind_of, length, take, texts


class ArrayParts(Epochs):
    """The arrays of a whole data set; a step takes ``whole`` samples on all ranks together."""

    def __init__(self, parts: Any, whole: int, world: Communicator, per_epoch: int | None, seed: int | None) -> None:
        self._parts, self._world, self._n, self._global = parts, world, length(parts), whole
        # A remainder of at least one sample per rank is one more, shorter step; a smaller one is dropped.
        rest = self._n % self._global
        super().__init__(self._n // self._global + (rest >= world.size), per_epoch, seed)

    def part(self, turn: int, step: int) -> Any:
        return texts(take(self._parts, self.order(np.arange(*self._places(step)), self._n, turn)))

    def _places(self, step: int) -> tuple[int, int]:
        low = step * self._global
        start, stop = share(min(self._global, self._n - low), self._world.size, self._world.rank)
        return low + start, low + stop

    def as_keras(self, tensorflow: bool, weighted: bool = False) -> Any:
        """Return the input for ``fit``, such that ``train_step`` gets the same structure as without hvd_train.

        On TensorFlow lists become tuples. ``weighted``: with class weights, which Keras would compute in 32 bits on a
        pipeline.
        """
        pipeline = None
        if tensorflow:
            self._parts = keras.tree.lists_to_tuples(self._parts)
            pipeline = None if weighted else self.pipeline()
        if pipeline is not None:
            return pipeline
        return self if weighted else UnchangedBatches(self)

    def pipeline(self) -> Any:
        """Return a tf.data.Dataset of one pass over the data, in the order of the epoch when it begins.

        None if leaves are neither numbers nor strings.
        """
        import tensorflow as tf

        leaves = keras.tree.flatten(self._parts)
        if not all(x is None or is_ragged(x) or x.dtype.kind in "biuf" or holds_texts(x) for x in leaves):
            return None
        tensors = [leaf if leaf is None or is_ragged(leaf) else tf.constant(leaf) for leaf in leaves]
        # ends (steps + 1,): step k takes rows[ends[k] : ends[k + 1]]
        places = [np.arange(*self._places(step)) for step in range(self.steps)]
        ends = np.cumsum([0, *map(len, places)])

        # One element per pass: the rows of all its steps, and where each step begins. Python runs once.
        def one() -> Any:
            yield self.order(np.concatenate(places), self._n, self.epoch), ends

        def steps(rows: Any, bounds: Any) -> Any:
            return tf.data.Dataset.range(tf.size(bounds, tf.int64) - 1).map(lambda k: rows[bounds[k] : bounds[k + 1]])

        def gathered(rows: Any) -> Any:
            return keras.tree.pack_sequence_as(self._parts, [x if x is None else tf.gather(x, rows) for x in tensors])

        integers = tf.TensorSpec([None], tf.int64)
        orders = tf.data.Dataset.from_generator(one, output_signature=(integers, integers))
        sized = tf.data.experimental.assert_cardinality(self.steps)
        options = tf.data.Options()
        options.autotune.enabled = False  # its thread slows down a busy core, and an epoch waits for its end
        return orders.flat_map(steps).map(gathered).apply(sized).prefetch(2).with_options(options)


class UnchangedBatches(PyDatasetAdapter):
    """Batches that keep their structure: Keras' adapter and PyTorch's loader would change tuples and lists."""

    def _standardize_batch(self, batch: Any) -> Any:
        return batch

    def get_torch_dataloader(self) -> Any:
        loader = super().get_torch_dataloader()
        loader.collate_fn = self._standardize_batch
        return loader


def split(x: Any, y: Any, weight: Any, fraction: float) -> tuple[Any, Any]:
    """Split arrays into training and validation data: the last ``fraction`` validates, as in Keras."""
    if kind_of(x) != "arrays":
        what = f"validation_split cannot split a {type(x).__name__}"
        raise ConfigError(what, where="model.fit", fix="give arrays, or validation_data=")
    parts = columns(x, y, weight)
    n = length(parts)
    at = math.floor(n * (1 - fraction))
    if not 0 < at < n:
        what = f"validation_split={fraction} of {n} samples leaves one part without samples"
        raise ConfigError(what, where="model.fit", fix="give more samples or another fraction")
    first, last = take(parts, slice(0, at)), take(parts, slice(at, None))
    # (x, y, weight), those that were passed
    return (first + (None, None))[:3], last
