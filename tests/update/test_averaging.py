"""Which weights are averaged when: every weight in turn, and all of them with fraction 1 or every step."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_train.compression import make
from hvd_train.config import ExchangeConfig
from hvd_train.frontends.serial import Serial
from hvd_train.protocol import Placement, TensorSpec
from hvd_train.update import make_update
from hvd_train.update.exchange import Exchange
from hvd_train.update.partial import parts
from hvd_train.update.state import read
from tests.numpy_frontend import NumpyFrontEnd
from tests.rank_threads import run_ranks

SPECS = [TensorSpec(f"t{i}", (n,), "float32") for i, n in enumerate((100, 1, 50, 200, 3, 3, 400, 10))]
NAMES = [spec.name for spec in SPECS]


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.25, 0.3, 0.5, 1.0])
def test_every_weight_is_in_one_part(fraction):
    found = parts(SPECS, fraction)
    assert [name for part in found for name in part] == NAMES
    assert len(found) <= -(-1 // fraction)


def test_equal_tensors_make_equal_parts():
    specs = [TensorSpec(str(i), (10,), "float32") for i in range(12)]
    assert [len(part) for part in parts(specs, 0.25)] == [3, 3, 3, 3]


def connected(communicator, **options):
    """(update, its front-end, the communicators that exchanges were built over)."""
    frontend, over = NumpyFrontEnd.of(communicator, 5, 3), []

    def build(one):
        over.append(one)
        op = "adasum" if options.get("op") == "adasum" else "sum"
        return Exchange(frontend.specs(), frontend.packing, make("none"), one, frontend.ops, op=op)

    return make_update(ExchangeConfig(**options), frontend, build, Serial()), frontend, over


@pytest.mark.parametrize("fraction", [0.1, 0.25, 1.0])
def test_partial_goes_round(fraction):
    partial, *_ = connected(Serial(), mode="partial", partial_fraction=fraction)
    cycle = len(parts(SPECS, fraction))
    for first in (1, 5, 1000):
        seen = [name for step in range(first, first + cycle) for name in partial.due(SPECS, step)]
        assert sorted(seen) == sorted(NAMES)


@pytest.mark.parametrize("every", [1, 3])
def test_local_sgd_averages_all_every_so_many_steps(every):
    local, *_ = connected(Serial(), mode="local_sgd", local_steps=every)
    for step in range(1, 10):
        assert local.due(SPECS, step) == (NAMES if step % every == 0 else [])


@pytest.mark.parametrize(
    ("mode", "op", "travel", "own"),
    [
        ("allreduce", "average", True, False),
        ("allreduce", "adasum", True, True),
        ("partial", "average", False, True),
        ("local_sgd", "average", False, True),
    ],
)
def test_gradients_travel_or_weights_do(mode, op, travel, own):
    def work(communicator):
        made, _, (over,) = connected(communicator, mode=mode, op=op)
        return over is communicator, over.size, made.local_gradients

    assert run_ranks(2, work) == [(travel, 2 if travel else 1, own)] * 2


@pytest.mark.parametrize("mode", ["allreduce", "partial", "local_sgd"])
def test_the_mean_of_weights_is_taken_for_a_while(mode):
    """Three ranks, each with weights and slots of its own after two steps."""

    def work(communicator):
        made, frontend, _ = connected(communicator, mode=mode)
        first = frontend.state()
        made.optimizer.slots["w"] += communicator.rank
        for step in (1, 2):
            made.after_step(step, 1)
        apart = made.diverged
        made.take_global_weights()
        last, kept = frontend.state(), read(made.state(), Placement.PER_RANK)
        assert not made.diverged
        made.take_local_weights()
        assert made.diverged == apart
        return apart, first, last, kept, frontend.state()

    apart, first, last, kept, after = zip(*run_ranks(3, work), strict=True)
    if mode == "allreduce":
        assert all((a["weights/w"] == b["weights/w"]).all() for a, b in zip(first, last, strict=True)) and not any(kept)
    elif mode == "partial":  # of two parts, one was averaged in each step
        assert all(apart)
        assert all((a[k] == b[k]).all() for a, b in zip(kept, after, strict=True) for k in ("weights/w", "weights/b"))
    if mode != "allreduce":
        np.testing.assert_allclose(last[0]["weights/w"], np.mean([tree["weights/w"] for tree in first], 0), rtol=1e-12)
        assert all((tree["weights/w"] == last[0]["weights/w"]).all() for tree in last)
        assert [tree["slots/momentum/w"][0, 0] for tree in kept] == [0, 1, 2]
