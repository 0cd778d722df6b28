"""The parts of a rank's time: they add up, waits are where they belong, a planted sleep is found."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_train.core.shares import SHOWN, described, shares, shown, worth_a_look
from hvd_train.core.time_account import (
    BUBBLE,
    CELLS,
    COMPUTE,
    EVALUATE,
    IN_CELL,
    INPUT,
    MOST_SEGMENTS,
    PARTS,
    REST,
    SAVE,
    START,
    WAITED,
    TimeAccount,
    cell_steps,
    cells,
)

MS = 1_000_000  # ns


class Rank:
    """A rank whose clock is turned by hand."""

    def __init__(self, stages=False):
        self.now, self.seconds, self.of_stages = 0, 0.0, 0.0
        self.account = TimeAccount(lambda fresh: self.seconds, (lambda: self.of_stages) if stages else None, self.clock)

    def clock(self):
        return self.now

    def work(self, ms):
        self.now += int(ms * MS)

    def wait(self, ms, stages=False):
        self.work(ms)
        self.seconds += ms / 1000
        self.of_stages += stages * ms / 1000

    def step(self, fetch=1.0, compute=4.0, wait=2.0, hooks=0.5, queued=False):
        self.account.enter(INPUT)
        self.work(fetch)
        self.account.enter(COMPUTE)
        self.work(compute)
        self.wait(wait)
        self.account.stepped(queued)
        self.work(hooks)
        self.account.hooks_ended(False)

    def started(self):
        self.step()
        self.account.window()
        return self


def parts(window):
    return {name: ns / MS for name, ns in zip(PARTS, window[1], strict=True) if ns}


def test_each_part_has_its_time_and_the_first_step_is_the_start():
    rank = Rank()
    rank.account.add_start(2.0)
    rank.work(1000)
    rank.step()
    steps, *_ = window = rank.account.window()
    assert steps == 0 and parts(window) == {"start": 3007.5}
    for _ in range(3):
        rank.step()
    with rank.account.within(EVALUATE):
        rank.work(50)
        rank.wait(20)
        with rank.account.within(SAVE):
            rank.wait(30)
        rank.work(1)
    steps, *_ = window = rank.account.window()
    assert steps == 3
    assert parts(window) == {"input": 3, "compute": 12, "waited": 6, "rest": 1.5, "evaluate": 71, "save": 30}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["enter", "step", "queued", "late", "within", "window"]),
            st.integers(0, len(PARTS) - 3),
            st.integers(0, 10**9),
            st.floats(0, 3),
            st.floats(0, 1),
        ),
        max_size=60,
    )
)
def test_the_parts_add_up_to_the_time_that_passed_whatever_is_called(calls):
    """Also if a counter of waits runs ahead of the clock. No part is negative."""
    rank, total = Rank(stages=True), 0
    for what, part, ns, waits, of_stages in calls:
        rank.now += ns
        rank.seconds += waits
        rank.of_stages += of_stages
        match what:
            case "enter":
                rank.account.enter(part)
            case "step" | "queued":
                rank.account.stepped(what == "queued")
            case "late":
                rank.account.hooks_ended(True)
            case "within":
                with rank.account.within(part):
                    rank.now += ns
            case _:
                _, spent, _, cells = rank.account.window()
                total += sum(spent)
                assert total == rank.now and min(spent) >= 0 and min(cells, default=0) >= 0
                in_cells = np.array(cells).reshape(-1, len(IN_CELL)).sum()
                assert not cells or in_cells * 1000 == pytest.approx(
                    sum(spent[k] for k in (INPUT, COMPUTE, REST, WAITED, BUBBLE)), abs=len(cells) * 1000
                )
    assert total + sum(rank.account.window()[1]) == rank.now


def test_waits_are_taken_out_of_the_part_in_which_they_happen():
    rank = Rank().started()
    rank.account.enter(REST)
    rank.work(3)
    rank.wait(7)
    assert parts(rank.account.window()) == {"rest": 3, "waited": 7}


def test_waits_for_other_stages_are_apart():
    rank = Rank(stages=True).started()
    rank.account.enter(COMPUTE)
    rank.work(5)
    rank.wait(2)
    rank.wait(4, stages=True)
    rank.account.stepped(False)
    assert parts(rank.account.window()) == pytest.approx({"compute": 5, "waited": 2, "bubble": 4})


def test_steps_of_one_call_share_its_time():
    """Four are queued, and run with the last of them; or later, in a hook that reads a result."""
    rank = Rank().started()
    for k in range(4):
        rank.step(fetch=1, compute=80 if k == 3 else 0, wait=20 if k == 3 else 0, hooks=0, queued=k < 3)
    _, _, _, flat = rank.account.window()
    assert np.array(flat).reshape(-1, len(IN_CELL)).tolist() == [[1000, 20000, 5000, 0]] * 4

    rank = Rank().started()
    rank.step(fetch=1, compute=0, wait=0, hooks=0, queued=True)
    rank.account.enter(COMPUTE)
    rank.account.stepped(True)
    rank.work(30)  # in a hook
    rank.account.hooks_ended(True)
    assert parts(rank.account.window()) == {"input": 1, "compute": 30}


@given(st.lists(st.tuples(st.integers(1, 9), *[st.integers(0, 10**9)] * 4), min_size=1, max_size=40))
def test_cells_have_the_time_of_their_segments(segments):
    steps = sum(one[0] for one in segments)
    table = np.array(cells(segments, steps)).reshape(-1, 4)
    assert len(table) == -(-steps // cell_steps(steps)) <= CELLS
    assert table.min() >= 0
    assert np.allclose(table.sum(axis=0), np.array(segments)[:, 1:].sum(axis=0) / 1000, atol=1)
    assert cells(segments, 0) == []


def test_a_window_of_many_steps_takes_little_memory():
    rank = Rank().started()
    for _ in range(5000):
        rank.step(fetch=0.25, compute=1, wait=0.5, hooks=0)
    assert len(rank.account._segments) <= MOST_SEGMENTS
    steps, spent, _, flat = rank.account.window()
    assert steps == 5000 and spent[COMPUTE] == 5000 * MS
    assert len(flat) == CELLS * len(IN_CELL) and flat[:4] == pytest.approx(
        [313 * 250, 313 * 1000, 313 * 500, 0], rel=0.2
    )


# ---- the rows of several ranks


def spent(**ms):
    row = [0] * len(PARTS)
    for name, x in ms.items():
        row[PARTS.index(name)] = int(x * MS)
    return row


def column(table, name):
    return (1000 * table[:, SHOWN.index(name)]).tolist()


def test_the_wait_beyond_the_least_is_for_the_slowest_rank():
    table = shown([spent(compute=10, waited=9), spent(compute=17, waited=2), spent(compute=10, waited=9)])
    assert column(table, "exchange") == [2, 2, 2] and column(table, "wait") == [7, 0, 7]


def test_stages_are_compared_among_themselves():
    """Two replicas of two stages: the second stage exchanges more, and waits for no slow rank."""
    rows = [spent(waited=1, bubble=5), spent(waited=6), spent(waited=3, bubble=5), spent(waited=6)]
    table = shown(rows, stages=2)
    assert column(table, "exchange") == [1, 6, 1, 6]
    assert column(table, "wait") == [0, 0, 2, 0] and column(table, "bubble") == [5, 0, 5, 0]


ROWS = st.lists(st.lists(st.integers(0, 10**12), min_size=len(PARTS), max_size=len(PARTS)), min_size=1, max_size=5)


@given(ROWS, st.randoms())
def test_laws_of_the_parts_shown(rows, random):
    """They add up to each rank's time, none is negative, one rank waits for nobody, and the order of ranks is all
    the same."""
    table = shown(rows)
    assert table.min() >= 0
    assert np.allclose(table.sum(axis=1), np.sum(rows, axis=1) / 1e9, rtol=1e-12)
    assert min(column(table, "wait")) == 0
    order = list(range(len(rows)))
    random.shuffle(order)
    assert (shown([rows[k] for k in order]) == table[order]).all()
    assert sum(shares(table).values()) == pytest.approx(1 if table.any() else 0)


def test_words_about_an_epoch():
    seconds = shown([spent(input=4100, compute=3000, waited=2000, rest=20, evaluate=500, start=9000)])
    assert worth_a_look(seconds) == "input 43 %, exchange 21 %"
    assert worth_a_look(seconds / 10) == "", "shorter than anybody waits"
    assert worth_a_look(shown([spent(compute=9000, rest=500)])) == ""
    assert described(shares(shown([spent(compute=90, rest=9.7, save=0.3)]))) == "compute 90 %, other 10 %"
    assert described({}) == ""


# ---- ranks in lockstep


def lockstep(own, steps=40):
    """Windows of ranks that wait for one another in each step. ``own``: (input, compute, hooks) ms of each rank."""
    ranks = [Rank().started() for _ in own]
    for _ in range(steps):
        busy = [sum(one) for one in own]
        for rank, one, local in zip(ranks, own, busy, strict=True):
            rank.step(*one[:2], wait=max(busy) - local + 1, hooks=one[2])
    return [rank.account.window() for rank in ranks]


@pytest.mark.parametrize(("place", "part"), [(0, "input"), (1, "compute"), (2, "rest")])
def test_a_sleep_on_one_rank_is_its_part_and_the_others_wait(place, part):
    own = [[1, 10, 0.5] for _ in range(3)]
    before = shown([row[1] for row in lockstep(own)])
    own[1][place] += 6
    after = shown([row[1] for row in lockstep(own)])
    change = 1000 * (after - before) / 40
    for rank, name in itertools.product(range(3), SHOWN):
        expected = 6 if (rank == 1 and name == part) or (rank != 1 and name == "wait") else 0
        assert change[rank, SHOWN.index(name)] == pytest.approx(expected, abs=0.01), (rank, name)


def test_the_start_is_not_counted_as_waiting():
    rank = Rank()
    rank.wait(500)
    rank.step()
    assert parts(rank.account.window()).keys() == {"start"} and PARTS[START] == "start"


def test_the_hooks_of_the_first_step_belong_to_the_start():
    """Also if its epoch ends with it, so that no input follows."""
    rank = Rank()
    rank.account.enter(COMPUTE)
    rank.account.stepped(False)
    rank.work(700)  # the run folder is opened
    rank.account.window()
    rank.work(20)
    with rank.account.within(EVALUATE):
        rank.work(5)
    rank.work(3)
    rank.step()
    assert parts(rank.account.window()) == {
        "start": 20, "evaluate": 5, "rest": 3.5, "input": 1, "compute": 4, "waited": 2
    }  # fmt: skip
