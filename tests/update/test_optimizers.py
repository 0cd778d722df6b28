"""LARS and LAMB where a norm is 0, and what they are for: a step in proportion to the weight's norm."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_train.config import OptimConfig
from hvd_train.update import layerwise as formulas
from hvd_train.update.layerwise import side_by_side, whole
from tests.numpy_frontend import NumpyOps

OPS = NumpyOps()
W = np.array([[3.0, 0.0], [0.0, 4.0]])  # norm 5
G = np.array([[0.0, 0.6], [0.8, 0.0]])  # norm 1
ZERO = np.zeros_like(W)
ONE = np.float64(1)  # the first step


def lars(w, g, m, *given):
    return side_by_side([formulas.lars(w, g, [m], ONE, *given)], whole)[0]


def lamb(w, g, m, v, *given):
    return side_by_side([formulas.lamb(w, g, [m, v], *given)], whole)[0]


def options(name, **keys):
    return OptimConfig(name=name, **{"eps": 1e-12} | keys)


def test_a_lars_step_is_a_share_of_the_weights_norm():
    o = options("lars", trust_coefficient=0.01, momentum=0.5)
    for scale in (1e-6, 1.0, 1e6):
        step, m = lars(W, scale * G, ZERO, 2.0, o, OPS)
        np.testing.assert_allclose(step, 2.0 * 0.01 * 5 * G, rtol=1e-5)
        np.testing.assert_allclose(lars(W, scale * G, m, 2.0, o, OPS)[0], 1.5 * step, rtol=1e-12)


def test_a_lamb_step_is_as_long_as_the_weight():
    o = options("lamb", weight_decay=0.1)
    for scale in (1e-3, 1.0, 1e3):
        step, m, v = lamb(W, scale * G, ZERO, ZERO, ONE, 0.2, o, OPS)
        assert np.linalg.norm(step) == pytest.approx(0.2 * 5)
        np.testing.assert_allclose(m, 0.1 * scale * G)
        np.testing.assert_allclose(v, 0.001 * (scale * G) ** 2)


def test_eps_keeps_a_quotient_finite():
    """In the ratio of LARS, and beside the root of LAMB's bias-corrected mean of squares."""
    o = options("lars", trust_coefficient=0.01, weight_decay=0.1, eps=0.5)
    np.testing.assert_allclose(lars(W, G, ZERO, 2.0, o, OPS)[0], 2.0 * 0.01 * 5 / (1 + 0.1 * 5 + 0.5) * (G + 0.1 * W))
    step, *_ = lamb(W, G, ZERO, ZERO, ONE, 0.2, options("lamb", eps=0.5), OPS)
    u = G / (abs(G) + 0.5)
    np.testing.assert_allclose(step, 0.2 * 5 * u / np.linalg.norm(u))


@pytest.mark.parametrize(("w", "g"), [(ZERO, G), (W, ZERO), (ZERO, ZERO)])
def test_the_ratio_is_1_where_a_norm_is_0(w, g):
    step, _ = lars(w, g, ZERO, 0.5, options("lars", weight_decay=0.1), OPS)
    np.testing.assert_allclose(step, 0.5 * (g + 0.1 * w))
    step = lamb(w, g, ZERO, ZERO, ONE, 0.5, options("lamb"), OPS)[0]
    np.testing.assert_allclose(step, 0.5 * np.sign(g), atol=1e-9)


def test_biases_have_no_ratio_and_no_decay():
    w, g = np.array([3.0, 4.0]), np.array([1.0, -2.0])
    zero = np.zeros(2)
    np.testing.assert_allclose(lars(w, g, zero, 0.5, options("lars", weight_decay=0.1), OPS)[0], 0.5 * g)
    np.testing.assert_allclose(
        lamb(w, g, zero, zero, ONE, 0.5, options("lamb", weight_decay=0.1), OPS)[0], 0.5 * np.sign(g)
    )
