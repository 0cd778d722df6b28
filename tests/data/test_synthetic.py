"""Made-up samples are a pure function of the index, and take no memory."""

import tracemalloc

import numpy as np

from hvd_train.data.synthetic import Synthetic
from tests.data.files import everything, opened, taken


def test_synthetic_is_a_function_of_the_index():
    data = opened("synthetic", num_samples=1000, input_shape=[5, 3, 2], num_classes=4)
    inputs, labels = everything(data.train)
    assert np.array_equal(taken(data.train, np.array([7, 3, 7]))[0], inputs[[7, 3, 7]])
    assert 0 <= inputs.min() < 0.1 < 0.9 < inputs.max() <= 1
    assert (len(data.val), data.sample.num_classes) == (200, 4)
    flat = np.concatenate([inputs, everything(data.val)[0]]).reshape(1200, -1)
    assert len(np.unique(flat, axis=0)) == 1200
    means = np.stack([inputs[labels == k].mean(0).ravel() for k in range(4)])
    held, truth = everything(data.val)
    nearest = ((held.reshape(200, 1, -1) - means) ** 2).sum(-1).argmin(1)
    assert (nearest == truth).mean() > 0.95


def test_synthetic_takes_no_memory():
    tracemalloc.start()
    data = opened("synthetic", num_samples=10**9)
    inputs, labels = taken(data.train, np.array([0, 10**9 - 1]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20
    assert len(data.train) == 10**9
    assert np.array_equal(taken(Synthetic(5, [4, 4, 1], 10, start=10**9 - 1), np.zeros(1, np.int64))[0], inputs[1:])
