"""Batch normalization on N ranks in Keras: extends the classes of a model's layers.

Keras counts padding as samples, keeps the biased variance, and does not sum over ranks outside ``tf.distribute``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvd_train.core.batchnorm import combine, counting, input_gradient, joined, of_all, running
from hvd_train.errors import ConfigError
from hvd_train.frontends.serial import Serial
from hvd_train.protocol import Communicator, Ops, Tensor


class Context:
    """What a model's layers share: the ranks that join their statistics, and the weights of the samples."""

    def __init__(self, communicator: Communicator, ops: Ops, sync: bool) -> None:
        self.communicator: Communicator = communicator if sync else Serial()
        self.ops = ops
        self.fixed: set[int] = set()  # layers whose statistics have ever been fixed
        self.weights: Tensor = None  # (length,): 1 for a sample, 0 for padding
        self._of_steps, self._everyone = self.communicator, communicator
        self.gathers = False
        self.rows: dict[str, tf.Variable] = {}  # {layer: row of all samples gathered so far}

    def gather(self, layers: Sequence[_Joined]) -> None:
        """From now on, add up these layers' statistics of all samples. They normalize by those of the global batch."""
        self.gathers, self.communicator = True, self._everyone
        for layer in layers:
            zeros = tf.zeros(1 + 2 * layer.moving_mean.shape[0], layer.moving_mean.dtype)
            if layer._wire in self.rows:
                self.rows[layer._wire].assign(zeros)
            else:
                self.rows[layer._wire] = tf.Variable(zeros, trainable=False)

    def gathered(self) -> None:
        """Stop gathering."""
        self.gathers, self.communicator = False, self._of_steps


class _Joined(keras.layers.BatchNormalization):
    """The call in training, mixed in before the layer's class: names, variables and evaluation do not change."""

    _context: Context
    _wire: str

    def call(self, inputs, training=None, mask=None) -> tf.Tensor:
        gathers = self._context.gathers
        if not ((training or gathers) and self.trainable):
            return super().call(inputs, training=training, mask=mask)
        dtype = keras.backend.result_type(inputs.dtype, "float32")
        x = tf.cast(inputs, dtype)
        scale = tf.ones_like(self.moving_mean) if self.gamma is None else self.gamma
        bias = tf.zeros_like(self.moving_mean) if self.beta is None else self.beta
        y, total, mean, variance = self._normalize(
            x, self._value_weights(x, mask), tf.cast(scale, dtype), tf.cast(bias, dtype)
        )
        stored = self.moving_mean.dtype
        total, mean, variance = (tf.cast(value, stored) for value in (total, mean, variance))
        if gathers:
            row = self._context.rows[self._wire]
            new = counting(tf.concat([total, mean, variance * total], 0), self._context.ops)
            row.assign(joined([row.value(), new], self._context.ops))
            return tf.cast(y, self.compute_dtype)
        old = tf.convert_to_tensor(self.moving_mean), tf.convert_to_tensor(self.moving_variance)
        new = running(old, total, mean, variance, 1.0 - self.momentum, self._context.ops)
        self.moving_mean.assign(new[0])
        self.moving_variance.assign(new[1])
        return tf.cast(y, self.compute_dtype)

    def _value_weights(self, x, mask) -> tf.Tensor:
        """Return weights of 1 for values that count, else 0, broadcastable to x, with a channel axis of length 1."""
        weights = tf.cast(self._context.weights, x.dtype)
        rows, length = x.shape[0], weights.shape[0]
        # (samples, time, ...) may have been merged into (samples time, ...).
        if rows != length:
            if rows is not None and rows % length:
                what = f"batch normalization over a first axis of {rows} for {length} samples"
                raise ConfigError(what, where=f"model layer {self.name}", fix="keep the samples in the first axis")
            weights = tf.repeat(weights, tf.shape(x)[0] // length)
        value_weights = tf.reshape(weights, [-1] + [1] * (len(x.shape) - 1))
        if mask is not None:
            value_weights *= tf.expand_dims(tf.cast(mask, x.dtype), self.axis)
        return value_weights

    def _normalize(self, x, value_weights, scale, bias) -> tuple[tf.Tensor, ...]:
        """Return (y, values per channel (1,), means (C,), biased variances (C,)); backward needs one allreduce."""
        context, axis, channels = self._context, self.axis % len(x.shape), x.shape[self.axis]
        communicator = context.communicator
        others = [i for i in range(len(x.shape)) if i != axis]
        along = [channels if i == axis else 1 for i in range(len(x.shape))]

        @tf.custom_gradient
        def normalize(x, value_weights, scale, bias) -> tuple:
            # The number of values per channel that share one weight.
            repeats = tf.size(x, tf.int64) // (tf.size(value_weights, tf.int64) * channels)
            # () values of a channel; mean, spread: (C,).
            count = tf.reduce_sum(value_weights) * tf.cast(repeats, x.dtype)
            mean = tf.math.divide_no_nan(tf.reduce_sum(value_weights * x, others), count)
            spread = tf.reduce_sum(value_weights * tf.square(x - tf.reshape(mean, along)), others)
            # (1, 1 + 2 C).
            part = tf.concat([[count], mean, spread], 0)[None]
            parts = communicator.synchronize(communicator.allgather_async(part, f"{self._wire}.forward"))
            total, mean, variance = combine(tf.ensure_shape(parts, (None, 1 + 2 * channels)), context.ops)
            inverse = tf.math.rsqrt(variance + self.epsilon)
            normal = (x - tf.reshape(mean, along)) * tf.reshape(inverse, along)

            def backward(gradient, *_) -> tuple:
                # The parameters' gradients stay local: the exchange adds them like all other gradients.
                local = tf.reduce_sum(gradient, others), tf.reduce_sum(gradient * normal, others)
                handle = communicator.allreduce_async(tf.stack(local), f"{self._wire}.backward")
                means = communicator.synchronize(handle) / tf.maximum(total, 1.0)
                factor, first, second = (tf.reshape(v, along) for v in (scale * inverse, means[0], means[1]))
                return (
                    input_gradient(gradient, normal, factor, value_weights, (first, second)),
                    None,
                    local[1],
                    local[0],
                )

            y = normal * tf.reshape(scale, along) + tf.reshape(bias, along)
            return (y, total, mean, variance), backward

        return normalize(x, value_weights, scale, bias)


def fix_statistics(model: keras.Model, paths: Collection[str]) -> None:
    """Fix the running statistics of the layers that have these weights, and of no others, in training."""
    for layer in model._flatten_layers():
        if isinstance(layer, _Joined):
            fixed = any(v is not None and v.path in paths for v in (layer.gamma, layer.beta))
            if fixed or id(layer) in layer._context.fixed:
                layer.trainable = not fixed
                layer._context.fixed.add(id(layer))


def prepare(model: keras.Model, communicator: Communicator, ops: Ops, sync: bool, swa: bool = False) -> Context:
    """Attach the context to every batch normalization of ``model``, replacing that of an earlier training.

    The instances get another class. ``swa``: statistics will be recomputed for the averaged weights.
    """
    context, native = Context(communicator, ops, sync), keras.layers.BatchNormalization
    for number, layer in enumerate(model._flatten_layers()):
        if not isinstance(layer, native):
            continue
        if isinstance(layer, _Joined) and id(layer) in layer._context.fixed:  # by an earlier training of the same model
            layer.trainable = True
        kind: Any = type(layer).__mro__[2] if isinstance(layer, _Joined) else type(layer)
        where = f"model layer {layer.name}"
        if kind.call is not native.call:
            if sync or swa:
                fix = "switch sync_batchnorm off" if sync else "leave swa out"
                raise ConfigError(f"{kind.__name__} has a call of its own", where=where, fix=fix)
            continue
        if layer.renorm:
            raise ConfigError("batch renormalization would count padding as samples", where=where, fix="renorm=False")
        attributes = {"_context": context, "_wire": f"batchnorm.{number}"}
        attributes["__module__"] = kind.__module__  # so that a saved model names Keras' class
        layer.__class__ = type(kind.__name__, (_Joined, kind), attributes)
    return context


class Gathering:
    """The part of a front-end that recomputes running statistics for given weights."""

    model: keras.Model
    ops: Ops
    _batchnorm: Context
    _device: str
    _gather: Any
    _run: Any
    _eval_of: Any

    def begin_statistics(self) -> bool:
        layers = self._norms()
        if layers:
            with tf.device(self._device):
                self._batchnorm.gather(layers)
        return bool(layers)

    def add_statistics(self, placed) -> None:
        self._run(self._gather, *placed)

    def take_statistics(self) -> None:
        self._batchnorm.gathered()
        for layer in self._norms():
            row = self._batchnorm.rows[layer._wire].value()
            if row[0] == 0:  # no sample has weight: keep the statistics of training
                continue
            mean, variance = of_all(row, self.ops)
            layer.moving_mean.assign(mean)
            layer.moving_variance.assign(variance)

    def _check_compiles(self) -> None:
        """Raise ConfigError if XLA would have to compile an exchange of statistics."""
        if self._norms() and self._batchnorm.communicator.size > 1:
            what = "XLA cannot compile batch normalization that joins the statistics of ranks"
            raise ConfigError(what, where="model.compile", fix="leave it out, or set sync_batchnorm: false")

    def _norms(self) -> list[Any]:
        return [x for x in self.model._flatten_layers() if isinstance(x, _Joined) and x.trainable]

    def _traced_statistics(self, inputs, labels, weights) -> tf.Tensor:
        self._batchnorm.weights = weights
        outputs = tf.nest.flatten(self._eval_of(inputs, labels))
        return [tf.size(x) for x in outputs if x is not None]
