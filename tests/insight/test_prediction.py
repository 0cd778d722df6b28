"""Laws of the prediction of steps."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hvd_train.insight.prediction import (
    Compressed,
    Link,
    Model,
    Point,
    excess,
    expected_max,
    norm,
    overlap,
    ring,
    student,
)

LINK = Link(1.25e9, 50e-6)


def point(ranks, own=0.1, exchange=0.0, empty=0.0, spread=0.0, exposed=None, waiting=0.0, batch=32.0, calls=400):
    rng = np.random.default_rng(ranks)
    drawn = own + spread * rng.standard_normal((ranks, calls))
    drawn *= own / drawn.mean()
    slowest = drawn.max(axis=0).mean() - own
    step = own + (exchange if exposed is None else exposed) + max(waiting, slowest)
    return Point(ranks, 1, batch, drawn, np.ones(calls), step, own / batch / 2, exchange, empty)


def host(**of_two):
    two = {"own": 0.11, "exchange": 0.02, "empty": 0.001, "spread": 0.005} | of_two
    points = {(1, 1): [point(1, spread=two["spread"])], (2, 1): [point(2, **two)]}
    return Model(points, cores=8, sent=10e6, messages=3)


def test_the_expected_maximum_is_that_of_draws():
    rng = np.random.default_rng(0)
    times, weights = rng.gamma(2.0, 1.0, 50), rng.integers(1, 5, 50)
    assert expected_max(times, weights, 1) == pytest.approx(np.average(times, weights=weights))
    for n in (2, 5, 16):
        drawn = rng.choice(times, (200_000, n), p=weights / weights.sum()).max(axis=1)
        assert expected_max(times, weights, n) == pytest.approx(drawn.mean(), rel=0.005)
    assert expected_max(times, None, 10_000) == pytest.approx(times.max())
    assert expected_max(np.full(7, 3.0), None, 12) == pytest.approx(3.0)


def test_of_normal_times_the_maximum_of_two_exceeds_the_mean_by_the_deviation_over_the_root_of_pi():
    one = point(1, spread=0.01, calls=50_000)
    assert excess(one, 2) == pytest.approx(0.01 / math.sqrt(math.pi), rel=0.02)
    assert excess(one, 1) == pytest.approx(0, abs=1e-12)


def test_the_norm_lies_between_maximum_and_sum_and_overlap_inverts_it():
    assert norm(3, 4, 1) == 7 and norm(3, 4, 2) == 5 and norm(0, 4, 3) == 4 and norm(0, 0, 1) == 0
    for g in (1.0, 1.7, 4.0):
        assert overlap(3, 2, norm(3, 2, g) - 3) == pytest.approx(g, rel=1e-6)
    assert overlap(3, 2, 2.5) == 1 and overlap(3, 2, 0) == 10 and overlap(3, 0, 0) == 1


def test_measured_ranks_take_what_was_measured():
    model = host()
    for ranks in (1, 2):
        found = model.predict(1, ranks, 1)
        assert found.step == pytest.approx(model.points[ranks, 1][0].step, rel=1e-9) and found.measured
        assert found.low < found.step < found.high
    # also where the exchange is partly hidden, and where ranks wait for one another
    model = host(exposed=0.008, waiting=0.01)
    assert model.predict(1, 2, 1).step == pytest.approx(model.points[2, 1][0].step, rel=1e-6)


def test_without_bytes_and_latency_the_exchange_vanishes():
    points = {(1, 1): [point(1)], (2, 1): [point(2)]}
    model = Model(points, cores=8)
    assert not model.knows_exchange and host().knows_exchange
    for hosts in (1, 2, 16):
        found = model.predict(hosts, 1, 1, Link(1e9, 0.0))
        assert found.exchange == 0 and found.step == pytest.approx(0.1) and found.rate == pytest.approx(320 * hosts)


def test_the_exchange_is_the_formula_of_a_ring():
    model = host()
    a, r = 0.001, (0.02 - 0.001) / 10e6
    assert model.driver(4) == a and model.copying(4) == pytest.approx(r)
    for hosts, ranks in ((2, 1), (4, 2), (8, 2)):
        n = hosts * ranks
        x = (n - 1) * (a + 2 * 3 * 50e-6) + 2 * (n - 1) / n * 10e6 * (1 / 1.25e9 + r)
        assert model.exchange(hosts, ranks, LINK) == pytest.approx(x)
    assert model.exchange(1, 1, LINK) == 0 and ring(2) == 1 and ring(4) == 1.5


def test_more_hosts_and_slower_links_never_make_a_step_shorter():
    model = host()
    steps = [model.predict(hosts, 2, 1, LINK).step for hosts in (1, 2, 4, 8, 64)]
    assert steps == sorted(steps)
    steps = [model.predict(4, 2, 1, Link(rate, 50e-6)).step for rate in (1e10, 1e9, 1e8, 1e7)]
    assert steps == sorted(steps)
    widths = [math.log(one.high / one.low) for one in (model.predict(h, 2, 1, LINK) for h in (1, 2, 4, 8))]
    assert widths == sorted(widths)


def test_ranks_that_were_not_measured_lie_between_and_beyond_the_cores_they_take_turns():
    points = {(1, 1): [point(1, own=0.1)], (4, 1): [point(4, own=0.16, exchange=0.03, empty=0.003)]}
    model = Model(points, cores=4, sent=1e7, messages=2)
    between = model.predict(1, 2)
    assert between.own == pytest.approx(math.sqrt(0.1 * 0.16)) and not between.measured
    assert between.exchange == pytest.approx(0.001 + 0.027 / 1.5)
    crowded = model.predict(1, 8)
    assert crowded.own == pytest.approx(0.32) and crowded.shared and crowded.rate < model.predict(1, 4).rate


def test_ranks_that_shared_cores_are_what_was_measured_and_tell_nothing_of_hosts():
    pair = {(1, 1): [point(1)], (2, 1): [point(2, exchange=0.02, empty=0.001)]}
    crowded = pair | {(4, 1): [point(4, own=0.25, exchange=0.2, empty=0.15)]}
    known, asked = (Model(points, cores=2, sent=1e7, messages=2) for points in (pair, crowded))
    assert asked.predict(1, 4).measured and asked.predict(1, 4).shared
    assert asked.predict(1, 4).step == pytest.approx(crowded[4, 1][0].step, rel=0.02) != known.predict(1, 4).step
    for hosts in (4, 8):
        assert asked.predict(hosts, 1, 1, LINK).step == known.predict(hosts, 1, 1, LINK).step


def test_another_batch_moves_along_the_measured_line():
    model = host()
    assert model.predict(1, 1, 1, batch=64).own == pytest.approx(0.15)
    assert model.predict(1, 1, 1, batch=16).own == pytest.approx(0.075)
    steep = Point(1, 1, 32, np.full((1, 9), 0.1), np.ones(9), 0.1, slope=1.0)
    assert steep.own_with(16) == pytest.approx(0.05)  # not less than its share
    assert Point(1, 1, 32, np.full((1, 9), 0.1), np.ones(9), 0.1, slope=-1.0).own_with(16) == 0.1


def test_repeats_that_agree_narrow_the_interval_and_those_that_do_not_widen_it():
    def width(*owns):
        model = Model({(1, 1): [point(1, own=own) for own in owns]}, cores=2)
        one = model.predict(1, 1, 1)
        return math.log(one.high / one.low)

    assert width(0.1, 0.1, 0.1) < width(0.1) < width(0.1, 0.12, 0.09)


def test_the_intervals_cover_runs_of_the_assumed_spread():
    rng, within = np.random.default_rng(1), 0
    for _ in range(400):
        runs = [point(1, own=0.1 * math.exp(0.05 * rng.standard_normal()), calls=20) for _ in range(4)]
        found = Model({(1, 1): runs}, cores=2).predict(1, 1, 1)
        within += found.low < 0.1 * math.exp(0.05 * rng.standard_normal()) < found.high
    assert 0.83 < within / 400 < 0.95


def test_students_factor():
    for freedom, factor in ((3, 2.353), (5, 2.015), (10, 1.812), (100, 1.660)):
        assert student(freedom) == pytest.approx(factor, rel=0.005)


def test_a_compressor_that_gathers_loses_its_gain_with_more_hosts():
    model = host()
    ring_like, gathered = Compressed(0.01, 2e6), Compressed(0.01, 2e6, gathers=True)
    slow = Link(1e7, 0.0)
    assert ring_like.exchange(model, 2, 1, slow) == pytest.approx(gathered.exchange(model, 2, 1, slow))
    assert gathered.exchange(model, 16, 1, slow) > model.exchange(16, 1, slow) > ring_like.exchange(model, 16, 1, slow)


def simulated(rng, n, mean, cv, exchange, calls):
    """Ranks in lockstep with own times of a gamma distribution; runs of the same differ by 3 %. Returns own times and
    the seconds of a step."""
    own = mean * math.exp(0.03 * rng.standard_normal()) * rng.gamma(1 / cv**2, cv**2, (n, calls))
    return own, float(own.max(axis=0).mean()) + exchange


@pytest.mark.parametrize("hosts", [4, 8])
def test_simulated_clusters(hosts):
    """From runs of one and two ranks to four and eight hosts, whose link is 5 % faster or slower than it is said."""
    rng, errors, inside = np.random.default_rng(hosts), [], 0
    for _ in range(120):
        mean, cv, a, r = math.exp(rng.uniform(-4, 0)), rng.uniform(0.02, 0.25), rng.uniform(1e-4, 1e-3), 1e-9
        size, messages, rate = math.exp(rng.uniform(11, 18)), int(rng.integers(1, 20)), 10 ** rng.uniform(7, 9)
        points = {}
        for k in (1, 2):
            x = (k - 1) * (a + size * r)
            own, step = simulated(rng, k, mean, cv, x, 300)
            points[k, 1] = [Point(k, 1, 32, own, np.ones(300), step, 0.0, x, (k - 1) * a)]
        model = Model(points, 8, size, messages)
        true = Link(rate * math.exp(0.05 * rng.standard_normal()), 50e-6)
        step = simulated(rng, hosts, mean, cv, model.exchange(hosts, 1, true), 1000)[1]
        found = model.predict(hosts, 1, 1, Link(rate, 50e-6))
        errors.append(abs(found.step / step - 1))
        inside += found.low <= step <= found.high
    assert np.median(errors) < 0.05 and inside / 120 > 0.9
