"""Weights in common in windows: the laws of elastic averaging, against NumPy, on ranks that are threads."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_train.compression import make
from hvd_train.config import Config, ExchangeConfig
from hvd_train.frontends.serial import LocalWindow, Serial
from hvd_train.protocol import Placement
from hvd_train.update import make_update
from hvd_train.update.exchange import Exchange
from hvd_train.update.state import read
from tests.core.test_loop import config, final
from tests.numpy_frontend import NumpyFrontEnd
from tests.rank_threads import run_ranks

SIZES = [1, 2, 3, 4]


def flat(frontend):
    return np.concatenate([x.ravel() for x in frontend.w.values()])


def connected(communicator, features=5, mode="async", **options):
    """The update and its front-end; as in a training, all ranks begin with rank 0's weights."""
    frontend = NumpyFrontEnd.of(communicator, features, 3)

    def build(one):
        return Exchange(frontend.specs(), frontend.packing, make("none"), one, frontend.ops)

    made = make_update(ExchangeConfig(mode=mode, **options), frontend, build, Serial())
    frontend.load({name: communicator.world.gather(communicator.rank, x)[0] for name, x in frontend.state().items()})
    made.load({}, Placement.PER_RANK)
    return made, frontend


def centre(made):
    made.take_global_weights()
    found = flat(made.frontend)
    made.take_local_weights()
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("features", [5, 1])
def test_without_gradients_the_sum_stays_and_the_ranks_agree(size, features):
    def work(communicator):
        made, frontend = connected(communicator, features, async_steps=1)
        first = flat(frontend)
        frontend.w["w"] = frontend.w["w"] + communicator.rank + 1.0
        apart = flat(frontend)
        for step in range(1, 200):
            made.after_step(step, 1)
            communicator.barrier()
        return first, apart, flat(frontend), centre(made)

    first, apart, last, centres = zip(*run_ranks(size, work), strict=True)
    np.testing.assert_allclose(sum(last) + centres[0], sum(apart) + first[0], rtol=1e-13, atol=1e-13)
    for x in (*last, *centres):
        np.testing.assert_allclose(x, last[0], rtol=1e-12, atol=1e-12)
    assert all((x == centres[0]).all() for x in centres)


@pytest.mark.parametrize("size", SIZES)
def test_in_turns_it_is_the_formula(size):
    """Round-robin, every second step, with steps of its own between."""
    turns, pull = 6, 0.7

    def work(communicator):
        made, frontend = connected(communicator, async_steps=2, async_pull=pull)
        first, rng = flat(frontend), np.random.default_rng(communicator.rank)
        moves = rng.normal(size=(2 * turns, len(first)))
        for k in range(2 * turns):
            frontend.w["w"] = frontend.w["w"] + moves[k][: frontend.w["w"].size].reshape(frontend.w["w"].shape)
            for rank in range(size):
                if rank == communicator.rank:
                    made.after_step(k + 1, 1)
                communicator.barrier()
        return first, moves, flat(frontend), centre(made)

    first, moves, last, centres = zip(*run_ranks(size, work), strict=True)
    theta, c = [x.copy() for x in first], first[0].copy()
    for k in range(2 * turns):
        for rank in range(size):
            theta[rank][:15] += moves[rank][k][:15]
        for rank in range(size):
            if k % 2:
                delta = pull / size * (theta[rank] - c)
                c, theta[rank] = c + delta, theta[rank] - delta
    for rank in range(size):
        np.testing.assert_allclose(last[rank], theta[rank], rtol=1e-13)
        np.testing.assert_allclose(centres[rank], c, rtol=1e-13)


@pytest.mark.parametrize("size", SIZES)
def test_the_centre_for_a_while_and_from_a_checkpoint(size):
    def work(communicator):
        made, frontend = connected(communicator, async_steps=1)
        frontend.w["w"] = frontend.w["w"] + communicator.rank
        made.after_step(1, 1)
        local = flat(frontend)
        made.take_global_weights()
        common, entries = flat(frontend), read(made.state(), Placement.PER_RANK)
        state = frontend.state()
        made.take_local_weights()
        assert (flat(frontend) == local).all() and made.diverged
        again, other = connected(communicator, async_steps=1)
        other.load(state)
        again.load(entries, Placement.PER_RANK)
        assert (flat(other) == local).all() and (centre(again) == common).all()
        return common

    common = run_ranks(size, work)
    assert all((x == common[0]).all() for x in common)


@pytest.mark.parametrize("size", SIZES)
def test_a_server_adds_up_the_changes_of_stale_weights(size):
    """In turns: a rank moves the weights that it took after its turn before, and all others have moved since."""
    turns = 5

    def work(communicator):
        made, frontend = connected(communicator, mode="parameter_server")
        first, rng, notes = flat(frontend), np.random.default_rng(communicator.rank), []
        moves = rng.normal(size=(turns, *frontend.w["w"].shape))
        for k in range(turns):
            # An update that depends on the weights, so that it matters which ones a rank has.
            frontend.w["w"] = 0.9 * frontend.w["w"] + moves[k]
            for rank in range(size):
                if rank == communicator.rank:
                    made.after_step(k + 1, 1)
                communicator.barrier()
            notes.append(made.note())
            communicator.barrier()
        return first, moves, flat(frontend), centre(made), notes

    first, moves, last, centres, notes = zip(*run_ranks(size, work), strict=True)
    count = moves[0][0].size
    theta, c = [x.copy() for x in first], first[0].copy()
    for k in range(turns):
        for rank in range(size):
            c[:count] += 0.9 * theta[rank][:count] + moves[rank][k].ravel() - theta[rank][:count]
            theta[rank] = c.copy()
    for rank in range(size):
        np.testing.assert_allclose(last[rank], theta[rank], rtol=1e-13)
        np.testing.assert_allclose(centres[rank], c, rtol=1e-13)
    assert notes[0][-1] == f"staleness: {size - 1:.1f} changes of other ranks on average, {size - 1} at most"
    assert not any(notes[-1]) or size == 1


def test_a_server_alone_is_plain_training(tmp_path):
    plain, served = (
        final(1, config(exchange={"mode": mode}, optim={"lr": 0.1}), tmp_path / mode)[1]
        for mode in ("allreduce", "parameter_server")
    )
    for name, x in plain.items():
        np.testing.assert_allclose(served[name], x, rtol=1e-10, atol=1e-12)


def test_a_server_comes_with_a_warning():
    notes = Config.model_validate({"exchange": {"mode": "parameter_server"}}).notes
    assert len(notes) == 1 and "more ranks are hardly faster" in notes[0]


def test_windows_lose_nothing():
    def work(communicator):
        window = communicator.window(4 if communicator.rank == 1 else 0, "float64")
        for _ in range(200):
            window.add(1, np.ones(4))
        communicator.barrier()
        found = np.zeros(4)
        window.read(1, found)
        return found.tolist()

    assert run_ranks(3, work) == [[600.0] * 4] * 3
    alone = LocalWindow(2, "int64")
    alone.add(0, np.array([1, 2]))
    assert alone.change(0, lambda old: old * 3).tolist() == [1, 2]
    found = np.zeros(2, np.int64)
    alone.read(0, found)
    assert found.tolist() == [3, 6]
