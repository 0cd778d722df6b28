"""The gradients of a user's own Keras 3 model, joined over the ranks as the first thing that its optimizer does.

Law: what the optimizer receives is the gradient of the mean over all samples of the step, on whatever ranks they are:
each rank's gradient is the mean over its own samples and counts by their share of the step's samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from hvd_train.compression.plain import Plain
from hvd_train.core.exchange import Exchange
from hvd_train.errors import ConfigError
from hvd_train.protocol import Communicator, Compressor, Ops, Packing, TensorSpec

WIRE = ("float16", "float32", "float64")  # what Horovod can add; other types travel as float32


class OnTensorFlow:
    """What differs between Keras' backends; a transfer is an operation of the graph that is traced."""

    framework = "tensorflow"

    def __init__(self) -> None:
        import tensorflow as tf

        from hvd_train.frontends.tf import TensorFlowFrontEnd, TensorFlowOps

        self.tf = tf
        self.ops: Ops = TensorFlowOps()
        self.packing: Packing = TensorFlowFrontEnd.packing

    def untouched(self, function: Callable) -> Callable:
        """Not rewritten by AutoGraph when a user's own tf.function reaches it."""
        return self.tf.autograph.experimental.do_not_convert(function)

    def eager(self) -> bool:
        return self.tf.executing_eagerly()

    def dense(self, gradients: list[Any]) -> list[Any]:
        """Tensors of IndexedSlices. On a CPU none is sent before all are there: the thread that carries a transfer
        would take the time from those that compute."""
        gradients = [None if g is None else self.tf.convert_to_tensor(g) for g in gradients]
        if self.tf.config.get_visible_devices("GPU"):
            return gradients
        with self.tf.control_dependencies([g for g in gradients if g is not None]):
            return [None if g is None else self.tf.identity(g) for g in gradients]


class OnTorch:
    framework = "pytorch"

    def __init__(self) -> None:
        import torch

        from hvd_train.frontends.pt import PyTorchFrontEnd, TorchOps

        self.ops: Ops = TorchOps(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        self.packing: Packing = PyTorchFrontEnd.packing

    def untouched(self, function: Callable) -> Callable:
        return function

    def eager(self) -> bool:
        return True

    def dense(self, gradients: list[Any]) -> list[Any]:
        return [g.to_dense() if g is not None and g.is_sparse else g for g in gradients]


class Reduction:
    """Joins the gradients of ``variables``. ``count``: this rank's samples of the step, set while its ``train_step``
    runs (None: every rank counts alike). ``stop`` travels along: after a step ``stopped`` > 0 on all ranks if any rank
    had set it before."""

    def __init__(
        self, variables: Sequence[Any], compressor: Compressor, communicator: Communicator, backend: Any
    ) -> None:
        self.variables = list(variables)
        self._positions = {id(v): i for i, v in enumerate(self.variables)}
        kinds = [keras.backend.standardize_dtype(v.dtype) for v in self.variables]
        self._wire = [kind if kind in WIRE else "float32" for kind in kinds]
        self._kinds = kinds
        specs = [TensorSpec(v.path, tuple(v.shape), kind) for v, kind in zip(self.variables, self._wire, strict=True)]
        self._communicator, self._backend = communicator, backend
        # Whole gradients are divided on their way; what is compressed counts by its share before it is.
        self._whole = isinstance(compressor, Plain)
        op = "average" if self._whole else "sum"
        self._exchange = Exchange(specs, backend.packing, compressor, communicator, backend.ops, op=op)
        self._states = [
            tuple(keras.Variable(a, trainable=False, dtype=a.dtype.name, name="compression") for a in arrays)
            for arrays in self._exchange.initial()
        ]
        self.count: Any = None
        self.stop = keras.Variable(0.0, trainable=False, dtype="float64", name="stop")
        self.stopped = keras.Variable(0.0, trainable=False, dtype="float64", name="stopped")

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Gradients of ``variables`` -> the same, joined; one that no rank has stays None."""
        positions = [self._position(v) for v in variables]
        given: list[Any] = [None] * len(self.variables)
        for i, gradient in zip(positions, gradients, strict=True):
            given[i] = gradient
        joined, share = self._join_counts(given)
        reduced = self._join(self._backend.dense(given), share)
        there = [g is not None for g in given]
        if self._backend.eager():  # traced, all ranks run the same graph; eagerly, what is used may differ
            there = [n > 0 for n in keras.ops.convert_to_numpy(joined)[2:]]
        return [reduced[i] if there[i] else None for i in positions]

    def _weighted(self, flats: list[Any], share: Any) -> list[Any]:
        """Gradients that count by this rank's share of the samples. Shares are equal but for an epoch's last step, and
        then whole gradients need no pass over them."""

        def times(factor: Any) -> list[Any]:
            return [flat * keras.ops.cast(factor, flat.dtype) for flat in flats]

        if not self._whole:
            return times(share)
        relative = share * self._communicator.size
        return keras.ops.cond(keras.ops.abs(relative - 1) < 1e-12, lambda: flats, lambda: times(relative))

    def _position(self, variable: Any) -> int:
        if id(variable) not in self._positions:
            raise ConfigError(
                f"the optimizer is to update '{variable.path}', which hk.distribute did not see",
                where="hvd_train.keras",
                fix="give each model its own optimizer; add layers and set 'trainable' before hk.distribute",
            )
        return self._positions[id(variable)]

    def _join_counts(self, given: Sequence[Any]) -> tuple[Any, Any]:
        """(sums over ranks of [samples, wish to stop, tensor 0 has a gradient, ...], this rank's share of samples).

        Needs no gradient, so TensorFlow sends it while the forward pass runs.
        """
        count = keras.ops.convert_to_tensor(1 if self.count is None else self.count)
        count = keras.ops.cast(count, "float64")
        head = keras.ops.stack([count, _tensor(self.stop)])
        used = keras.ops.convert_to_tensor(np.array([g is not None for g in given], np.float64))
        vector = keras.ops.concatenate([head, used])
        joined = self._communicator.synchronize(self._communicator.allreduce_async(vector, "keras.counts"))
        self.stopped.assign(joined[1])
        return joined, count / joined[0]

    def _join(self, given: Sequence[Any], share: Any) -> list[Any]:
        flats = []
        for members in self._exchange.buckets:
            kind = self._wire[members[0]]
            parts = [
                keras.ops.zeros((int(np.prod(self.variables[i].shape)),), kind)
                if given[i] is None
                else keras.ops.reshape(keras.ops.cast(given[i], kind), (-1,))
                for i in members
            ]
            flats.append(parts[0] if len(parts) == 1 else keras.ops.concatenate(parts))
        flats = self._weighted(flats, share)
        states = [tuple(_tensor(v) for v in state) for state in self._states]
        started = [self._exchange.start(b, flat, states[b]) for b, flat in enumerate(flats)]
        joined, states = self._exchange.finish(started)
        for own, new in zip(self._states, states, strict=True):
            for variable, value in zip(own, new, strict=True):
                variable.assign(value)
        reduced: list[Any] = [None] * len(self.variables)
        for members, flat in zip(self._exchange.buckets, joined, strict=True):
            ends = np.cumsum([int(np.prod(self.variables[i].shape)) for i in members])[:-1]
            parts = keras.ops.split(flat, [int(end) for end in ends]) if len(members) > 1 else [flat]
            for i, part in zip(members, parts, strict=True):
                reduced[i] = keras.ops.cast(keras.ops.reshape(part, self.variables[i].shape), self._kinds[i])
        return reduced


def _tensor(variable: Any) -> Any:
    """A variable's present value; Keras 3 hands its own variables out unread."""
    return keras.ops.convert_to_tensor(variable.value)


def connect(optimizer: Any, reduction: Reduction, backend: Any) -> None:
    """Puts the reduction before everything that this optimizer, the outermost one, does: finite check, clipping, EMA.

    The instance alone is changed, its class is not: what is saved is a plain Keras optimizer.
    """
    apply = optimizer.apply

    def apply_reduced(grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        variables = reduction.variables if trainable_variables is None else list(trainable_variables)
        return apply(reduction(list(grads), variables), trainable_variables)

    optimizer.apply = backend.untouched(apply_reduced)


def count_samples(model: Any, reduction: Reduction, backend: Any) -> None:
    """Tells the reduction how many samples this rank's part of a step has, whatever ``train_step`` the model has."""
    step = model.train_step

    def counted_step(data: Any) -> Any:
        first = next(leaf for leaf in keras.tree.flatten(data) if leaf is not None)
        reduction.count = keras.ops.shape(first)[0]
        try:
            return step(data)
        finally:
            reduction.count = None

    model.train_step = backend.untouched(counted_step)
