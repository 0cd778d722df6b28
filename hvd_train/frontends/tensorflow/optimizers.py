"""Keras optimizers with PyTorch's formulas, so that schedules, weight decay and slots mean the same in both frameworks.

Keras' own SGD keeps the learning rate inside the momentum slot, decays weights apart from the gradient, and puts Adam's
epsilon elsewhere; under warm-up the weights then differ by a quarter (see torch.optim's documentation for the formulas
used here). TensorFlow's fused kernels do the work; where a kernel's formula differs, its arguments are converted.
"""

from __future__ import annotations

import keras
import tensorflow as tf

from hvd_train.config import Config
from hvd_train.frontends.tensorflow.ops import TensorFlowOps
from hvd_train.update import optimizers as formulas


class _WithSlots(keras.optimizers.Optimizer):
    """Keeps one variable per (slot, weight); a slot's entry stands at its weight's index."""

    slot_names: tuple[str, ...] = ()

    def build(self, variables) -> None:
        if self.built:
            return
        super().build(variables)
        self.slots = {
            slot: [self.add_variable_from_reference(v, name=slot) for v in variables] for slot in self.slot_names
        }

    def _slot(self, name, variable) -> tf.Variable:
        return self.slots[name][self._get_variable_index(variable)].value


class _Fused(_WithSlots):
    """TensorFlow's kernels take a slot's handle."""

    def _handle(self, name, variable) -> tf.Tensor:
        return self._slot(name, variable).handle


class SGD(_Fused):
    """g += decay w; m = momentum m + g; w -= lr (g + momentum m if nesterov else m)."""

    def __init__(self, learning_rate, momentum=0.0, nesterov=False, decay=0.0) -> None:
        super().__init__(learning_rate, name="sgd")
        self.momentum, self.nesterov, self.decay = momentum, nesterov, decay
        self.slot_names = ("momentum",) if momentum else ()

    def update_step(self, gradient, variable, learning_rate) -> None:
        if self.decay:
            gradient = gradient + tf.constant(self.decay, gradient.dtype) * variable
        rate, handle = tf.cast(learning_rate, gradient.dtype), variable.handle
        if not self.momentum:
            tf.raw_ops.ResourceApplyGradientDescent(var=handle, alpha=rate, delta=gradient)
            return
        tf.raw_ops.ResourceApplyMomentum(
            var=handle,
            accum=self._handle("momentum", variable),
            lr=rate,
            grad=gradient,
            momentum=tf.constant(self.momentum, gradient.dtype),
            use_nesterov=self.nesterov,
        )


class Adam(_Fused):
    """m, v = running means of g and g^2; w -= lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps).

    ``decoupled`` (AdamW, Loshchilov and Hutter 2019): w -= lr decay w first; else g += decay w.
    """

    slot_names = ("exp_avg", "exp_avg_sq")

    def __init__(self, learning_rate, betas=(0.9, 0.999), eps=1e-8, decay=0.0, decoupled=False) -> None:
        super().__init__(learning_rate, name="adamw" if decoupled else "adam")
        self.betas, self.eps, self.decay, self.decoupled = betas, eps, decay, decoupled

    def update_step(self, gradient, variable, learning_rate) -> None:
        dtype = gradient.dtype
        rate, decay = tf.cast(learning_rate, dtype), tf.constant(self.decay, dtype)
        if self.decay and self.decoupled:
            variable.assign_sub(rate * decay * variable)
        elif self.decay:
            gradient = gradient + decay * variable
        t = tf.cast(self.iterations.value + 1, tf.float64)
        powers = [tf.cast(tf.constant(beta, tf.float64) ** t, dtype) for beta in self.betas]
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=self._handle("exp_avg", variable),
            v=self._handle("exp_avg_sq", variable),
            beta1_power=powers[0],
            beta2_power=powers[1],
            lr=rate,
            beta1=tf.constant(self.betas[0], dtype),
            beta2=tf.constant(self.betas[1], dtype),
            # The kernel divides by sqrt(v) + epsilon and corrects the bias outside; torch corrects v first.
            epsilon=tf.constant(self.eps, dtype) * tf.sqrt(1 - powers[1]),
            grad=gradient,
        )


class LARS(_WithSlots):
    """The formulas of update/optimizers.py, tensor by tensor."""

    slot_names = ("momentum",)

    def __init__(self, options, ops) -> None:
        super().__init__(options.lr, name="lars")
        self.options, self.ops = options, ops

    def update_step(self, gradient, variable, learning_rate) -> None:
        m, rate = self._slot("momentum", variable), tf.cast(learning_rate, gradient.dtype)
        step, new = formulas.lars(variable.value(), gradient, m.value(), rate, self.options, self.ops)
        m.assign(new)
        variable.assign_sub(step)


class LAMB(_WithSlots):
    """The formulas of update/optimizers.py, tensor by tensor."""

    slot_names = ("exp_avg", "exp_avg_sq")

    def __init__(self, options, ops) -> None:
        super().__init__(options.lr, name="lamb")
        self.options, self.ops = options, ops

    def update_step(self, gradient, variable, learning_rate) -> None:
        m, v = (self._slot(name, variable) for name in self.slot_names)
        t, rate = tf.cast(self.iterations.value + 1, tf.float64), tf.cast(learning_rate, gradient.dtype)
        weight = variable.value()
        step, *new = formulas.lamb(weight, gradient, m.value(), v.value(), t, rate, self.options, self.ops)
        m.assign(new[0])
        v.assign(new[1])
        variable.assign_sub(step)


LAYERWISE = {"lars": LARS, "lamb": LAMB}


def make_optimizer(config: Config) -> _WithSlots:
    o = config.optim
    if o.name in LAYERWISE:
        return LAYERWISE[o.name](o, TensorFlowOps())
    if o.name == "sgd":
        return SGD(o.lr, o.momentum, o.nesterov, o.weight_decay)
    return Adam(o.lr, o.betas, o.eps, o.weight_decay, decoupled=o.name == "adamw")
