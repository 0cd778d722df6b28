"""Each compressor on each framework: its law, its figures equal to NumPy, its state in the shapes it began with."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_train.compression import make
from hvd_train.core.exchange import Exchange
from hvd_train.frontends.serial import Serial
from hvd_train.protocol import Packing, TensorSpec
from tests.frontends.test_contract import OPS
from tests.toys import PowerSGD, Threshold

SPECS = [TensorSpec(f"t{i}", shape, "float64") for i, shape in enumerate([(6, 4), (4,), (4, 9), (9,)])]
COMPRESSORS = {
    "none": lambda: make("none"),
    "toy threshold": lambda: Threshold(0.6),
    "toy powersgd": lambda: PowerSGD(2),
}


def run(framework, name, steps=4):
    """Per step: {bucket: (input, old state, decoded, new state)} as NumPy arrays."""
    ops = OPS[framework]()
    exchange = Exchange(SPECS, Packing(400, 300), COMPRESSORS[name](), Serial(), ops)
    states = [tuple(map(ops.from_numpy, state)) for state in exchange.initial()]
    rng, out = np.random.default_rng(3), []
    for _ in range(steps):
        flat = [rng.normal(size=sum(SPECS[i].size for i in members)) for members in exchange.buckets]
        # In place on purpose (the PyTorch verb is): what is compared below must be a copy.
        started = [exchange.start(b, ops.from_numpy(g), states[b]) for b, g in enumerate(flat)]
        decoded, new = exchange.finish(started)
        out.append(
            [
                (g, [ops.to_numpy(s) for s in old], ops.to_numpy(d), [ops.to_numpy(s) for s in fresh])
                for g, old, d, fresh in zip(flat, states, decoded, new, strict=True)
            ]
        )
        states = new
    return out


@pytest.mark.parametrize("framework", OPS)
@pytest.mark.parametrize("name", COMPRESSORS)
def test_law_input_and_old_residual_are_decoded_and_new_residual(framework, name):
    for step in run(framework, name):
        for gradient, old, decoded, new in step:
            before = old[0].ravel() if old else 0.0
            after = new[0].ravel() if new else 0.0
            np.testing.assert_allclose(gradient + before, decoded + after, atol=1e-12)
            assert [s.shape for s in old] == [s.shape for s in new]


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
@pytest.mark.parametrize("name", COMPRESSORS)
def test_the_same_figures_in_every_framework(framework, name):
    for ours, theirs in zip(run("numpy", name), run(framework, name), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a[2], b[2], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("framework", OPS)
def test_none_sends_the_gradient_itself_and_keeps_nothing(framework):
    for step in run(framework, "none"):
        for gradient, old, decoded, new in step:
            assert (gradient == decoded).all() and old == new == []


@pytest.mark.parametrize("name", ["toy threshold", "toy powersgd"])
def test_the_toys_do_drop_something(name):
    """Else the laws above would hold for nothing."""
    assert any(np.abs(new[0]).max() > 0.1 for step in run("numpy", name) for _, _, _, new in step if new)
