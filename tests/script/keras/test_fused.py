"""Fused updates are Keras' own to the last digits but a few: laws on one process."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.optimizers import SGD, Adam, AdamW, LossScaleOptimizer, RMSprop

from hvd_train.script.keras.fused import fuse

STEPS = 10
FUSED = {
    "sgd": lambda: SGD(0.1),
    "momentum": lambda: SGD(0.1, momentum=0.9),
    "nesterov": lambda: SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1, clipnorm=0.5),
    "adam": lambda: Adam(0.1, beta_1=0.8, beta_2=0.99, epsilon=1e-3),
    "ema": lambda: Adam(0.1, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3),
    "adamw": lambda: AdamW(0.1, weight_decay=0.1),
    "schedule": lambda: Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "accumulation": lambda: Adam(0.1, gradient_accumulation_steps=2),
    "accumulated momentum": lambda: SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
}


class Own(Adam):
    pass


@pytest.fixture
def in_64_bits():
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


def steps(optimizer, traced: bool) -> list[np.ndarray]:
    """Weights and slots after ``STEPS`` gradients, which are the same at every call."""
    random = np.random.default_rng(0)
    weights = [keras.Variable(random.normal(size=shape), dtype="float64") for shape in ((5, 3), (3,))]
    optimizer.build(weights)
    apply = tf.function(optimizer.apply) if traced else optimizer.apply
    for _ in range(STEPS):
        apply([tf.constant(random.normal(size=w.shape) * 10.0 ** random.integers(-4, 2), "float64") for w in weights])
    return [np.asarray(keras.ops.convert_to_numpy(v), "float64") for v in [*weights, *optimizer.variables]]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("name", FUSED)
def test_an_update_is_that_of_keras(in_64_bits, name, traced, scaled):
    def made(fused: bool):
        optimizer = FUSED[name]()
        own = optimizer.update_step
        outer = LossScaleOptimizer(optimizer, initial_scale=4.0, dynamic_growth_steps=3) if scaled else optimizer
        if fused:
            fuse(outer)
            assert optimizer.update_step != own
        return outer

    for expected, found in zip(steps(made(False), traced), steps(made(True), traced), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14 * np.abs(expected).max())


@pytest.mark.parametrize("make", [lambda: Adam(amsgrad=True), lambda: AdamW(amsgrad=True), Own, RMSprop])
def test_others_stay_as_they_are(make):
    optimizer = make()
    fuse(LossScaleOptimizer(optimizer))
    fuse(optimizer)
    assert "update_step" not in vars(optimizer)
