"""Who is named as slow, from which step on, and who is not."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_train.core import straggler
from hvd_train.core.straggler import SYNCS, Stragglers


@pytest.fixture
def look():
    """look(waits, step_seconds, steps): a sync after so many more steps, in which the ranks waited so long each."""
    place, stragglers = [0], Stragglers()

    def go(waits, step_seconds=0.1, steps=3):
        place[0] += steps
        return stragglers.look(place[0], steps, steps * step_seconds, list(steps * np.array(waits)))

    go.stragglers = stragglers
    return go


def test_who_waits_least_is_named_and_since_when(look):
    """Of three ranks the others wait 55 and 57 ms in a step of 100, rank 1 waits 5."""
    for _ in range(SYNCS):
        assert not look([0.010, 0.012, 0.011])
    news = [look([0.055, 0.005, 0.057]) for _ in range(2 * SYNCS)]
    slow = look.stragglers.slow_rank
    assert news.index(True) == SYNCS - 1 and sum(news) == 1
    assert (slow.rank, slow.since) == (1, 3 * SYNCS + 1)
    assert slow.share == pytest.approx(0.51) and slow.seconds == pytest.approx(0.051)
    assert str(slow) == "rank 1 is slow: the others wait for it 51% of each step, 51.0 ms, since step 25"
    assert not any(look([0.011, 0.010, 0.010]) for _ in range(SYNCS))
    assert look.stragglers.slow_rank is None
    assert not any(look([0.055, 0.005, 0.057]) for _ in range(2 * SYNCS)) and look.stragglers.slow_rank.rank == 1


def test_on_a_busy_machine_a_rank_is_named_once_and_three_at_most(look):
    """Each is slow for a while, in turn; who is slow now is known all the time."""
    news = []
    for turn in range(20):
        waits = np.full(5, 0.05)
        waits[turn % 5] = 0.0
        news += [look(list(waits)) for _ in range(SYNCS)]
        assert look.stragglers.slow_rank.rank == turn % 5
    assert sum(news) == straggler.NAMED == 3


@pytest.mark.parametrize(
    ("waits", "step_seconds"),
    [
        ([0.020, 0.010], 0.1),  # a tenth of the step
        ([0.0009, 0.0001], 0.001),  # less than a millisecond
        ([0.09, 0.09], 0.1),  # a slow network
    ],
)
def test_ranks_that_are_alike_are_not_reported(look, waits, step_seconds):
    assert not any(look(waits, step_seconds) for _ in range(4 * SYNCS))


def test_a_rank_that_is_late_now_and_then_is_not_slow(look):
    """A third of the syncs; and a sync without steps says nothing."""
    for turn in range(6 * SYNCS):
        assert not look([0.8, 0.01] if turn % 3 == 0 else [0.01, 0.01], step_seconds=1.0)
    for _ in range(3 * SYNCS):
        assert not look([0.9, 0.0], step_seconds=1.0, steps=0)
