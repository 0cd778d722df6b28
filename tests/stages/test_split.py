"""The division of blocks into stages."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hvd_train.frontends.stages.split import balanced, stage_of


def largest(costs, split):
    shares = np.array(costs) / np.maximum(np.sum(costs, axis=0), 1e-300)
    ends = np.cumsum([0, *split])
    return max(shares[a:b].sum(axis=0).max() for a, b in itertools.pairwise(ends))


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(8))
def test_the_split_is_the_best_of_all(stages, seed):
    costs = [tuple(row) for row in np.random.default_rng(seed).exponential(size=(7, 2)) ** 2]
    split = balanced(costs, stages)
    assert len(split) == stages and sum(split) == 7 and min(split) >= 1
    every = [np.diff([0, *cut, 7]).tolist() for cut in itertools.combinations(range(1, 7), stages - 1)]
    assert largest(costs, split) == pytest.approx(min(largest(costs, one) for one in every))


def test_memory_counts_as_time_does():
    assert balanced([(1, 1)] * 4, 2) == [2, 2]
    assert balanced([(1, 9), (1, 1), (1, 1), (1, 1)], 2) == [1, 3]
    assert balanced([(1, 0)] * 3, 3) == [1, 1, 1]
    # A stage without weights would train nothing.
    assert balanced([(1, 0), (9, 0), (5, 1), (1, 1)], 2) == [3, 1]
    assert stage_of([2, 1]) == [0, 0, 1]
