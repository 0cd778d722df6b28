"""Evaluation by global batches, which a rank scores in several parts.

A loss that is not a plain mean over samples, and a mean over batches, depend on the batch boundaries. ``window``
consecutive batches of a rank are one global batch, as one process would score it.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np


class EvalWindow:
    """Running sums over the current global batch, in variables of the graph.

    ``samples``: of the current batch in ``test_step``, else None. ``whole``: whether evaluation divides the data by
    global batches.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.samples: Any = None
        self.whole = False
        self._size = keras.Variable(1, trainable=False, dtype="int64", name="window")  # batches per global batch
        self._place = keras.Variable(0, trainable=False, dtype="int64", name="place")  # of a batch in its window
        self._parts = keras.Variable(1.0, trainable=False, dtype="float64", name="parts")  # ranks that score them
        # {(number of a loss, shape): (3, ...) samples, weight, loss times weight}
        self._sums: dict[tuple[int, tuple[int, ...]], Any] = {}
        self._losses = 0  # losses of this batch so far that asked for the window's sums

    def begin(self, size: int = 1, parts: int = 1) -> None:
        """Begin an evaluation in windows of ``size`` batches."""
        self._size.assign(size)
        self._place.assign(0)
        self._parts.assign(parts)

    def begin_batch(self, samples: Any) -> None:
        """Begin a batch, in ``test_step``."""
        self.samples, self._losses = samples, 0

    def end_batch(self) -> None:
        """Advance to the next position in the window."""
        if self._losses:
            self._place.assign((tensor_of(self._place) + 1) % tensor_of(self._size))

    def loss(self, value: Any, weight: Any = None) -> Any:
        """Return what the batch adds to the loss of its window.

        ``value``: a sum over the batch, or its mean by ``weight``. The returned values times the samples add up to the
        loss of the global batch in one process.
        """
        x = keras.ops.cast(value, "float64")
        w = keras.ops.ones_like(x) if weight is None else keras.ops.cast(weight, "float64")
        # before, after (3,): the window's samples, weight, loss times weight without and with this batch
        samples, before, after = self._add(w, x * w)

        def total(sums: Any) -> Any:
            if weight is None:
                return sums[0] * (sums[2] * tensor_of(self._parts))
            return sums[0] * keras.ops.divide_no_nan(sums[2], sums[1])

        return keras.ops.cast((total(after) - total(before)) / samples, value.dtype)

    def batch_mean(self, value: Any) -> tuple[Any, Any]:
        """Return what to add to the sum of global batches' means, and to their number. ``value``: the batch's means."""
        samples = keras.ops.cast(self.samples, "float64")
        _, before, after = self._add(samples * value, keras.ops.ones_like(value))
        begins = keras.ops.cast(tensor_of(self._place) == 0, "float64")
        # A window counts once, with its first batch; later batches correct its mean.
        means = [keras.ops.divide_no_nan(x[1], x[0]) for x in (before, after)]
        return means[1] - means[0], begins

    def _add(self, *values: Any) -> tuple[Any, Any, Any]:
        """Add ``values``, of one shape, to the window; return (samples of this batch, sums before, sums after)."""
        shape = (3, *values[0].shape)
        key = self._losses, shape
        if key not in self._sums:
            with self._backend.lifted():
                self._sums[key] = keras.Variable(np.zeros(shape), trainable=False, dtype="float64", name="scores")
        sums = self._sums[key]
        self._losses += 1
        samples = keras.ops.cast(self.samples, "float64")
        # The first batch of a window begins with zeros, whatever the last window left.
        before = keras.ops.where(tensor_of(self._place) > 0, tensor_of(sums), keras.ops.zeros(shape, "float64"))
        after = before + keras.ops.stack([keras.ops.broadcast_to(samples, shape[1:]), *values])
        sums.assign(after)
        return samples, before, after


def tensor_of(variable: Any) -> Any:
    """Return a variable's current value as a tensor."""
    return keras.ops.convert_to_tensor(variable.value)
