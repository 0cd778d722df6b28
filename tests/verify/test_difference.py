"""What is reported of two records: the place of the largest difference, and causes before consequences."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from hvd_train.verify.difference import Runs, farthest, findings, rows
from hvd_train.verify.record import Record

WEIGHTS = {"weights/a": np.array([[1.0, -2.0], [0.5, 4.0]]), "weights/b": np.zeros(3)}


def record(size=1, steps=3, statistics=False, **changes):
    first = {k: x + 0 for k, x in WEIGHTS.items()} | ({"statistics/m": np.ones(2)} if statistics else {})
    last = {k: x + 0.25 for k, x in first.items()}
    made = Record(
        losses=1.0 / np.arange(1, steps + 1),
        rates=np.full((size, steps), 0.1),
        samples=[np.arange(4 * k, 4 * k + 4) for k in range(steps)],
        trees={"first": first, "last": last},
        differing={"first": {}, "last": {}},
    )
    return replace(made, **changes)


def runs(**changes):
    return Runs("1 rank of x", record(**changes), record(steps=1, rates=np.ones((changes.get("size", 1), 1))))


def differences(other, one=None):
    return findings(one or runs(), other)


def test_the_farthest_entry_and_its_place():
    a, b = np.array([[1.0, -4.0], [2.0, 0.0]]), np.array([[1.0, -4.0], [2.0, 0.4]])
    assert farthest(a, b) == (pytest.approx(0.1), "[1, 1]")
    assert farthest(a, a) == (0.0, "-") and farthest(np.zeros(0), np.zeros(0)) == (0.0, "-")
    assert farthest(a, b[0])[0] == math.inf == farthest(a, b * np.nan)[0] == farthest(np.zeros(2), np.ones(2))[0]
    assert farthest(np.array([1e-20]), np.array([2e-20]), floor=1e-6)[0] < 1e-13, "noise is no difference"
    assert farthest(np.array([np.nan, 1]), np.array([np.nan, 1]))[0] == 0
    assert farthest(np.array(4.0), np.array(5.0)) == (0.25, "[]"), "a number, as Adam's count of steps"


def test_equal_worlds_have_no_findings():
    assert differences(runs(size=2)) == [] and all(row.difference == 0 for row in rows(runs(), runs(size=2)))
    names = [row.what for row in rows(runs(), runs())]
    assert names == ["loss", "learning rate", "samples", "gradient/a", "gradient/b", "weights/a", "weights/b"]


def test_a_tensor_of_rounding_alone_does_not_differ():
    """As the bias of a batch norm that another one follows: its gradient is 0, but for what sums leave."""
    for gap, differs in ((1e-14, False), (1e-11, True)):
        trees = record().trees
        moved = trees | {"last": trees["last"] | {"weights/b": np.array([0, gap, 0])}}
        still = trees | {"last": trees["last"] | {"weights/b": np.zeros(3)}}
        assert bool(differences(runs(size=2, trees=moved), runs(trees=still))) == differs


def test_samples():
    twice = [np.array([0, 1, 1, 2]), *record().samples[1:]]
    assert differences(runs(samples=twice)) == ["samples of step 1: 1 seen twice, 1 left out"]
    other = [*record().samples[:2], np.array([8, 9, 10, 99])]
    assert differences(runs(samples=other)) == ["samples of step 3: 1 left out, 1 that do not belong there"]


def test_rates_and_losses():
    rates = np.full((2, 3), 0.1)
    rates[1, 2] = 0.4
    expected = "the learning rate of step 3 is 4 times that of 1 rank of x (0.4 against 0.1)"
    assert differences(runs(size=2, rates=rates)) == [expected]
    losses = np.array([1.5, 0.5, 1 / 3])
    (text,) = differences(runs(size=2, losses=losses, statistics=True), runs(statistics=True))
    assert text.startswith("unsynchronized batch norm: the loss of step 1 is 1.5 against 1 ")
    (text,) = differences(runs(size=2, losses=losses))
    assert "depends on the rank" in text
    assert differences(runs(size=2, losses=np.array([1, 0.5, 0.4])))[0].startswith("loss differs by 6.7e-02 at step 3")


def test_weights_that_differ_come_with_their_cause():
    first, last = record().trees["first"], record().trees["last"]
    far = {"first": first, "last": last | {"weights/a": last["weights/a"] * [[1, 1], [1, 1.5]]}}
    assert differences(runs(trees=far)) == ["after 3 steps weights/a differs by 5.0e-01 at [1, 1]"]
    more = {"first": first, "last": last | {"slots/a": np.ones(2)}}
    assert differences(runs(trees=more)) == ["after 3 steps slots/a differs by inf at only in one of them"]
    apart = {"first": {1: {"weights/b": np.ones(3)}}, "last": {1: {"weights/b": np.ones(3)}}}
    expected = "the ranks start with different weights: rank 1 against rank 0, first in weights/b"
    assert differences(runs(size=2, differing=apart))[0] == expected
    moved = {"first": first | {"weights/b": np.full(3, 1e-3)}, "last": last}
    assert differences(runs(trees=moved))[0].startswith("the first weights differ: weights/b by ")


def test_numbers_that_are_none_on_both_sides_are_not_equal():
    losses = np.array([1.0, np.nan, np.nan])
    (text,) = differences(runs(size=2, losses=losses), runs(losses=losses))
    assert text == "the loss of step 2 is nan in both: from there on nothing is compared"
    trees = record().trees
    spoilt = trees | {"last": trees["last"] | {"weights/b": np.array([0, np.inf, 0])}}
    (text,) = differences(runs(size=2, trees=spoilt), runs(trees=spoilt))
    assert text == "weights/b ends with numbers that are none in both, which are not compared"
    masks = {stage: tree | {"statistics/mask": np.full(2, -np.inf)} for stage, tree in trees.items()}
    assert differences(runs(size=2, trees=masks), runs(trees=masks)) == [], "a mask is meant so"


def test_gradients():
    tree = {k: x + 0 for k, x in WEIGHTS.items()}
    double = {"first": tree, "last": {k: x + 0.5 for k, x in tree.items()}}
    one, plain = runs(), record(steps=1, rates=np.ones((1, 1)))
    times = Runs("2 ranks of x", one.training, replace(plain, trees=double))
    assert differences(times) == ["the gradient of step 1 is 2 times that of 1 rank of x"]
    other = {"first": tree, "last": {"weights/a": tree["weights/a"] + 0.25, "weights/b": tree["weights/b"] + 0.3}}
    assert differences(Runs("", one.training, replace(plain, trees=other)))[0].startswith(
        "the gradient of step 1 differs: gradient/b by "
    )
    apart = {"first": {}, "last": {1: {"weights/a": tree["weights/a"]}}}
    (text,) = differences(Runs("", one.training, replace(plain, differing=apart)))
    assert text == "the gradient of step 1 differs between ranks (rank 1 against rank 0): no exchange"
