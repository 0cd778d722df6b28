"""Each compressor on each framework: its law, its figures equal to NumPy, its state in the shapes it began with."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from hvd_train.compression import make
from hvd_train.compression.lowrank import PowerSGD
from hvd_train.compression.quantized import LARGEST_FLOAT16, Int4, Int8
from hvd_train.compression.sparse import LEAST, TopK
from hvd_train.frontends.serial import Serial
from hvd_train.protocol import Packing, TensorSpec
from hvd_train.update.exchange import Exchange
from tests.frontends.test_contract import OPS
from tests.numpy_frontend import NumpyOps
from tests.rank_threads import run_ranks

SHAPES = [(6, 4), (4,), (4, 9), (9,), (16, 16), (3, 3, 8, 8)]
# {name: options}
OPTIONS = {
    "none": {},
    "fp16": {},
    "bf16": {},
    "int8": {},
    "int4": {},
    "topk": {"ratio": 0.1},
    "threshold": {"threshold": 0.6},
    "powersgd": {"rank": 2},
}
COMPRESSORS = {name: partial(make, name, **options) for name, options in OPTIONS.items()}
LOSSY = [name for name in COMPRESSORS if name != "none"]
# Settings under which nothing is left out.
FULL = {
    "topk": partial(make, "topk", ratio=1.0),
    "threshold": partial(make, "threshold", threshold=0.0),
    "powersgd": partial(make, "powersgd", rank=1000),
}


def run(ops, compressor, communicator=None, steps=4, shapes=SHAPES, dtype="float64", scale=1.0):
    """Per step and bucket: (input, old state, decoded, new state) as NumPy arrays."""
    communicator = communicator or Serial()
    specs = [TensorSpec(f"t{i}", shape, dtype) for i, shape in enumerate(shapes)]
    exchange = Exchange(specs, Packing(400, 300), compressor, communicator, ops, small=0)
    states = [tuple(map(ops.from_numpy, state)) for state in exchange.init_state()]
    rng, out = np.random.default_rng(communicator.rank), []
    for _ in range(steps):
        flat = [rng.normal(size=sum(specs[i].size for i in members)) * scale for members in exchange.buckets]
        flat = [g.astype(dtype) for g in flat]
        started = [exchange.start(b, ops.from_numpy(g), states[b]) for b, g in enumerate(flat)]
        decoded, new = exchange.finish(started)
        kept = [[ops.to_numpy(s) for s in state] for state in states], [[ops.to_numpy(s) for s in n] for n in new]
        out.append(list(zip(flat, kept[0], [ops.to_numpy(d) for d in decoded], kept[1], strict=True)))
        states = new
    return out


@pytest.mark.parametrize("framework", OPS)
@pytest.mark.parametrize("name", COMPRESSORS)
def test_law_input_and_old_residual_are_decoded_and_new_residual(framework, name):
    for step in run(OPS[framework](), COMPRESSORS[name]()):
        for gradient, old, decoded, new in step:
            before = old[0].ravel() if old else 0.0
            after = new[0].ravel() if new else 0.0
            np.testing.assert_allclose(gradient + before, decoded + after, atol=1e-12)
            assert [s.shape for s in old] == [s.shape for s in new] and [s.dtype for s in old] == [s.dtype for s in new]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", COMPRESSORS)
def test_law_over_ranks_and_steps(size, name):
    """Sum of all inputs = sum of all that was decoded + the residuals that are left; all ranks decode the same bits."""
    results = run_ranks(size, lambda c: run(NumpyOps(), COMPRESSORS[name](size, c.rank), c, steps=9))
    for b in range(len(results[0][0])):
        inputs = sum(step[b][0] for steps in results for step in steps)
        decoded = sum(step[b][2] for step in results[0])
        residual = sum((steps[-1][b][3][0].ravel() if steps[-1][b][3] else 0.0) for steps in results)
        # What travels as float16 is rounded once more where the ranks' numbers are added.
        tolerance = 0.05 if name == "fp16" else 1e-9
        np.testing.assert_allclose(inputs, decoded + residual, atol=tolerance)
        for steps in results:
            assert all((mine[b][2] == first[b][2]).all() for mine, first in zip(steps, results[0], strict=True))


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
@pytest.mark.parametrize("name", COMPRESSORS)
def test_the_same_figures_in_every_framework(framework, name):
    numpy, other = (run(OPS[f](), COMPRESSORS[name]()) for f in ("numpy", framework))
    for ours, theirs in zip(numpy, other, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a[2], b[2], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("framework", OPS)
@pytest.mark.parametrize("name", FULL)
def test_nothing_left_out_is_the_gradient_itself(framework, name):
    for step in run(OPS[framework](), FULL[name]()):
        for gradient, _, decoded, new in step:
            np.testing.assert_allclose(decoded, gradient, rtol=1e-12)
            assert not any(s.any() for s in new)


@pytest.mark.parametrize("name", LOSSY)
def test_the_others_do_leave_something_out(name):
    """Else the laws above would hold for nothing."""
    last = run(NumpyOps(), COMPRESSORS[name]())[-1]
    assert max(np.abs(new[0]).max() for _, _, _, new in last if new) > {"fp16": 1e-6, "bf16": 1e-5, "int8": 1e-4}.get(
        name, 0.1
    )


@pytest.mark.parametrize("framework", OPS)
@pytest.mark.parametrize("name", COMPRESSORS)
def test_a_gradient_of_zeros_stays_zero_and_finite(framework, name):
    for step in run(OPS[framework](), COMPRESSORS[name](), scale=0.0, dtype="float32"):
        for _, _, decoded, new in step:
            assert not decoded.any() and not (new and new[0].any()) and all(np.isfinite(s).all() for s in new)


@pytest.mark.parametrize("kind", [Int8, Int4])
def test_levels_stay_within_half_a_step(kind):
    for step in run(NumpyOps(), kind(1, 0)):
        for gradient, old, decoded, _ in step:
            total = gradient + old[0]
            assert np.abs(total - decoded).max() <= np.abs(total).max() / (2 * kind.levels) * (1 + 1e-12)


def test_fp16_sums_do_not_overflow_and_nothing_is_lost():
    def work(communicator):
        return run(NumpyOps(), make("fp16", 3), communicator, steps=2, scale=1e6)

    for steps in run_ranks(3, work):
        for step in steps:
            for gradient, old, decoded, new in step:
                assert np.isfinite(decoded).all() and np.abs(decoded).max() <= LARGEST_FLOAT16
                total = gradient + old[0]
                own = total - new[0]
                assert np.abs(own).max() <= LARGEST_FLOAT16 / 3 * 1.001


@pytest.mark.parametrize("framework", OPS)
@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.1])
def test_topk_of_a_large_bucket_sends_about_k_of_the_largest(framework, ratio):
    ops, n = OPS[framework](), 40 * LEAST
    x = np.abs(np.random.default_rng(0).standard_t(3, n))
    exact, estimated = (ops.to_numpy(TopK(ratio, e).chosen(ops.from_numpy(x), n, ops)) for e in (True, False))
    assert len(exact) == round(ratio * n) and x[exact].min() >= np.sort(x)[-len(exact)]
    assert 0.5 * len(exact) <= len(estimated) <= 1.6 * len(exact)
    assert x[estimated].min() > np.delete(x, estimated).max() * (1 - 1e-9), "none that stays behind is larger"


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((64,), None),
        ((4, 4), None),  # 2 (4 + 4) = 16: nothing to gain
        ((100, 30), (100, 30)),
        ((5, 5, 20, 50), (500, 50)),  # TensorFlow's order of a convolution's axes
        ((50, 20, 5, 5), (50, 500)),  # PyTorch's
    ],
)
def test_powersgd_takes_the_cheaper_matrix(shape, expected):
    assert PowerSGD(2).matrix(shape) == expected


@pytest.mark.parametrize("framework", OPS)
def test_bf16_keeps_eight_bits_at_any_size(framework):
    ops = OPS[framework]()
    for scale in (1e-30, 1.0, 1e30):
        for step in run(ops, make("bf16", 1), dtype="float32", scale=scale):
            for gradient, old, decoded, _ in step:
                total = gradient + old[0]
                assert (np.abs(total - decoded) <= np.abs(total) * 2.0**-8).all()


@pytest.mark.parametrize("exact", [True, False], ids=["sorted", "sampled"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["topk", "threshold"])
@pytest.mark.parametrize("framework", OPS)
def test_what_is_no_number_travels(framework, name, bad, exact):
    """It would stay in the residual for ever, and that rank's part of the weight would be 0, without a word."""
    ops = OPS[framework]()
    compressor, x = COMPRESSORS[name](), np.random.default_rng(0).normal(size=LEAST + 1 - 2 * exact).astype("float32")
    x[0] = x[7] = bad
    with np.errstate(invalid="ignore"):
        _, sent = compressor.encode(ops.from_numpy(x), ops)
    assert not np.isfinite(ops.to_numpy(sent)[[0, 7]]).any()
