"""Weights of the last batch, whose length differs between ranks."""

from __future__ import annotations

import pytest
import torch
from torch.utils import data

from hvd_train.script.shared.dataloader import passes, shares
from tests.script.loaders import SEVEN_TO_SIX, Doubled, uneven


@pytest.mark.parametrize("count", [10, 13, 14, 15, 29])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_ranks_know_the_lengths_of_their_parts(count, size):
    ranks = [shares.Share(count, 3, shuffle=True, drop_last=False, seed=0, rank=r, size=size) for r in range(size)]
    for k, parts in enumerate(zip(*ranks, strict=True)):
        counts = {share.planned(0).counts(k) for share in ranks}
        assert counts == {tuple(map(len, parts))}
        assert k + 1 == len(ranks[0]) or counts == {(3,) * size}


def weights(loader, *, ahead: int = 0, times: int = 1, every: int = 1) -> list[float]:
    """What a reducer counts by, for a loop that takes ``ahead`` batches early, and exchanges after ``every`` batch."""
    weights_of_batches, queue = [], []

    def exchange():
        for _ in range(times):
            weights_of_batches.append(passes.weight())
            passes.exchanged()

    for k, batch in enumerate(loader):
        queue.append(batch)
        if len(queue) > ahead and (k + 1) % every == 0:
            queue.pop(0)
            exchange()
    if ahead:
        exchange()
    return weights_of_batches


def test_the_last_batch_counts_by_its_samples_where_it_is_in_use():
    assert weights(uneven()) == [1.0, 1.0, SEVEN_TO_SIX]
    assert weights(uneven(num_workers=2, prefetch_factor=2)) == [1.0, 1.0, SEVEN_TO_SIX]  # long prepared
    assert weights(uneven(), times=2) == [1.0] * 4 + [SEVEN_TO_SIX] * 2  # a GAN's two losses
    assert weights(zip(uneven(), uneven(), strict=True)) == [1.0, 1.0, SEVEN_TO_SIX]
    assert passes.weight() == 1.0  # the pass has ended


@pytest.mark.parametrize("times", [1, 2])
def test_a_loop_that_takes_one_batch_early(times):
    """As prefetchers do. The step of the last batch comes after the pass; then nothing is left of it."""
    for _ in range(2):
        assert weights(uneven(), ahead=1, times=times) == [1.0] * 2 * times + [SEVEN_TO_SIX] * times
    assert weights(uneven()) == [1.0, 1.0, SEVEN_TO_SIX]
    assert passes.weight() == 1.0


@pytest.fixture
def told(monkeypatch):
    """What is warned of, each time."""
    lines = []
    monkeypatch.setattr(passes, "_warn_of_uncertain_batch", lambda rank: lines.append(rank))
    return lines


def test_batches_that_are_taken_earlier_are_told(told):
    assert weights(uneven(), ahead=2)[-1] == 1.0 and told == []  # no exchange by ``averaged``
    for batch in (batches := list(uneven())):
        passes.averaged()
        passes.exchanged()
        assert batch is not None
    assert told == [0] * len(batches)
    told.clear()
    assert [passes.averaged() for _ in zip(*2 * [iter(uneven())], strict=False)] and told == []  # never exchanged
    taken, rest = [], iter(uneven())
    for batch in rest:
        taken.append(batch)
        if len(taken) == 3:
            passes.averaged()
            passes.exchanged()
    assert told == [0]


class Inputs:
    """Those of two ranks that are alike; ``watched``: from when it is asked."""

    lengths, watched = (set(), set()), False

    def follow(self, needed):
        self.watched = needed

    def gather(self, own):
        return [own, own]


def test_a_step_after_a_pass_that_ends_unevenly_is_told(told, monkeypatch):
    """It may be one more on the last batch: the ranks' 7 and 6 samples counted alike, without a word."""

    def step():
        shares.stepped()
        passes.averaged()
        passes.exchanged()

    monkeypatch.setattr(passes, "inputs", Inputs())
    monkeypatch.setattr(passes, "_steps_after", False)
    for _ in range(2):
        for _ in uneven():
            step()
        assert told == []
    step()
    assert told == [0]
    for _ in uneven():
        step()
    assert passes.inputs.watched  # from then on the lengths of inputs tell


def test_batches_in_a_list_are_no_pass_without_steps(monkeypatch):
    """What is warned of at the end of a pass without a step waits for what comes next."""
    lines, sums = [], []
    monkeypatch.setattr(passes, "without_steps", [lambda: lines.append(1)])
    monkeypatch.setattr(passes, "unshared", passes.UnsharedSums(True, "add them up"))
    monkeypatch.setattr(passes.warnings, "warn", lambda text, **_: sums.append(text))
    for _ in list(uneven()):
        passes.exchanged()
    next(iter(uneven()))
    assert not lines and not [x for x in sums if "made no step" in x]
    list(uneven())
    next(iter(uneven()))
    assert lines


def test_a_first_batch_that_is_left_out_is_told(told):
    """It looks as if each batch were taken early, until the last one gets no step."""
    batches = iter(uneven())
    next(batches)
    for _ in batches:
        assert passes.averaged() == 1.0
        passes.exchanged()
    assert told == []
    next(iter(uneven()))
    assert told == [0]


def test_where_a_batch_in_use_is_not_certain_ranks_count_alike():
    assert weights(uneven(), ahead=2) == [1.0] * 2  # of which of three?
    assert weights(uneven(), every=3) == [1.0]  # gradients of three batches travel together
    assert weights(zip(uneven(), data.DataLoader(range(53), batch_size=10), strict=False))[-1] == SEVEN_TO_SIX
    even = passes.shared(data.DataLoader(range(60), batch_size=10), 0, 0, 2)
    assert weights(zip(uneven(), even, strict=True)) == [1.0] * 3  # of which of the two?
    assert weights(uneven(num_workers=2, in_order=False)) == [1.0] * 3
    assert weights(passes.shared(Doubled(range(53), batch_size=10), 0, 0, 2)) == [1.0] * 3


def test_the_width_of_inputs_is_no_batch():
    """Nodes of graphs had as many features as a rank's even batch samples: the uneven batch counted as that one."""

    def fitting(first, second):
        possible = [[6, 6], [4, 3]]
        ranks = zip(first, second, strict=True)
        return passes._fitting([passes._Report(a, b, False, False, possible, None) for a, b in ranks])

    assert fitting([[17, 17], [23, 23]], [[6, 31], [6, 44]]) == set()
    assert fitting([[9], [9]], [[4], [3]]) == {(4, 3)}  # time comes first
    assert fitting([[6], [6]], [[9], [9]]) == fitting([[12], [12]], [[6], [6]]) == {(6, 6)}


def test_two_loaders_count_alike_on_all_ranks():
    """Rests of 4 and 8 samples: 2, 1, 1 and 3, 3, 2. Rank 2 alone found equal shares, and counted by them."""

    def last(rank, *rests):
        loaders = [passes.shared(data.DataLoader(range(12 + rest), batch_size=4), 0, rank, 3) for rest in rests]
        return weights(zip(*loaders, strict=True))[-1]

    assert [last(rank, 4, 8) for rank in range(3)] == [1.0] * 3
    assert [last(rank, 8, 8) for rank in range(3)] == [1.125, 1.125, 0.75]
    assert [last(rank, 5, 10) for rank in range(3)] == [1.0] * 3  # 2, 2, 1 and 4, 3, 3


@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_evaluation_and_looks_in_between_do_not_count(context):
    batches, checks, weights_of_batches = uneven(), uneven(), []
    for _ in batches:
        with context():
            next(iter(batches))
            assert len(list(checks)) == 3
        weights_of_batches.append(passes.weight())
        passes.exchanged()
        with context():
            assert len(list(checks)) == 3
    assert weights_of_batches == [1.0, 1.0, SEVEN_TO_SIX]
