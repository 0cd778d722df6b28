"""PyTorch's optimizer formulas on TensorFlow's variables, so that slots and options mean the same in both frameworks.

Keras' SGD multiplies the learning rate into the momentum slot, decouples weight decay, and puts Adam's epsilon
elsewhere. Under warm-up the weights then differ by a quarter (see torch.optim's documentation for the formulas used
here). TensorFlow's fused kernels do the work; where a kernel's formula differs, its arguments are converted.

A kernel updates one weight and its slots in place, of any shape: a tensor, a flat bucket, or a part of one. LARS and
LAMB use norms of whole tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from hvd_train.config import OptimConfig
from hvd_train.config.optimizers import OPTIMIZERS
from hvd_train.frontends.named_arrays import NamedArrays, TensorLayout
from hvd_train.frontends.tensorflow.ops import TensorFlowOps
from hvd_train.update import layerwise as formulas
from hvd_train.update.parameter_groups import TensorSettings, rule_of, step_key


class Kernel(Protocol):
    """A formula. ``slots``: their names; ``counts_steps``: whether it needs the number of the step."""

    slots: tuple[str, ...]
    counts_steps: bool
    per_tensor: bool  # whether it uses norms of tensors

    def __call__(
        self,
        weight: tf.Variable,
        gradient: tf.Tensor,
        slots: Sequence[tf.Variable],
        step: tf.Tensor,
        rate: tf.Tensor,
        total: formulas.Total = formulas.whole,
    ) -> None:
        """Update weight and slots in place. ``step``: () int64, from 1; ``rate``: () of the gradient's dtype;
        ``total``: sums the norms of a tensor that is divided among ranks."""


class SGD:
    """g += decay w; m = momentum m + g; w -= lr (g + momentum m if nesterov else m)."""

    counts_steps = per_tensor = False

    def __init__(self, options: OptimConfig) -> None:
        self.options = options
        self.slots = ("momentum",) if options.momentum else ()

    def __call__(self, weight, gradient, slots, step, rate, total=formulas.whole) -> None:
        o = self.options
        if o.weight_decay:
            gradient = gradient + tf.constant(o.weight_decay, gradient.dtype) * weight
        if not slots:
            tf.raw_ops.ResourceApplyGradientDescent(var=weight.handle, alpha=rate, delta=gradient)
            return
        tf.raw_ops.ResourceApplyMomentum(
            var=weight.handle,
            accum=slots[0].handle,
            lr=rate,
            grad=gradient,
            momentum=tf.constant(o.momentum, gradient.dtype),
            use_nesterov=o.nesterov,
        )


class Adam:
    """m, v = running means of g and g^2; w -= lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps).

    adamw (Loshchilov and Hutter 2019): w -= lr decay w first; else g += decay w.
    """

    slots = ("exp_avg", "exp_avg_sq")
    counts_steps, per_tensor = True, False

    def __init__(self, options: OptimConfig) -> None:
        self.options = options

    def __call__(self, weight, gradient, slots, step, rate, total=formulas.whole) -> None:
        o, dtype = self.options, gradient.dtype
        decay = tf.constant(o.weight_decay, dtype)
        if o.weight_decay and o.name == "adamw":
            weight.assign_sub(rate * decay * weight)
        elif o.weight_decay:
            gradient = gradient + decay * weight
        t = tf.cast(step, tf.float64)
        # In 64 bits: 1 - beta^t cancels in 32.
        powers = [tf.cast(tf.constant(beta, tf.float64) ** t, dtype) for beta in o.betas]
        tf.raw_ops.ResourceApplyAdam(
            var=weight.handle,
            m=slots[0].handle,
            v=slots[1].handle,
            beta1_power=powers[0],
            beta2_power=powers[1],
            lr=rate,
            beta1=tf.constant(o.betas[0], dtype),
            beta2=tf.constant(o.betas[1], dtype),
            # The kernel divides by sqrt(v) + epsilon and corrects the bias outside; torch corrects v first.
            epsilon=tf.constant(o.eps, dtype) * tf.sqrt(1 - powers[1]),
            grad=gradient,
        )


class FormulaKernel:
    """A formula of the framework-independent table of optimizers."""

    def __init__(self, options: OptimConfig) -> None:
        self.options, self.ops, spec = options, TensorFlowOps(), OPTIMIZERS[options.name]
        self._formula, self.slots = spec.formula, spec.slots_of(options.momentum)
        self.counts_steps, self.per_tensor = spec.counts_steps, spec.per_tensor

    def __call__(self, weight, gradient, slots, step, rate, total=formulas.whole) -> None:
        t, old = tf.cast(step, tf.float64), [slot.value() for slot in slots]
        result = self._formula(weight.value(), gradient, old, t, rate, self.options, self.ops)
        if self.per_tensor:
            (result,) = formulas.side_by_side([result], total)
        loss, *new = result
        for slot, value in zip(slots, new, strict=True):
            slot.assign(value)
        weight.assign_sub(loss)


KERNELS: dict[str, Any] = {"sgd": SGD, "adam": Adam, "adamw": Adam}


def make_kernel(options: OptimConfig) -> Kernel:
    return KERNELS.get(options.name, FormulaKernel)(options)


class Flattened:
    """A variable viewed as (n,), for formulas that treat vectors differently: some biases have two axes."""

    def __init__(self, variable: tf.Variable) -> None:
        self._variable = variable

    def value(self) -> tf.Tensor:
        return tf.reshape(self._variable.value(), (-1,))

    def assign(self, x: tf.Tensor) -> None:
        self._variable.assign(tf.reshape(x, self._variable.shape))

    def assign_sub(self, x: tf.Tensor) -> None:
        self._variable.assign_sub(tf.reshape(x, self._variable.shape))


def rated(rate: tf.Tensor, rule: TensorSettings) -> tf.Tensor:
    """Return the learning rate for the tensors of a rule."""
    return rate if rule.factor == 1 else rate * tf.constant(rule.factor, rate.dtype)


class BucketWeights:
    """Trainable variables, read and assigned by buckets; (n,) each."""

    _weights: Sequence[Any]
    _buckets: Sequence[Sequence[int]]

    def weights(self, bucket: int) -> tf.Tensor:
        return _joined([self._weights[i].value for i in self._buckets[bucket]])

    def parts(self, bucket: int) -> list[tf.Tensor]:
        return [tf.reshape(self._weights[i].value, (-1,)) for i in self._buckets[bucket]]

    def take(self, bucket: int, weights: tf.Tensor) -> None:
        variables = [self._weights[i] for i in self._buckets[bucket]]
        parts = tf.split(weights, [math.prod(v.shape) for v in variables])
        for v, part in zip(variables, parts, strict=True):
            v.value.assign(tf.reshape(part, v.shape))


class VariableOptimizer(BucketWeights, NamedArrays):
    """A kernel over Keras' trainable variables, each with a variable for each slot.

    ``from_buckets`` splits the gradients of buckets into those of tensors.
    """

    words = 2

    def __init__(
        self,
        options: OptimConfig,
        trainable: Mapping[str, Any],
        layouts: dict[str, TensorLayout],
        from_buckets: Callable[[Sequence[tf.Tensor]], list[tf.Tensor]],
        buckets: Sequence[Sequence[int]],
    ) -> None:
        self.layouts, self._trainable, self._from_buckets = layouts, trainable, from_buckets
        self._buckets, self._weights = buckets, list(trainable.values())
        self.kernel: Kernel = make_kernel(options)
        rules = [rule_of(options, layouts[path].name) for path in trainable]
        kernels = {rule: make_kernel(rule.options(options)) for rule in rules}
        self._rules = [(kernels[rule], rule) for rule in rules]
        self._flattens = [self.kernel.per_tensor and layouts[path].is_vector for path in trainable]
        self.slots = {slot: [zeros_where(v) for v in trainable.values()] for slot in self.kernel.slots}
        self.steps = {step_key(rule): tf.Variable(0, trainable=False, dtype=tf.int64) for rule in rules}

    def step(self, gradients: Sequence[tf.Tensor], learning_rate: tf.Tensor) -> None:
        counts = {key: steps.value() + 1 for key, steps in self.steps.items()}
        slots = zip(*self.slots.values(), strict=True) if self.slots else [()] * len(self._trainable)
        tensors = self._trainable.values(), self._from_buckets(gradients), slots, self._flattens
        for (kernel, rule), v, gradient, of_weight, flattens in zip(self._rules, *tensors, strict=True):
            rate, weight = rated(tf.cast(learning_rate, gradient.dtype), rule), v.value
            if flattens:
                weight, gradient = Flattened(weight), tf.reshape(gradient, (-1,))
                of_weight = tuple(map(Flattened, of_weight))
            kernel(weight, gradient, of_weight, counts[step_key(rule)], rate)
            if v.constraint is not None:
                v.assign(v.constraint(v))
        if self.kernel.counts_steps:
            for key, count in counts.items():
                self.steps[key].assign(count)

    def slot(self, name: str, bucket: int) -> tf.Tensor:
        """Return (n,): a slot of a bucket's weights."""
        return _joined([self.slots[name][i] for i in self._buckets[bucket]])

    def _variables(self) -> dict[str, tf.Variable]:
        variables = {
            f"slots/{slot}/{path}": variable
            for slot, variables in self.slots.items()
            for path, variable in zip(self._trainable, variables, strict=True)
        }
        return variables | (self.steps if self.kernel.counts_steps else {})

    def _readers(self) -> Mapping[str, Callable[[], np.ndarray]]:
        readers = {key: partial(view, v) for key, v in self._variables().items()}
        if self.kernel.counts_steps:  # PyTorch counts in float32
            counts = {key: lambda v=v: view(v).astype(np.float32) for key, v in self.steps.items()}
            return {**readers, **counts}
        return readers

    def _assign(self, arrays: Mapping[str, np.ndarray]) -> None:
        variables = self._variables()
        for key, array in arrays.items():
            variables[key].assign(np.asarray(array).astype(variables[key].dtype.as_numpy_dtype))


def _joined(variables: Sequence[tf.Variable]) -> tf.Tensor:
    parts = [tf.reshape(v, (-1,)) for v in variables]
    return parts[0] if len(parts) == 1 else tf.concat(parts, 0)


def zeros_where(variable: Any) -> tf.Variable:
    """Make a variable of zeros with the shape, dtype and device of ``variable``."""
    with tf.device(variable.value.device):
        return tf.Variable(tf.zeros(variable.shape, variable.dtype), trainable=False)


def view(variable: tf.Variable) -> np.ndarray:
    """Return a variable's memory without a copy, unlike its ``numpy``."""
    return np.asarray(memoryview(tf.convert_to_tensor(variable)))
