"""Laws of scaling: known ones are found again, their closed forms hold, and their intervals cover."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hvd_train.insight.scaling_laws import AMDAHL, LEVEL, UNIVERSAL, Law, fit, too_few

RANKS = [1, 2, 4, 8, 16]


def exact(law, ranks=RANKS, repeats=1):
    return {n: [float(law.rate(n))] * repeats for n in ranks}


@pytest.mark.parametrize("sigma, kappa", [(0, 0), (0.05, 0), (0.3, 0.001), (0, 0.01), (1, 0), (0.02, 0.0005)])
def test_a_law_is_found_again(sigma, kappa):
    law = Law(1234.5, sigma, kappa)
    found = fit(exact(law))
    assert (found.law.unit, found.law.sigma, found.law.kappa) == pytest.approx((1234.5, sigma, kappa), abs=1e-9)
    assert found.error < 1e-9 and found.spare == 2


def test_three_points_and_points_without_one_rank_are_enough():
    law = Law(100.0, 0.1, 0.004)
    for ranks in ([1, 2, 4], [2, 8, 32], [4, 3, 7]):
        found = fit(exact(law, ranks))
        assert (found.law.unit, found.law.sigma, found.law.kappa) == pytest.approx((100, 0.1, 0.004), rel=1e-6)
        assert found.spare == 0


def test_closed_forms():
    assert Law(1.0, 0.1).speedup(4) == pytest.approx(1 / (0.1 + 0.9 / 4))  # Amdahl's own form
    assert Law(1.0, 0.1).best == math.inf
    law = Law(1.0, 0.04, 0.0006)
    assert law.best == pytest.approx(math.sqrt(0.96 / 0.0006)) == pytest.approx(40)
    assert law.speedup(40) > max(law.speedup(39), law.speedup(41))
    assert Law(7.0, 0.5, 0.1).rate(1) == 7 and Law(1.0, 1.0, 0.5).best == 1
    assert Law(1.0, 0.0, 3.0).best == 1  # never less than one rank
    assert np.allclose(law.rate([1, 2]), [law.rate(1), law.rate(2)])


def test_amdahl_is_the_universal_law_without_kappa():
    points = exact(Law(50.0, 0.2))
    assert fit(points, AMDAHL).law.sigma == pytest.approx(fit(points, UNIVERSAL).law.sigma) == pytest.approx(0.2)
    assert fit(points, AMDAHL).law.kappa == 0


def test_more_than_proportional_speed_stays_within_the_law():
    found = fit({1: [100], 2: [210], 4: [450]})  # parts that fit into caches
    assert found.law.sigma == found.law.kappa == 0 and found.error > 0.01
    slower = fit({1: [100], 2: [60], 4: [30]})
    assert 0 <= slower.law.sigma <= 1 and slower.law.best < 2


def test_no_solution_is_better():
    random = np.random.default_rng(3)
    for _ in range(20):
        rates = random.uniform(50, 400, 5)
        law = fit({n: [x] for n, x in zip(RANKS, rates, strict=True)}).law

        def loss(unit, sigma, kappa, rates=rates):
            return np.sum((rates / Law(unit, sigma, kappa).rate(RANKS) - 1) ** 2)

        least = loss(law.unit, law.sigma, law.kappa)
        for _ in range(200):
            unit = law.unit * random.uniform(0.7, 1.4)
            other = (unit, min(1, abs(law.sigma + random.normal(0, 0.2))), abs(law.kappa + random.normal(0, 0.02)))
            assert loss(*other) >= least - 1e-12


def test_too_few_points_are_no_law():
    assert fit({1: [100.0], 2: [150.0]}) is None and fit({1: [100.0], 2: [150.0]}, AMDAHL).law.sigma > 0
    assert fit({1: [100.0]}, AMDAHL) is None and fit({}) is None
    assert fit({1: [100.0], 2: [150.0], 4: []}) is None  # a point that failed
    assert "needs 3" in too_few(UNIVERSAL, 2) and "cannot contradict" in too_few(UNIVERSAL, 3)
    assert not too_few(UNIVERSAL, 4)


def test_without_repeats_there_is_no_interval():
    found = fit(exact(Law(1.0, 0.1)))
    assert found.interval("sigma") is None and found.band(RANKS) is None


def test_equal_repeats_have_no_width():
    found = fit(exact(Law(10.0, 0.1, 0.002), repeats=3))
    low, high = found.interval("kappa")
    assert low == pytest.approx(high, rel=1e-6) == pytest.approx(0.002, rel=1e-6)
    assert np.allclose(*found.band(RANKS))


def test_an_unlimited_best_number_stays_infinite():
    found = fit(exact(Law(10.0, 0.1), repeats=3), AMDAHL)
    assert found.interval("best") == (math.inf, math.inf)


@pytest.mark.parametrize("repeats", [2, 5])
def test_intervals_cover(repeats, monkeypatch):
    monkeypatch.setattr("hvd_train.insight.scaling_laws.DRAWS", 200)
    random, law = np.random.default_rng(repeats), Law(1000.0, 0.1, 0.003)
    inside = {"sigma": 0, "kappa": 0, "best": 0, "rate": 0}
    trials = 120
    for trial in range(trials):
        points = {n: law.rate(n) * random.normal(1, 0.02, repeats) for n in RANKS}
        found = fit(points, seed=trial)
        for name in ("sigma", "kappa", "best"):
            low, high = found.interval(name)
            inside[name] += low <= getattr(law, name) <= high
        low, high = found.band([12])
        inside["rate"] += low[0] <= law.rate(12) <= high[0]
    for name, count in inside.items():
        assert LEVEL - 0.08 <= count / trials <= 0.98, (name, count / trials)
