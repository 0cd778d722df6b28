"""Running statistics of all samples by one pass: those of NumPy, in both frameworks, with padding and a last batch."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_train.compression import make
from hvd_train.update.exchange import Exchange
from hvd_train.update.replicated import Replicated
from tests.frontends.test_contract import FRAMEWORKS, batch, everything, load, opened, same, weights

OWN = {"pytorch": "tests.own_models:pytorch_norm", "tensorflow": "tests.own_models:keras_norm"}
SHAPE = (6, 6, 1)
COUNTS = (6, 6, 1)  # samples of each batch; the others are padding


def passed(framework, first=None):
    frontend = opened(framework, {"name": OWN[framework]}, shape=SHAPE)
    if first:
        load(frontend, first)
    before = weights(frontend)
    batches = [batch(k, count=count, shape=SHAPE) for k, count in enumerate(COUNTS)]
    for _ in range(2):  # nothing of the first pass is in the second
        assert frontend.begin_statistics()
        for one in batches:
            frontend.add_statistics(frontend.to_device(one))
        frontend.take_statistics()
    assert same(weights(frontend), before)
    return frontend, batches


def by_numpy(frontend, batches):
    """(mean, variance) of the convolution's outputs over all samples."""
    x = np.concatenate([one.inputs["input"][: len(one.indices)] for one in batches])[..., 0].astype(np.float64)
    (kernel,) = [v for k, v in weights(frontend).items() if k.startswith("weights/conv")]
    kernel = kernel[:, :, 0].transpose(2, 0, 1)  # canonical: (height, width, in, out)
    windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(1, 2))
    out = np.einsum("nhwij,oij->onhw", windows, kernel).reshape(6, -1)
    return out.mean(1), out.var(1, ddof=1)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_they_are_those_of_all_samples(framework):
    frontend, batches = passed(framework)
    found = {k: x for k, x in everything(frontend).items() if k.startswith("statistics/")}
    for (_, x), expected in zip(sorted(found.items()), by_numpy(frontend, batches), strict=True):  # mean, variance
        np.testing.assert_allclose(x, expected, rtol=1e-10, atol=1e-13)
    # Afterwards a step moves them as ever.
    frontend.train_step(frontend.to_device(batches[0]), 1 / 6, 0, 0.1)
    moved = everything(frontend)
    assert all((moved[k] != x).all() for k, x in found.items())


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_batch_with_a_nan_is_left_out(framework):
    """Training leaves such steps out with ``on_nonfinite: skip``; one of them would spoil the whole mean at its end."""
    frontend, (first, bad, last) = passed(framework)
    bad.inputs["input"][2, 0, 0] = np.nan

    def gathered(batches):
        assert frontend.begin_statistics()
        for one in batches:
            frontend.add_statistics(frontend.to_device(one))
        frontend.take_statistics()
        return [x for k, x in sorted(everything(frontend).items()) if k.startswith("statistics/")]

    for batches in ([first, bad, last], [bad, first, last]):
        for x, expected in zip(gathered(batches), by_numpy(frontend, [first, last]), strict=True):
            np.testing.assert_allclose(x, expected, rtol=1e-10, atol=1e-13)
    before = gathered([first, last])
    assert all((x == y).all() for x, y in zip(gathered([bad]), before, strict=True)), "no sample is left"


def test_a_model_without_such_layers_has_none():
    assert not any(opened(framework).begin_statistics() for framework in FRAMEWORKS)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_layers_whose_statistics_are_fixed_keep_theirs(framework):
    frontend = opened(framework, {"name": OWN[framework]}, shape=SHAPE, connect=False)
    names = [spec.name for spec in frontend.specs() if spec.name.startswith("norm")]
    frontend.freeze(names, names)
    Replicated(
        frontend,
        Exchange(frontend.specs(), frontend.packing, make("none"), frontend.groups.data, frontend.ops, small=0),
    )
    assert names and not frontend.begin_statistics()
