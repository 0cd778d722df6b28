"""Run Keras' own SGD and Adam by TensorFlow's fused kernels: the same formulas in one pass over a weight, not five.

On a CPU the passes take a quarter of a wide layer's step. Sources: Keras' ``SGD.update_step`` and ``Adam.update_step``,
TensorFlow's ``ResourceApplyGradientDescent``, ``ResourceApplyKerasMomentum`` and ``ResourceApplyAdam``. Numbers that
Keras casts, which rounds them to 32 bits first, are cast here too, because a single process uses Keras' own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf


def fuse(optimizer: Any) -> None:
    """Patch ``update_step`` of this instance, if its class is SGD or Adam, without amsgrad."""
    # LossScaleOptimizer delegates to its inner optimizer.
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    step = {
        keras.optimizers.SGD: _sgd,
        keras.optimizers.Adam: _adam,
        keras.optimizers.AdamW: _adam,
    }.get(type(optimizer))
    if step and not getattr(optimizer, "amsgrad", False):
        optimizer.update_step = tf.autograph.experimental.do_not_convert(step(optimizer))


def _sgd(optimizer: Any) -> Callable:
    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        gradient, rate = tf.cast(gradient, variable.dtype), tf.cast(learning_rate, variable.dtype)
        if not optimizer.momentum:
            tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=gradient)
            return
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=variable.handle,
            accum=_slot(optimizer, optimizer.momentums, variable),
            lr=rate,
            grad=gradient,
            momentum=keras.ops.cast(optimizer.momentum, variable.dtype),
            use_nesterov=optimizer.nesterov,
        )

    return update_step


def _adam(optimizer: Any) -> Callable:
    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        kind = variable.dtype
        betas = [tf.constant(beta, kind) for beta in (optimizer.beta_1, optimizer.beta_2)]
        # ``iterations`` counts finished steps; Adam's first correction is beta^1.
        count = keras.ops.cast(optimizer.iterations + 1, kind)
        powers = [keras.ops.cast(beta, kind) ** count for beta in (optimizer.beta_1, optimizer.beta_2)]
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=_slot(optimizer, optimizer._momentums, variable),
            v=_slot(optimizer, optimizer._velocities, variable),
            beta1_power=powers[0],
            beta2_power=powers[1],
            lr=tf.cast(learning_rate, kind),
            beta1=betas[0],
            beta2=betas[1],
            epsilon=tf.constant(optimizer.epsilon, kind),
            grad=tf.cast(gradient, kind),
        )

    return update_step


def _slot(optimizer: Any, slots: Any, variable: Any) -> Any:
    return slots[optimizer._get_variable_index(variable)].value.handle
