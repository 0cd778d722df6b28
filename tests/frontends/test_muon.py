"""Muon: matrices as Keras' Muon and torch's, all other tensors as torch's AdamW."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_train.config import OptimConfig, load_config
from hvd_train.errors import ConfigError
from hvd_train.update.muon import orthogonal
from tests.frontends.test_contract import FRAMEWORKS
from tests.frontends.test_kernels import MOVED
from tests.numpy_frontend import NumpyOps

SHAPES = [(6, 4), (4, 6), (5, 5), (1, 7)]
RATES = (0.0625, 0.03125, 0.0625)
OPTIONS = {
    nesterov: OptimConfig(name="muon", momentum=0.95, nesterov=nesterov, weight_decay=0.125)
    for nesterov in (False, True)
}


def drawn(shape):
    rng = np.random.default_rng(0)
    return rng.normal(size=shape), [rng.normal(size=shape) for _ in RATES]


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_come_near_one_and_vectors_stay(shape):
    x = drawn(shape)[0]
    u, _, v = np.linalg.svd(x, full_matrices=False)
    found = u.T @ orthogonal(x, NumpyOps()) @ v.T
    np.testing.assert_allclose(found, np.diag(np.diag(found)), atol=1e-9)
    assert np.diag(found).min() > 0.5 and np.diag(found).max() < 1.3
    np.testing.assert_allclose(orthogonal(x.T, NumpyOps()).T, orthogonal(x, NumpyOps()), rtol=1e-9, atol=1e-12)
    assert not orthogonal(np.zeros(shape), NumpyOps()).any()


def by_keras(options, weight, gradients):
    import keras

    before = keras.config.floatx()
    keras.config.set_floatx("float64")  # of the learning rate, too
    try:
        variable = keras.Variable(weight)
        decay = options.weight_decay
        optimizer = keras.optimizers.Muon(
            RATES[0], momentum=options.momentum, nesterov=options.nesterov, weight_decay=decay
        )
        for g, rate in zip(gradients, RATES, strict=True):
            optimizer.learning_rate = rate
            optimizer.apply([keras.ops.convert_to_tensor(g)], [variable])
        return keras.ops.convert_to_numpy(variable)
    finally:
        keras.config.set_floatx(before)


def by_torch(kind, weight, gradients, **keys):
    import torch

    p = torch.nn.Parameter(torch.tensor(weight))
    optimizer = getattr(torch.optim, kind)([p], lr=RATES[0], **keys)
    for g, rate in zip(gradients, RATES, strict=True):
        p.grad = torch.tensor(g)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    return p.detach().numpy()


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("nesterov", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_matrices_move_as_those_of_keras_and_torch(framework, nesterov, shape):
    weight, gradients = drawn(shape)
    options = OPTIONS[nesterov]
    moved, _ = MOVED[framework](options, weight, gradients, RATES)
    np.testing.assert_allclose(moved, by_keras(options, weight, gradients), rtol=1e-9, atol=1e-12)
    keys = {"momentum": 0.95, "nesterov": nesterov, "weight_decay": 0.125, "adjust_lr_fn": "match_rms_adamw"}
    other = by_torch("Muon", weight, gradients, **keys)
    # torch's products are in bfloat16, of 8 bits.
    assert np.linalg.norm(moved - other) < 0.03 * np.linalg.norm(moved - weight)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("shape", [(7,), (2, 3, 4), (2, 3, 4, 5)])
def test_all_others_move_by_adamw(framework, shape):
    weight, gradients = drawn(shape)
    moved, _ = MOVED[framework](OPTIONS[True], weight, gradients, RATES)
    np.testing.assert_allclose(moved, by_torch("AdamW", weight, gradients, weight_decay=0.125), rtol=1e-10, atol=1e-12)


def test_muon_needs_momentum():
    with pytest.raises(ConfigError, match=r"optim.momentum: muon needs one, for example 0\.95"):
        load_config(None, ["optim.name=muon"])
