"""Outer steps against their formulas: plain averaging, synchronous SGD, the recurrence on a quadratic, NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_train.checkpoint import store
from hvd_train.compression import make
from hvd_train.config import ExchangeConfig
from hvd_train.errors import ConfigError
from hvd_train.frontends.serial import Serial
from hvd_train.protocol import Placement
from hvd_train.update import make_update
from hvd_train.update.exchange import Exchange
from hvd_train.update.state import read
from tests.core.test_loop import config, final, trainer
from tests.numpy_frontend import NumpyFrontEnd
from tests.rank_threads import run_ranks

FEATURES, CLASSES = 5, 3


def made(communicator, mode="outer", **options):
    """(update, front-end) whose ranks begin with the same weights."""
    frontend = NumpyFrontEnd.of(communicator, FEATURES, CLASSES)
    rng = np.random.default_rng(7)
    frontend.w = {name: rng.normal(size=x.shape) for name, x in frontend.w.items()}
    o = ExchangeConfig(mode=mode, **options)
    compressor = make(o.compression, communicator.size, communicator.rank, **o.options(o.compression))

    def build(over):
        return Exchange(frontend.specs(), frontend.packing, compressor, over, frontend.ops, small=0)

    return make_update(o, frontend, build, Serial()), frontend


def walk(update, frontend, steps, change, samples=1, total=1, first=1):
    """Take steps of this rank, each of which changes the weights by ``change(weights, step)``."""
    for step in range(first, first + steps):
        update.before_step(step, total)
        frontend.w = {name: x + change(x, step) for name, x in frontend.w.items()}
        update.after_step(step, samples)


def equal_weights(a, b, rtol=0.0):
    assert a.keys() == b.keys()
    for key in (key for key in a if key.startswith("weights/")):
        np.testing.assert_allclose(a[key], b[key], rtol=rtol, atol=rtol, err_msg=key)


# ---- special cases


@pytest.mark.parametrize("size", [1, 2, 4])
def test_rate_1_without_momentum_is_plain_averaging(tmp_path, size):
    """Of equal samples: the mean of weights takes no notice of a part's length."""
    keys = {"limit_train_batches": 6, "max_epochs": 2}
    outer = {"mode": "outer", "outer_steps": 3, "outer_lr": 1.0, "outer_momentum": 0.0}
    local = {"mode": "local_sgd", "local_steps": 3}
    trees = [final(size, config(**keys, exchange=x), tmp_path / x["mode"])[1] for x in (outer, local)]
    equal_weights(*trees, rtol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_one_step_of_plain_sgd_is_synchronous_sgd(tmp_path, size):
    """The last batch of an epoch has five samples, so that ranks count by them."""
    outer = {"mode": "outer", "outer_steps": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
    trees = [final(size, config(exchange=x), tmp_path / str(len(x)), momentum=0.0)[1] for x in (outer, {})]
    equal_weights(*trees, rtol=1e-12)


@pytest.mark.parametrize(("steps", "rate", "momentum"), [(1, 1.0, 0.0), (3, 0.7, 0.9), (10, 0.3, 0.5)])
def test_a_quadratic_follows_the_recurrence(steps, rate, momentum):
    """On a w^2 / 2 error and momentum are multiplied by a matrix in each outer step."""
    eta, a = 0.1, 0.8
    c = (1 - eta * a) ** steps
    matrix = [[1 - rate * (1 - c) * (1 + momentum), -rate * momentum**2], [1 - c, momentum]]

    def work(communicator):
        update, frontend = made(communicator, outer_steps=steps, outer_lr=rate, outer_momentum=momentum)
        found = [frontend.w["b"][0]]
        for k in range(6):
            walk(update, frontend, steps, lambda w, _: -eta * a * w, 1, communicator.size, first=1 + k * steps)
            found.append(frontend.w["b"][0])
        return found

    for found in run_ranks(2, work):
        pair = np.array([found[0], 0.0])
        for value in found[1:]:
            pair = np.array(matrix) @ pair
            assert value == pytest.approx(pair[0], rel=1e-12)


def test_ranks_count_by_their_samples_since_the_last_join():
    def work(communicator):
        rank = communicator.rank
        update, frontend = made(communicator, outer_steps=2, outer_lr=1.0, outer_momentum=0.0)
        before = frontend.w["b"].copy()
        for step, (local, total) in enumerate([((3, 1)[rank], 4), ((0, 6)[rank], 6)], 1):
            update.before_step(step, total)
            frontend.w["b"] = frontend.w["b"] + (rank + 1)
            update.after_step(step, local)
        return frontend.w["b"] - before

    for change in run_ranks(2, work):  # 2 of 3 samples of 10, 4 of 7
        np.testing.assert_allclose(change, (3 * 2 + 7 * 4) / 10, rtol=1e-12)


@pytest.mark.parametrize("size", [1, 3])
def test_before_the_start_all_is_as_without(tmp_path, size):
    """Then each rank goes on with its gradients, from the same weights."""
    keys = {"max_steps": 6, "max_epochs": None}
    outer = {"mode": "outer", "outer_steps": 4}
    late, never = (config(**keys, exchange=x) for x in (outer | {"outer_start": 6}, {}))
    trees = [final(size, c, tmp_path / str(k))[1] for k, c in enumerate((late, never))]
    assert all((trees[0][k] == trees[1][k]).all() for k in trees[1])
    after = final(size, config(exchange=outer | {"outer_start": 6}), tmp_path / "after")[1]
    plain = final(size, config(), tmp_path / "plain")[1]
    assert any((after[k] != plain[k]).any() for k in after if k.startswith("weights/"))


# ---- with a compressor


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_what_leaves_nothing_out_is_outer_without_compression(tmp_path, momentum):
    outer = {"mode": "outer", "outer_steps": 3, "outer_momentum": momentum}
    full = outer | {"compression": "topk", "ratio": 1.0, "outer_feedback": 0.5}
    trees = [
        final(3, config(exchange=x), tmp_path / str(len(x)), compressor=compressor)[1]
        for x, compressor in ((outer, None), (full, make("topk", 3, ratio=1.0)))
    ]
    assert all((trees[0][k] == trees[1][k]).all() for k in trees[0] if not k.startswith("slots/"))


@pytest.mark.parametrize("compression", ["topk", "threshold", "int8", "fp16", "powersgd"])
def test_feedback_keeps_what_was_left_out(compression):
    """feedback e + delta = what was sent + what is kept, on each rank; the sum of what was sent moves the weights."""
    options = {"topk": {"ratio": 0.3}, "threshold": {"threshold": 0.4}, "powersgd": {"rank": 1}}.get(compression, {})
    outer = {"outer_steps": 2, "outer_lr": 1.0, "outer_momentum": 0.0, "outer_feedback": 0.6}

    def kept(update):
        parts = [cells[0].read() if cells else None for cells in update._errors]
        return [0.0 if part is None else part.reshape(-1).copy() for part in parts]

    def work(communicator):
        update, frontend = made(communicator, compression=compression, **outer, **options)
        rng, size = np.random.default_rng(communicator.rank), communicator.size
        rows = []
        for k in range(3):
            before, old = update.frontend.state(), kept(update)
            walk(update, frontend, 1, lambda w, _: rng.normal(size=w.shape), 1, size, first=2 * k + 1)
            apart = frontend.state()
            walk(update, frontend, 1, lambda w, _: 0 * w, 1, size, first=2 * k + 2)
            after = frontend.state()
            order = [f"weights/{frontend.specs()[i].name}" for members in update.buckets for i in members]
            flat = [np.concatenate([tree[n].reshape(-1) for n in order]) for tree in (before, apart, after)]
            new = kept(update)
            specs = frontend.specs()
            sizes = [sum(specs[i].size for i in members) for members in update.buckets]
            e = [np.concatenate([np.broadcast_to(x, n) for x, n in zip(of, sizes, strict=True)]) for of in (old, new)]
            rows.append(((flat[0] - flat[1]) / size, *e, flat[0] - flat[2]))
        return rows

    for ranks in zip(*run_ranks(2, work), strict=True):
        sent = [0.6 * old + delta - new for delta, old, new, _ in ranks]
        for *_, moved in ranks:
            np.testing.assert_allclose(moved, sum(sent), rtol=1e-9, atol=1e-3 if compression == "fp16" else 1e-12)
        assert any(np.abs(new).max() > 1e-5 for _, _, new, _ in ranks), "something was left out"


# ---- a run that goes on


def test_on_another_number_of_ranks_the_global_weights_and_the_momentum_go_on(tmp_path):
    c = config(exchange={"mode": "outer", "outer_steps": 4}, max_steps=6, max_epochs=None)
    _, before, *_ = final(3, c, tmp_path)
    for size in (1, 2):
        tree = run_ranks(size, lambda com: read_all(trainer(com, c, tmp_path, resume=True)))[0]
        assert all((tree[k] == before[k]).all() for k in before if k.startswith(("weights/", "exchange/")))
    longer = c.model_copy(update={"max_steps": 20})
    assert final(2, longer, tmp_path, resume=True)[0]["steps"] == 20


@pytest.mark.parametrize("steps", [6, 8])
def test_what_is_left_behind_on_another_number_of_ranks_is_named(tmp_path, steps):
    """After step 6 each rank has learned what no join has seen; after step 8 all have the same weights."""
    c = config(exchange={"mode": "outer", "outer_steps": 4}, max_steps=steps, max_epochs=None)
    final(3, c, tmp_path)

    def notes(communicator):
        found = store.newest(tmp_path / "checkpoints", pytest.fail) if communicator.rank == 0 else None
        return trainer(communicator, c, tmp_path).restore(found)

    kept = "slots, weights" if steps == 6 else "slots"
    line = f"per-rank state ({kept}) is not restored: ranks 3 -> 2"
    assert run_ranks(2, notes) == [[line]] * 2
    assert run_ranks(3, notes) == [[]] * 3


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ({}, {"mode": "outer"}, True),
        ({"mode": "outer", "outer_momentum": 0.0}, {"mode": "outer"}, True),
        ({"mode": "outer"}, {"mode": "outer"}, False),
        ({}, {"mode": "outer", "outer_momentum": 0.0}, False),
        ({"mode": "outer"}, {}, False),
    ],
)
def test_an_outer_momentum_that_begins_with_zeros_is_named(tmp_path, before, after, told):
    c = config(exchange=before, max_steps=4, max_epochs=None)
    final(2, c, tmp_path)
    c = config(exchange=after, max_steps=8, max_epochs=None)

    def notes(communicator):
        found = store.newest(tmp_path / "checkpoints", pytest.fail) if communicator.rank == 0 else None
        return trainer(communicator, c, tmp_path).restore(found)

    line = "the outer momentum begins with zeros: the checkpoint has none"
    assert (line in run_ranks(2, notes)[0]) == told


def read_all(one):
    return one.frontend.state() | read(one.update.state(), Placement.REPLICATED)


@pytest.mark.parametrize(("before", "after"), [({}, {"mode": "outer"}), ({"mode": "outer"}, {})])
def test_a_run_goes_on_with_outer_steps_and_without(tmp_path, before, after):
    final(2, config(exchange=before, max_steps=6, max_epochs=None), tmp_path)
    again = final(2, config(exchange=after, max_steps=20, max_epochs=None), tmp_path, resume=True)
    assert again[0]["steps"] == 20 and np.isfinite(again[1]["weights/w"]).all()


@pytest.mark.parametrize("steps", [6, 8])
def test_ranks_that_went_apart_take_no_common_steps(tmp_path, steps):
    """Their slots differ, also where they have just joined; on another number of ranks all have rank 0's."""
    outer = {"mode": "outer", "outer_steps": 4}
    final(2, config(exchange=outer, max_steps=steps, max_epochs=None), tmp_path)
    later = config(exchange=outer | {"outer_start": 10}, max_steps=12, max_epochs=None)
    with pytest.raises(ConfigError, match="exchange.outer_start: 10; set it to at most 0"):
        final(2, later, tmp_path, resume=True)
    assert final(3, later, tmp_path, resume=True)[0]["steps"] == 12


def test_a_step_in_between_reads_no_weight(monkeypatch):
    """A front-end that queues steps runs them when weights are read."""
    update, frontend = made(Serial(), outer_steps=3)
    reads = []
    monkeypatch.setattr(
        update.optimizer, "weights", lambda b, real=update.optimizer.weights: (reads.append(b), real(b))[1]
    )
    monkeypatch.setattr(frontend, "run_queued", lambda: reads.append("queued"))
    walk(update, frontend, 2, lambda w, _: w)
    assert reads == []
    walk(update, frontend, 1, lambda w, _: w, first=3)
    assert reads == list(range(len(update.buckets)))
