"""The order of samples is a fair, keyed bijection that knows neither world size nor memory."""

import tracemalloc
from collections import Counter
from itertools import permutations
from math import factorial

import numpy as np
import pytest

from hvd_train.data.order import SMALL, mix, permute, share, steps

SIZES = [1, 2, 3, 4, 7, 8, 9, 100, SMALL - 1, SMALL, SMALL + 1, 1089, 4095, 4096, 4097, 60_000, 99_991]


def order(n, seed=0, epoch=0):
    return permute(np.arange(n), n, seed, epoch)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (0, 1), (1, 0), (2**63, 7), (2**40 + 1, 10**6)])
def test_is_a_bijection(n, seed, epoch):
    indices = order(n, seed, epoch)
    assert indices.dtype == np.int64
    assert np.array_equal(np.sort(indices), np.arange(n))


@pytest.mark.parametrize("n", [10, SMALL, SMALL + 1, 60_000])
def test_any_part_in_any_cut_is_the_same_order(n):
    whole = order(n, 3, 2)
    for cut in (1, n // 3 + 1, n - 1):
        parts = [permute(np.arange(a, min(a + cut, n)), n, 3, 2) for a in range(0, min(n, 20 * cut), cut)]
        assert np.array_equal(np.concatenate(parts), whole[: 20 * cut])
    assert len(permute(np.arange(0), n, 3, 2)) == 0


def test_seeds_and_epochs_give_other_orders():
    found = {order(5000, seed, epoch).tobytes() for seed in range(5) for epoch in range(5)}
    assert len(found) == 25


def test_is_pinned():
    """A resumed run must follow the same order with any later version: these numbers never change."""
    assert order(8, 1, 2).tolist() == PINNED_8
    assert permute(np.array([0, 1, 2, 10**9 - 1]), 10**9, 1, 2).tolist() == PINNED_BIG
    assert mix(1, 2) == PINNED_KEY


PINNED_8 = [5, 0, 4, 7, 3, 2, 6, 1]
PINNED_BIG = [446688138, 24277804, 887006404, 171275834]
PINNED_KEY = 834_844_254_806_117_752


def chi_square(counts, expected):
    return float(((np.asarray(counts) - expected) ** 2 / expected).sum())


def bound(freedom):
    """Exceeded with probability below 1e-6 (Wilson and Hilferty 1931)."""
    return freedom * (1 - 2 / (9 * freedom) + 4.9 * np.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_every_arrangement_is_equally_likely(n):
    trials = 40 * factorial(n)
    found = Counter(tuple(order(n, seed)) for seed in range(trials))
    counts = [found[p] for p in permutations(range(n))]
    assert chi_square(counts, trials / len(counts)) < bound(len(counts) - 1)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("by", ["seed", "epoch"])
def test_every_sample_stands_everywhere_equally_often(n, by):
    trials = 4000
    found = np.stack([order(n, k, 0) if by == "seed" else order(n, 0, k) for k in range(trials)])
    counts = np.stack([np.bincount(found[:, place], minlength=n) for place in range(n)])
    assert chi_square(counts, trials / n) < bound((n - 1) ** 2)


@pytest.mark.parametrize("n", [SMALL + 1, 1089, 10_007])
def test_the_cipher_is_fair_too(n):
    """Where samples go (16 x 16 cells), and which ones become neighbours: a batch is no run of the file."""
    cells, gaps, trials = np.zeros((16, 16)), np.zeros(16), 200
    for seed in range(trials):
        indices = order(n, seed)
        np.add.at(cells, (np.arange(n) * 16 // n, indices * 16 // n), 1)
        gaps += np.bincount((np.diff(indices) % n) * 16 // n, minlength=16)
    rows = np.bincount(np.arange(n) * 16 // n)
    expected = trials * np.outer(rows, rows) / n
    assert chi_square(cells, expected) < bound(15**2)
    wide = np.bincount(np.arange(1, n) * 16 // n) / (n - 1)  # a gap is never 0
    assert chi_square(gaps, gaps.sum() * wide) < bound(15)


def test_large_sets_take_no_memory():
    n = 10**9
    tracemalloc.start()
    indices = permute(np.arange(n - 4096, n), n, 0, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20
    assert len(set(indices.tolist())) == 4096
    assert indices.min() >= 0
    assert indices.max() < n
    assert abs(indices.mean() / n - 0.5) < 0.03


def test_shares_are_balanced_and_contiguous():
    for count in range(30):
        for size in range(1, 12):
            parts = [share(count, size, rank) for rank in range(size)]
            lengths = [stop - start for start, stop in parts]
            assert parts[0][0] == 0
            assert parts[-1][1] == count
            assert all(a[1] == b[0] for a, b in zip(parts, parts[1:], strict=False))
            assert lengths == sorted(lengths, reverse=True)
            assert lengths[0] - lengths[-1] <= 1


def test_steps_count_the_short_batch():
    assert [steps(n, c, 4) for n, c in ((8, 0), (9, 0), (9, 8), (9, 9), (9, 3))] == [2, 3, 1, 0, 2]
