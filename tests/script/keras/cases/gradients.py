"""Gradients: overflow, compression, compiled graphs, saved models."""

from __future__ import annotations

import warnings

import keras
import numpy as np

import hvd_train.keras as hk
from hvd_train.script.keras.logs import add_up
from tests.script.keras.cases.models import (
    COUNT,
    FOLDER,
    SGD,
    TENSORFLOW,
    WIDE,
    Adam,
    compiled,
    digits,
    fit,
    network,
    trained,
)


def overflow():
    x, y = digits()
    x[60] = np.inf  # of global step 1, on one rank: its gradient is not a number
    model = compiled(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0))
    hk.distribute(model)
    fit(model, x, y, epochs=1)
    scale = float(keras.ops.convert_to_numpy(model.optimizer.dynamic_scale))
    return trained(model, scale=scale, iterations=int(model.optimizer.inner_optimizer.iterations))


def float8():
    """The largest numbers that float8 layers have seen: of the whole batch. The weights stay as they are."""
    model = network()
    model.quantize("float8")
    model.compile(SGD(0.0), "mse")
    hk.distribute(model)
    x, _ = digits()
    fit(model, x, x[:, :10])
    seen = [v for v in model.variables if v.path.endswith(("inputs_amax_history", "kernel_amax_history"))]
    return {v.path: keras.ops.convert_to_numpy(v) for v in seen}


def compressed():
    model = hk.distribute(compiled(network(hidden=WIDE)), compression="topk", ratio=0.05)
    return trained(model, fit(model, *digits(), shuffle=True))


def residual():
    """What the gradients ask for is applied or waits in a residual: gradients here do not depend on the weights."""
    return {
        f"asked {options['compression']}": asked(**options)
        for options in ({"compression": "topk", "ratio": 0.05}, {"compression": "int4"})
    }


def asked(**options):
    x, _ = digits()
    y = np.sin(np.arange(COUNT * WIDE)).reshape(COUNT, WIDE)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(WIDE, use_bias=False, kernel_initializer="zeros")])
    model.compile(SGD(1.0), lambda y, predicted: keras.ops.sum(y * predicted, -1))
    hk.distribute(model, **options)
    fit(model, x, y)
    (weight,) = model.get_weights()
    if hk.size() == 1:
        return weight
    rank = model.fit.__self__
    states = [keras.ops.convert_to_numpy(v) for state in rank.reduction._states for v in state]
    (left,) = add_up(states, rank.world)
    assert np.abs(left).max() > 0.01, np.abs(left).max()
    return weight - left.reshape(weight.shape)


def jit_compile():
    model = compiled(jit_compile=True)
    with warnings.catch_warnings(record=True) as caught:
        hk.distribute(model)
    return trained(model, fit(model, *digits())) | {"own/told": np.array([str(w.message) for w in caught])}


def saved():
    """What a plain Keras process is to read, and where it is to come from there with another epoch."""
    x, y = digits()
    model = hk.distribute(compiled(optimizer=Adam(0.01)))
    fit(model, x, y)
    predicted = model.predict(x[:101], verbose=0)
    if hk.rank() == 0:  # and the others do not wait for it
        model.save(FOLDER / "saved.keras")
    model.save(FOLDER / "by_all.keras")
    model.save_weights(FOLDER / "by_all.weights.h5")
    if TENSORFLOW:
        model.export(FOLDER / "exported", verbose=False)
    hk.barrier()
    read = keras.saving.load_model(FOLDER / "by_all.keras")
    for weight, other in zip(model.get_weights(), read.get_weights(), strict=True):
        np.testing.assert_array_equal(other, weight)
    return trained(model, fit(model, x, y, epochs=1), predicted=predicted)
