"""Statistics from parts are those of the whole, whatever the parts; few values leave the running ones alone."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_train.core.batchnorm import combine, running
from tests.numpy_frontend import NumpyOps

OPS = NumpyOps()


def row(x):
    """One rank's part of x (values, C)."""
    if not len(x):
        return np.zeros(1 + 2 * x.shape[1])
    return np.concatenate([[len(x)], x.mean(axis=0), ((x - x.mean(axis=0)) ** 2).sum(axis=0)])


@pytest.mark.parametrize("cuts", [[], [3], [0, 1], [5, 5, 11], [1, 2, 3, 11]])
@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_parts_make_the_whole(cuts, offset):
    """A mean of 1e6 deviations would leave 4 digits of E[x^2] - E[x]^2."""
    x = np.random.default_rng(0).normal(size=(11, 3))
    total, mean, variance = combine(np.stack([row(part) for part in np.split(x + offset, cuts)]), OPS)
    assert total.tolist() == [11]
    np.testing.assert_allclose(mean - offset, x.mean(axis=0), rtol=0, atol=1e-15 * max(offset, 1) * 2)
    np.testing.assert_allclose(variance, x.var(axis=0), rtol=1e-9)


def test_nothing_is_finite_and_moves_nothing():
    total, mean, variance = combine(np.zeros((2, 7)), OPS)
    assert not total.any() and not mean.any() and not variance.any()
    old = np.full(3, 2.0), np.full(3, 5.0)
    assert [x.tolist() for x in running(old, total, mean, variance, 0.1, OPS)] == [[2.0] * 3, [5.0] * 3]
    one = combine(row(np.ones((1, 3)))[None], OPS)
    assert [x.tolist() for x in running(old, *one, 0.1, OPS)] == [[2.0] * 3, [5.0] * 3]


def test_the_running_variance_is_unbiased():
    x = np.random.default_rng(1).normal(size=(5, 3))
    mean, variance = running((np.zeros(3), np.ones(3)), *combine(row(x)[None], OPS), 0.1, OPS)
    np.testing.assert_allclose(mean, 0.1 * x.mean(axis=0))
    np.testing.assert_allclose(variance, 0.9 + 0.1 * x.var(axis=0, ddof=1))
