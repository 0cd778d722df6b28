"""Tensor operations in TensorFlow."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_train.frontends.tensorflow.library_metric import library_metric

# Entries of a row, which one thread adds up, however many threads there are.
ROW = 4096
# Least entries per block of a flat tensor, and most blocks: each adds several operations to a graph.
BLOCK, BLOCKS = 1 << 17, 256
ALIGNED = 64  # entries; a block that begins elsewhere is copied


class VariableCell:
    """A tensor kept for a later step, readable in graphs and eagerly."""

    def __init__(self, variable: tf.Variable) -> None:
        self._variable = variable

    def read(self) -> tf.Tensor:
        return self._variable.value()

    def write(self, tensor: tf.Tensor) -> None:
        self._variable.assign(tensor)

    def subtract(self, factor: tf.Tensor, x: tf.Tensor) -> None:
        """Subtract factor x in place, without a temporary for the product."""
        tf.raw_ops.ResourceApplyGradientDescent(var=self._variable.handle, alpha=factor, delta=x)


class TensorFlowOps:
    """Tensor operations. ``device``: where ``keep`` creates variables; empty: TensorFlow's default."""

    from_numpy = staticmethod(tf.convert_to_tensor)
    cast = staticmethod(tf.cast)
    take = staticmethod(tf.gather)
    split = staticmethod(tf.split)
    round = staticmethod(tf.round)
    sum = staticmethod(tf.reduce_sum)
    max = staticmethod(tf.reduce_max)
    stack = staticmethod(tf.stack)
    stop_gradient = staticmethod(tf.stop_gradient)
    softplus = staticmethod(tf.math.softplus)
    sigmoid = staticmethod(tf.math.sigmoid)
    library_metric = staticmethod(library_metric)

    def __init__(self, device: str = "") -> None:
        self._device = device

    def keep(self, x) -> VariableCell:
        with tf.device(self._device or None):
            return VariableCell(tf.Variable(x, trainable=False))

    def keep_number(self, x) -> VariableCell:
        with tf.device("/CPU:0"):
            return VariableCell(tf.Variable(x, trainable=False, dtype=tf.int64))

    def do_if(self, condition, work) -> None:
        def done() -> tf.Tensor:
            work()
            return tf.constant(0)

        tf.cond(condition, done, lambda: tf.constant(0))

    def start_if(self, condition, start, otherwise) -> Callable[[], Any]:
        # Nothing to wait for in a graph: what uses the result runs after it.
        result = tf.cond(condition, lambda: start()(), otherwise)
        return lambda: result

    def blocks(self, x) -> list[tf.Tensor]:
        if "GPU" in self._device:  # it would launch kernels for each block
            return [x]
        # The temporaries of a block stay in a core's cache; those of a large tensor would be newly allocated each time.
        entries = x.shape[0]
        size = max(BLOCK, -(-entries // BLOCKS)) // ALIGNED * ALIGNED + ALIGNED
        return [x[start : start + size] for start in range(0, entries, size)] or [x]

    def in_blocks(self, formula, *tensors) -> Any:
        return formula(*tensors)

    def to_numpy(self, x) -> np.ndarray:
        return np.array(x.numpy())

    def reshape(self, x, shape) -> tf.Tensor:
        return tf.reshape(x, tuple(shape))

    def topk(self, x, k) -> tf.Tensor:
        return tf.math.top_k(x, k, sorted=False).indices

    def above(self, x, bound) -> tf.Tensor:
        return tf.cast(tf.where(~(x <= bound))[:, 0], tf.int32)

    def concat(self, parts, axis=0) -> tf.Tensor:
        return tf.concat(parts, axis)

    def scatter(self, length, indices, values, *, same_bits=True) -> tf.Tensor:
        # The same bits as tensor_scatter_nd_add in 0.4 to 0.6 of its time (4M entries, 2 and 30 % of them). On a GPU
        # the order of the additions varies.
        with tf.device("CPU:0") if same_bits else nullcontext():
            return tf.math.unsorted_segment_sum(values, indices, length)

    def matmul(self, a, b, *, transpose_a=False, transpose_b=False) -> tf.Tensor:
        inner = a.shape[0 if transpose_a else 1]
        if inner is not None and inner <= 64 and inner % 8:
            # Pad to a multiple of 8: oneDNN adds the remainder of a short axis in an order that depends on the threads.
            more = [0, -inner % 8]
            a = tf.pad(a, [more, [0, 0]] if transpose_a else [[0, 0], more])
            b = tf.pad(b, [[0, 0], more] if transpose_b else [more, [0, 0]])
        return tf.matmul(a, b, transpose_a=transpose_a, transpose_b=transpose_b)

    def minus_product(self, x, a, b) -> tf.Tensor:
        return x - tf.matmul(a, b, transpose_b=True)

    def orthonormal(self, x) -> tf.Tensor:
        return tf.linalg.qr(x).q

    def move_towards(self, cells, x, share) -> None:
        for cell, one in zip(cells, x, strict=True):
            cell.subtract(tf.constant(share, one.dtype), cell.read() - one)

    def clip(self, x, limit) -> tf.Tensor:
        return tf.clip_by_value(x, -limit, limit)

    def dtype(self, x) -> str:
        return x.dtype.name

    def where(self, condition, a, b) -> tf.Tensor:
        # One of them may be a Python number, which takes the dtype of the other.
        kind = (a if tf.is_tensor(a) else b).dtype
        return tf.where(condition, tf.convert_to_tensor(a, kind), tf.convert_to_tensor(b, kind))

    def add_at(self, x, start, part) -> tf.Tensor:
        stop = start + part.shape[0]
        # It works in place if nothing else reads ``x``.
        return tf.raw_ops.TensorStridedSliceUpdate(
            input=x, begin=[start], end=[stop], strides=[1], value=x[start:stop] + part
        )

    def to_bytes(self, x) -> tf.Tensor:
        return tf.reshape(tf.bitcast(x, tf.uint8), [-1])

    def from_bytes(self, x, dtype) -> tf.Tensor:
        dtype = tf.as_dtype(dtype)
        return tf.bitcast(tf.reshape(x, (-1, dtype.size)), dtype)

    def nbytes(self, x) -> Any:
        return tf.size(x, tf.int64) * x.dtype.size

    def cross_entropy(self, logits, labels, present=None) -> tf.Tensor:
        if present is None:
            return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        there = tf.reshape(tf.where(tf.reshape(present, (-1,)) != 0), (-1,))
        rows, flat = tf.reshape(logits, (-1, logits.shape[-1])), tf.reshape(labels, (-1,))
        some = self.cross_entropy(tf.gather(rows, there), tf.gather(flat, there))
        return tf.reshape(tf.scatter_nd(there[:, None], some, tf.shape(flat, tf.int64)), tf.shape(labels))

    def argmax(self, x) -> tf.Tensor:
        return tf.argmax(x, -1)

    def take_last(self, x, indices) -> tf.Tensor:
        return tf.gather(x, indices, axis=-1, batch_dims=len(indices.shape))

    def row_means(self, x) -> tf.Tensor:
        return tf.reduce_mean(x, list(range(1, x.shape.rank)))

    def dot(self, a, b) -> tf.Tensor:
        return tf.reduce_sum(a * b)

    def sum_of_squares(self, x) -> tf.Tensor:
        """Add up rows of ``ROW`` entries, then their sums: TensorFlow splits a long sum among threads, not a row."""
        x = tf.square(tf.reshape(x, [-1]))
        for _ in range(2):  # enough for 10^11 entries
            if x.shape[0] is not None and x.shape[0] <= ROW:
                break
            whole = tf.size(x) // ROW * ROW
            x = tf.concat([tf.reduce_sum(tf.reshape(x[:whole], [-1, ROW]), 1), [tf.reduce_sum(x[whole:])]], 0)
        return tf.reduce_sum(x)

    def all_finite(self, x) -> tf.Tensor:
        return tf.reduce_all(tf.math.is_finite(x))
