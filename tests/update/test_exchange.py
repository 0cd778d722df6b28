"""Buckets hold every tensor once; what goes in comes out summed, whatever the compressor and the order of starts."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_train.compression import make
from hvd_train.compression.lowrank import PowerSGD
from hvd_train.compression.sparse import Threshold
from hvd_train.frontends.serial import Serial
from hvd_train.protocol import Packing, TensorSpec
from hvd_train.update.buckets import plan
from hvd_train.update.clip import Clip
from hvd_train.update.error_meter import compression_error
from hvd_train.update.exchange import Exchange
from hvd_train.update.overlap import Overlap
from tests.numpy_frontend import NumpyOps
from tests.rank_threads import run_ranks

SHAPES = [(3, 4), (4,), (100, 30), (30,), (5, 2, 2), (2,), (1,)]
SPECS = [TensorSpec(f"t{i}", shape, "float64") for i, shape in enumerate(SHAPES)]
MIXED = [TensorSpec(f"t{i}", shape, "float32" if i % 2 else "float64") for i, shape in enumerate(SHAPES)]


@pytest.mark.parametrize("specs", [SPECS, MIXED, SPECS[:1]])
@pytest.mark.parametrize("bucket", [0, 1, 200, 1 << 20])
@pytest.mark.parametrize("alone", [0, 100, 1 << 20])
def test_every_tensor_is_in_one_bucket(specs, bucket, alone):
    buckets = plan(specs, Packing(bucket, alone))
    assert sorted(i for members in buckets for i in members) == list(range(len(specs)))
    for members in buckets:
        assert len({specs[i].dtype for i in members}) == 1
        size = sum(specs[i].nbytes for i in members)
        assert len(members) == 1 or (size <= bucket and all(specs[i].nbytes < alone for i in members))
        assert list(members) == sorted(members, reverse=True), "backward finishes the last layers first"


def test_one_large_bucket_where_all_fit():
    assert plan(SPECS, Packing(1 << 20, 1 << 20)) == (tuple(reversed(range(len(SPECS)))),)


@pytest.fixture(autouse=True)
def small_buckets(request, monkeypatch):
    """What is compressed lies in buckets of the packing under test as well; these tensors would all fit into one."""
    given = getattr(request.node, "callspec", None)
    packing = given.params.get("packing", PACKINGS[1]) if given else PACKINGS[1]
    monkeypatch.setattr("hvd_train.update.exchange.COMPRESSED", packing)


def exchanged(communicator, compressor, packing, steps=3, clip=None, reverse=False, small=0):
    """Reduced gradients of some steps, and the law's two sides on this rank."""
    ops = NumpyOps()
    exchange = Exchange(SPECS, packing, compressor, communicator, ops, clip, small=small)
    states = [tuple(map(np.array, s)) for s in exchange.init_state()]
    rng = np.random.default_rng(communicator.rank)
    out, total = [], [0.0] * len(SPECS)
    for _ in range(steps):
        gradients = [rng.normal(size=shape) for shape in SHAPES]
        total = [a + g for a, g in zip(total, gradients, strict=True)]
        order = range(len(exchange.buckets))
        started = []
        for b in reversed(order) if reverse else order:
            flat = np.concatenate([gradients[i].ravel() for i in exchange.buckets[b]])
            started.append(exchange.start(b, flat, states[b]))
        reduced, states = exchange.finish(started)
        tree = {}
        for members, flat in zip(exchange.buckets, reduced, strict=True):
            ends = np.cumsum([SPECS[i].size for i in members])
            tree |= {i: p.reshape(SHAPES[i]) for i, p in zip(members, np.split(flat, ends[:-1]), strict=True)}
        out.append(tree)
    return total, out, states


PACKINGS = [Packing(1 << 20, 1 << 20), Packing(200, 100), Packing(0, 0)]
COMPRESSORS = {
    "none": lambda: make("none"),
    "threshold": lambda: Threshold(0.5),
    "full threshold": lambda: Threshold(-1.0),
    "powersgd": lambda: PowerSGD(2),
    "full powersgd": lambda: PowerSGD(100),
}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("name", ["none", "full threshold", "full powersgd"])
def test_nothing_dropped_gives_the_sum(size, packing, name):
    results = run_ranks(size, lambda c: exchanged(c, COMPRESSORS[name](), packing))
    expected = [sum(result[0][i] for result in results) for i in range(len(SPECS))]
    for _, out, _ in results:
        for i in range(len(SPECS)):
            np.testing.assert_allclose(sum(tree[i] for tree in out), expected[i], rtol=1e-9, atol=1e-12)
            assert all((mine[i] == first[i]).all() for mine, first in zip(out, results[0][1], strict=True))


@pytest.mark.parametrize("name", list(COMPRESSORS))
def test_order_of_starts_does_not_matter(name):
    forward, backward = (exchanged(Serial(), COMPRESSORS[name](), PACKINGS[2], reverse=r)[1] for r in (False, True))
    for a, b in zip(forward, backward, strict=True):
        assert all((a[i] == b[i]).all() for i in a)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("seed", range(5))
def test_a_bucket_starts_with_its_last_gradient_or_at_the_end(packing, seed):
    exchange = Exchange(SPECS, packing, make("none"), Serial(), NumpyOps())
    states, rng = exchange.init_state(), np.random.default_rng(seed)
    flats = [rng.normal(size=sum(SPECS[i].size for i in members)) for members in exchange.buckets]
    began: list[int] = []
    overlap = Overlap(exchange, lambda b: (began.append(b), exchange.start(b, flats[b], states[b]))[1])
    last = overlap.bucket[0]
    for reached in (len(SPECS), 4, 0):  # once more after each pass: gradients that come twice, some that never do
        there, began[:] = set(), []
        for i in rng.permutation(len(SPECS))[:reached].tolist() * 2:
            there.add(i)
            complete = there >= set(exchange.buckets[overlap.bucket[i]]) and overlap.bucket[i] not in overlap.started
            assert overlap.arrived(i) == (overlap.bucket[i] if complete else None)
        early = list(began)
        assert set(early) == {b for b, members in enumerate(exchange.buckets) if there >= set(members)}
        reduced, _ = overlap.finish(last)
        late = [b for b in range(len(flats)) if b not in early]
        assert began == early + sorted(late, key=lambda b: b == last) and not overlap.started
        assert all((a == b).all() for a, b in zip(reduced, flats, strict=True))
    overlap.arrived(0)
    overlap.begin()  # an error ended that pass
    reduced, _ = overlap.finish(start=lambda b: exchange.start(b, 2 * flats[b], states[b]))
    assert all((a == 2 * b).all() for a, b in zip(reduced, flats, strict=True))


@pytest.mark.parametrize("limit", [1e-3, 1.0, 1e6])
@pytest.mark.parametrize("packing", PACKINGS)
def test_clipping_bounds_the_reduced_gradient(limit, packing):
    plain = exchanged(Serial(), make("none"), packing, 1)[1][0]
    norm = np.sqrt(sum((g**2).sum() for g in plain.values()))
    by_norm = exchanged(Serial(), make("none"), packing, 1, Clip(limit))[1][0]
    by_value = exchanged(Serial(), make("none"), packing, 1, Clip(limit, "value"))[1][0]
    for i, g in plain.items():
        np.testing.assert_allclose(by_norm[i], g * min(1.0, limit / (norm + 1e-6)), rtol=1e-12)
        assert (by_value[i] == np.clip(g, -limit, limit)).all()


def test_a_zero_gradient_stays_zero_when_clipped():
    assert Clip(1.0)([np.zeros(3)], NumpyOps())[0].tolist() == [0, 0, 0]


@pytest.mark.parametrize("bucket", [0, 200, 1 << 20])
@pytest.mark.parametrize("small", [1, 13, 5000])
def test_small_tensors_stand_in_buckets_of_their_own(bucket, small):
    buckets = plan(SPECS, Packing(bucket, 100), small)
    assert sorted(i for members in buckets for i in members) == list(range(len(SPECS)))
    for members in buckets:
        assert len({SPECS[i].size < small for i in members}) == 1
    assert sum(all(SPECS[i].size < small for i in members) for members in buckets) <= 1, "and in one, if they fit"


def test_small_tensors_travel_plain():
    """A compressor that would drop everything drops the large tensors alone."""
    results = run_ranks(2, lambda c: exchanged(c, Threshold(1e9), PACKINGS[0], steps=1, small=100))
    for i, spec in enumerate(SPECS):
        expected = sum(inputs[i] for inputs, _, _ in results)
        for _, (tree,), _ in results:
            np.testing.assert_allclose(tree[i], expected if spec.size < 100 else 0 * expected, atol=1e-12)


@pytest.mark.parametrize("bad_rank", [None, 0, 2])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_all_ranks_hear_of_a_gradient_that_is_not_finite(bad_rank, value):
    def work(communicator):
        exchange = Exchange(SPECS, PACKINGS[0], make("none"), communicator, NumpyOps())
        gradients = [np.ones(4), np.ones(3)]
        if communicator.rank == bad_rank:
            gradients[1][1] = value
        return float(exchange.failures(gradients)[0])

    assert run_ranks(3, work) == [0.0 if bad_rank is None else 1.0] * 3


@pytest.mark.parametrize("name", list(COMPRESSORS))
@pytest.mark.parametrize("size", [1, 3])
def test_the_compression_error_compares_with_the_exact_sum_and_changes_nothing(name, size):
    def work(communicator):
        exchange = Exchange(SPECS, PACKINGS[0], COMPRESSORS[name](), communicator, NumpyOps(), Clip(1e-3), small=13)
        states = [tuple(map(np.array, s)) for s in exchange.init_state()]
        rng = np.random.default_rng(communicator.rank)
        gradients = [rng.normal(size=sum(SPECS[i].size for i in members)) for members in exchange.buckets]
        before = [g.copy() for g in gradients], [[x.copy() for x in s] for s in states]
        figures = compression_error(exchange, gradients, states)
        assert all((a == b).all() for a, b in zip(gradients, before[0], strict=True))
        assert all((x == y).all() for s, t in zip(states, before[1], strict=True) for x, y in zip(s, t, strict=True))
        return gradients, figures

    results = run_ranks(size, work)
    exact = np.concatenate([sum(parts) for parts in zip(*(g for g, _ in results), strict=True)])
    for _, (dot, exact2, decoded2, sent, plain) in results:
        assert exact2 == pytest.approx((exact**2).sum())
        assert plain == exact.nbytes
        cosine = dot / np.sqrt(exact2 * decoded2)
        if name == "none" or name.startswith("full"):
            assert cosine == pytest.approx(1) and decoded2 == pytest.approx(exact2)
        else:
            assert 0.1 < cosine < 0.9999
        if name == "powersgd":
            assert sent < plain
