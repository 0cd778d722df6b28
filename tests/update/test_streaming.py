"""Outer steps of a part at a time: one part at once is ``outer``; two parts are those of NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_train.config import load_config
from hvd_train.errors import ConfigError
from hvd_train.protocol import Placement
from hvd_train.update.state import EagerControl, read
from tests.core.test_loop import config, final, trainer
from tests.rank_threads import run_ranks
from tests.update.test_outer import made, read_all, walk


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("start", [0, 5])
def test_one_part_that_arrives_at_once_is_outer(tmp_path, size, start):
    outer = {"outer_steps": 3, "outer_start": start}
    streaming = outer | {"mode": "streaming", "fragments": 1, "stream_delay": 0, "mix": 0.0}
    trees = [final(size, config(exchange=x), tmp_path / x["mode"])[1] for x in (outer | {"mode": "outer"}, streaming)]
    assert trees[0].keys() == trees[1].keys() and all((trees[0][k] == trees[1][k]).all() for k in trees[0])


@pytest.mark.parametrize("block", [EagerControl.block, 2])
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("mix", [0.0, 0.5, 1.0])
def test_two_parts_with_constant_gradients(monkeypatch, delay, mix, block):
    """Rank r moves each weight by -(r + 1) in each step. The larger tensor is the first part."""
    monkeypatch.setattr(EagerControl, "block", block)
    keys = {"outer_steps": 6, "fragments": 2, "stream_delay": delay, "mix": mix, "outer_lr": 0.7, "outer_momentum": 0.9}
    steps = 20

    def work(communicator):
        update, frontend = made(communicator, mode="streaming", **keys)
        first, found = frontend.state(), []
        for step in range(1, steps + 1):
            walk(update, frontend, 1, lambda w, _: -(communicator.rank + 1.0), 1, communicator.size, first=step)
            found.append(frontend.state())
        update.take_global_weights()
        return first, found, frontend.state()

    ranks = run_ranks(2, work)
    for name, turn in (("w", 3), ("b", 0)):  # after steps 3, 9, 15, and after 6, 12, 18
        w = [ranks[r][0][f"weights/{name}"].copy() for r in range(2)]
        g, v, sent = w[0].copy(), 0.0, None
        for step in range(1, steps + 1):
            w = [x - (r + 1.0) for r, x in enumerate(w)]
            if step % 6 == turn:
                sent = sum((g - x) / 2 for x in w)
            if step % 6 == (turn + delay) % 6 and sent is not None:
                v = 0.9 * v + sent
                g = g - 0.7 * (sent + 0.9 * v)
                w, sent = [(1 - mix) * g + mix * x for x in w], None
            for r in range(2):
                found = ranks[r][1][step - 1][f"weights/{name}"]
                np.testing.assert_allclose(found, w[r], rtol=1e-12, err_msg=f"{name}, step {step}, rank {r}")
        for r in range(2):
            np.testing.assert_allclose(ranks[r][2][f"weights/{name}"], g, rtol=1e-12)


@pytest.mark.parametrize("sizes", [(3, 2), (2, 1)])
def test_what_is_under_way_arrives_on_another_number_of_ranks(tmp_path, sizes):
    """Saved after step 7, and the part of step 6 arrives after step 8."""
    keys = {"mode": "streaming", "outer_steps": 6, "fragments": 2, "stream_delay": 2}
    c = config(exchange=keys, max_steps=7, max_epochs=None)
    before, after = sizes
    _, tree, _, _ = final(before, c, tmp_path)
    assert any(key.startswith("exchange/part_under_way/") for key in tree)
    again = run_ranks(after, lambda com: read_all(trainer(com, c, tmp_path, resume=True)))[0]
    assert all((again[k] == tree[k]).all() for k in tree if k.startswith(("weights/", "exchange/")))
    other = config(exchange=keys | {"fragments": 1}, max_steps=7, max_epochs=None)  # then it belongs to no part
    again = run_ranks(after, lambda com: read_all(trainer(com, other, tmp_path, resume=True)))[0]
    assert not any(key.startswith("exchange/part_under_way/") for key in again)
    longer = c.model_copy(update={"max_steps": 20})
    assert final(after, longer, tmp_path, resume=True)[0]["steps"] == 20


def test_a_checkpoint_waits_for_what_is_under_way_once():
    def work(communicator):
        update, frontend = made(communicator, mode="streaming", outer_steps=4, fragments=2, stream_delay=1)
        waited = []
        real = update._delta_exchange.finish
        update._delta_exchange.finish = lambda started: (waited.append(len(started)), real(started))[1]
        walk(update, frontend, 2, lambda w, _: w)
        assert not waited and update.diverged
        for _ in range(2):
            read(update.state(), Placement.REPLICATED)
        assert waited == [1]
        walk(update, frontend, 1, lambda w, _: w, first=3)
        return waited

    assert run_ranks(2, work) == [[1], [1]]


def test_more_parts_than_tensors_are_refused():
    with pytest.raises(ConfigError, match="the model has 2 tensors, and none is divided; exchange.fragments: 3"):
        run_ranks(2, lambda communicator: made(communicator, mode="streaming", outer_steps=6))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["exchange.fragments=4"], "exchange.fragments: must divide outer_steps, and 4 does not divide 30"),
        (["exchange.stream_delay=10"], "exchange.stream_delay: must be less than outer_steps / fragments, 10"),
        (["exchange.mix=1.5"], "exchange.mix"),
    ],
)
def test_what_cannot_be_is_refused(keys, words):
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["model.name=mlp", "data.name=digits", "exchange.mode=streaming", *keys])
    assert words in str(caught.value)
