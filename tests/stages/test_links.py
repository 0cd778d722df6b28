"""Tensors between the stages of a replica, over real sockets; ranks are threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from hvd_train.errors import CommunicationError, LostRankError
from hvd_train.frontends.stages.links import Links, Message
from tests.limits import SECONDS
from tests.rank_threads import run_ranks


def message(x: np.ndarray) -> Message:
    return Message(x.dtype.name, x.shape, x.reshape(-1).view(np.uint8))


@pytest.mark.parametrize(("ranks", "stages"), [(2, 2), (4, 2), (4, 4), (6, 3)])
def test_each_stage_reaches_each_other_one_of_its_replica(ranks, stages):
    def work(world):
        links, replica = Links.connect(world, stages), world.rank // stages
        others = [stage for stage in range(stages) if stage != links.stage]
        for other in others:
            links.send(other, "a", message(np.full((2, 3), 10.0 * world.rank + other)))
        received = {other: links.receive(other, "a") for other in others}
        for other, got in received.items():
            expected = np.full((2, 3), 10.0 * (replica * stages + other) + links.stage)
            np.testing.assert_array_equal(got.data.view(got.kind).reshape(got.shape), expected)
        total = links.sum(np.array([float(world.rank), 0.1]), range(stages), "sum")
        parts = links.gather(bytes([world.rank]), "gather")
        links.close()
        return links.stage, total, parts

    for rank, (stage, total, parts) in enumerate(run_ranks(ranks, work)):
        assert stage == rank % stages
        replica = range(rank - stage, rank - stage + stages)
        np.testing.assert_allclose(total, [sum(replica), 0.1 * stages])
        assert parts == ([bytes([k]) for k in replica] if stage == 0 else [])


def test_a_sum_has_the_same_bits_on_all_stages():
    def work(world):
        links = Links.connect(world, 4)
        x = np.random.default_rng(world.rank).normal(size=1000).astype(np.float32)
        total = links.sum(x, range(4), "sum"), links.sum(x, (1, 3), "some") if world.rank % 2 else None
        links.close()
        return x, *total

    rows = run_ranks(4, work)
    expected = ((rows[0][0] + rows[1][0]) + rows[2][0]) + rows[3][0]
    for _, total, _ in rows:
        np.testing.assert_array_equal(total, expected)
    np.testing.assert_array_equal(rows[1][2], rows[3][2])


def test_both_may_send_much_at_the_same_time():
    """More than sockets hold, before either receives."""

    def work(world):
        links, x = Links.connect(world, 2), np.arange(8 << 20, dtype=np.uint8)
        for k in range(3):
            links.send(1 - links.stage, f"{k}", message(x))
        same = [np.array_equal(links.receive(1 - links.stage, f"{k}").data, x) for k in range(3)]
        links.close()
        return same

    assert run_ranks(2, work) == [[True] * 3] * 2


def test_stages_that_came_apart_are_told():
    def work(world):
        links = Links.connect(world, 2)
        links.send(1 - links.stage, f"F{links.stage}", message(np.zeros(2)))
        with pytest.raises(
            CommunicationError, match=f"the stages diverged: B0 is awaited, and F{1 - links.stage} came"
        ):
            links.receive(1 - links.stage, "B0")
        links.close()

    run_ranks(2, work)


def test_the_end_of_a_stage_is_told():
    ended = threading.Event()

    def work(world):
        links = Links.connect(world, 2)
        if links.stage:
            links.close()
            ended.set()
            return
        assert ended.wait(SECONDS)
        with pytest.raises(LostRankError):
            links.receive(1, "F0")

    run_ranks(2, work)
