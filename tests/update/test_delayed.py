"""Gradients that are applied later: against NumPy, against synchronous training, and where they stop converging."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hvd_train.compression import make
from hvd_train.config import ExchangeConfig
from hvd_train.frontends.serial import Serial
from hvd_train.protocol import Placement
from hvd_train.update import make_update
from hvd_train.update.clip import Clip
from hvd_train.update.exchange import Exchange
from hvd_train.update.state import read
from tests.numpy_frontend import NumpyFrontEnd
from tests.rank_threads import run_ranks

RATE, MOMENTUM = 0.1, 0.9


class Quadratic(NumpyFrontEnd):
    """The weights alone: a test gives gradients."""

    def step(self, gradients, rate=RATE):
        flats = self.update.exchange.to_buckets([gradients[n] for n in self.w])
        self.update.step(self.update.reduce(flats), rate)
        self.update.begin()


def connected(communicator=None, clip=0.0, momentum=MOMENTUM, compression="none", **options):
    frontend = Quadratic.of(communicator or Serial(), 5, 3, momentum=momentum)
    for name, x in frontend.w.items():  # the same on all ranks
        frontend.w[name] = np.linspace(-1, 1, x.size).reshape(x.shape)

    def build(over):
        compressor = make(compression, over.size, over.rank, **({"ratio": 0.2} if compression == "topk" else {}))
        return Exchange(frontend.specs(), frontend.packing, compressor, over, frontend.ops, Clip(clip), small=0)

    return make_update(ExchangeConfig(**options), frontend, build, Serial()), frontend


def gradients_of(frontend, step, rank=0):
    rng = np.random.default_rng((step, rank))
    return {n: rng.normal(size=x.shape) for n, x in frontend.w.items()}


def tree(update, frontend):
    update.finish_transfers()
    return frontend.state() | read(update.state(), Placement.REPLICATED)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize(("delay", "compensation"), [(0, 0.0), (1, 0.0), (1, 0.5), (2, 0.0), (3, 0.5)])
def test_it_is_the_formula_on_any_number_of_ranks(ranks, delay, compensation, clip):
    """Eight steps of momentum, written out: w_{t+1} from c(g_{t-d}), g the clipped sum over the ranks."""

    def work(communicator):
        options = {"mode": "delayed", "delay": delay, "compensation": compensation}
        update, frontend = connected(communicator, clip, **options)
        for step in range(8):
            frontend.step(gradients_of(frontend, step, communicator.rank), RATE / (step + 1))
        return frontend.w

    results = run_ranks(ranks, work)
    _, start = connected()
    w = np.concatenate([x.ravel() for x in start.w.values()])
    sums, weights, slot = [], [], 0.0
    for step in range(8):
        parts = [gradients_of(start, step, rank) for rank in range(ranks)]
        g = np.concatenate([sum(part[n] for part in parts).ravel() for n in start.w])
        sums.append(g * min(1, clip / (np.linalg.norm(g) + 1e-6)) if clip else g)
        weights.append(w)
        if step >= delay:
            due, then = sums[step - delay], weights[step - delay]
            slot = MOMENTUM * slot + due + compensation * due**2 * (w - then)
            w = w - RATE / (step + 1) * slot
    for found in results:
        np.testing.assert_allclose(np.concatenate([x.ravel() for x in found.values()]), w, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("compression", ["none", "topk"])
def test_without_a_delay_it_is_synchronous_bit_for_bit(ranks, compression):
    def work(communicator, **options):
        update, frontend = connected(communicator, 0.5, compression=compression, **options)
        for step in range(5):
            frontend.step(gradients_of(frontend, step, communicator.rank))
        return tree(update, frontend) | read(update.state(), Placement.PER_RANK)

    plain = run_ranks(ranks, work)
    for a, b in zip(plain, run_ranks(ranks, lambda c: work(c, mode="delayed", delay=0)), strict=True):
        assert a.keys() == b.keys() and all((a[k] == b[k]).all() for k in a)


@pytest.mark.parametrize("delay", [0, 1, 2, 3])
def test_it_converges_below_the_rate_that_theory_gives_and_not_above(delay):
    """On a w^2 / 2, w -= eta a w_{t-d} converges iff eta a < 2 sin(pi / (4 d + 2)): 2, 1, 0.618, 0.445."""
    limit = 2 * math.sin(math.pi / (4 * delay + 2))
    assert last(delay, 0.98 * limit) < 1e-3 and last(delay, 1.02 * limit) > 1e3


@pytest.mark.parametrize("momentum", [0.5, 0.9])
def test_momentum_lowers_the_rate_below_which_a_delay_of_one_converges(momentum):
    """z^2 - (1 + m) z + m + eta a has both roots within the unit circle iff eta a < 1 - m; without delay 2 (1 + m)."""
    limit = 1 - momentum
    assert last(1, 0.95 * limit, momentum) < 1e-3 and last(1, 1.05 * limit, momentum) > 1e3
    assert last(0, 0.98 * 2 * (1 + momentum), momentum) < 1e-3


def last(delay, rate, momentum=0.0):
    """Return the largest weight after 4000 steps on a w^2 / 2 with ``rate`` / a."""
    _, frontend = connected(momentum=momentum, mode="delayed", delay=delay)
    curvature = 3.0
    for _ in range(4000):
        frontend.step({n: curvature * x for n, x in frontend.w.items()}, rate / curvature)
    return max(np.abs(x).max() for x in frontend.w.values())


def test_the_first_steps_apply_nothing():
    update, frontend = connected(mode="delayed", delay=2)
    before = frontend.state()
    for step in range(2):
        frontend.step(gradients_of(frontend, step))
        after = tree(update, frontend)
        assert all((before[k] == after[k]).all() for k in before) and not after["slots/momentum/w"].any()
        assert after["under_way/steps"] == step + 1
    frontend.step(gradients_of(frontend, 2))
    assert (frontend.w["w"] != before["weights/w"]).any()


@pytest.mark.parametrize("compression", ["none", "fp16", "int8", "topk"])
@pytest.mark.parametrize("compensation", [0.0, 0.5])
@pytest.mark.parametrize("delay", [1, 2])
def test_what_is_under_way_goes_on_from_its_entries(delay, compensation, compression):
    """After each of six steps: to settle changes no number, and a new training that loads the entries goes on alike."""
    options = {"mode": "delayed", "delay": delay, "compensation": compensation, "compression": compression}

    def work(communicator):
        update, frontend = connected(communicator, 0.5, **options)
        trees, saved = [], []
        for step in range(6):
            frontend.step(gradients_of(frontend, step, communicator.rank))
        trees.append(tree(update, frontend) | read(update.state(), Placement.PER_RANK))
        for cut in range(6):
            update, frontend = connected(communicator, 0.5, **options)
            for step in range(6):
                frontend.step(gradients_of(frontend, step, communicator.rank))
                if step == cut:
                    saved = tree(update, frontend), read(update.state(), Placement.PER_RANK)
                    update, frontend = connected(communicator, 0.5, **options)
                    for piece in ({key: x} for key, x in saved[0].items()):
                        frontend.load(piece)
                        update.load(piece, Placement.REPLICATED)
                    update.load(saved[1], Placement.PER_RANK)
            trees.append(tree(update, frontend) | read(update.state(), Placement.PER_RANK))
        return trees

    for first, *others in run_ranks(2, work):
        for other in others:
            assert first.keys() == other.keys() and all((first[k] == other[k]).all() for k in first)
