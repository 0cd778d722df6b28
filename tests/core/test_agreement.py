"""All ranks learn who differs in what, or whose work failed."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_train.core.agreement import agree, agree_on_weights, collectively, due
from hvd_train.errors import CommunicationError, ConfigError, DataError, NonFiniteError, TrainError
from hvd_train.frontends.base import checksum
from hvd_train.frontends.serial import Serial
from tests.rank_threads import run_ranks


def caught(work):
    try:
        return work()
    except TrainError as error:
        return type(error), str(error), error.common


@pytest.mark.parametrize("size", [1, 2, 5])
def test_equal_facts_pass(size):
    assert run_ranks(size, lambda c: agree(c, {"a": "1", "b": "2"})) == [None] * size


def test_a_table_of_who_differs():
    told = run_ranks(4, lambda c: caught(lambda: agree(c, {"seed": "1", "model": "B" if c.rank in (1, 3) else "A"})))
    assert len(set(told)) == 1
    kind, text, common = told[0]
    assert (kind, common) == (ConfigError, True)
    rows = [line.split() for line in text.split("\n")[1:]]
    assert rows == [["model", "rank", "0,", "2:", "A"], ["model", "rank", "1,", "3:", "B"]]


def test_a_fact_that_one_rank_lacks():
    told = run_ranks(2, lambda c: caught(lambda: agree(c, {"x": "1"} if c.rank else {})))
    assert "(none)" in told[0][1] and told[0] == told[1]


@pytest.mark.parametrize("failing", [{0}, {2}, {0, 1, 2}])
def test_one_rank_fails_all_learn_it(failing):
    def work(communicator):
        def own():
            if communicator.rank in failing:
                raise DataError("gone", where="x.npz", fix="fetch it")
            return communicator.rank

        with pytest.raises(DataError, match="gone; x.npz; fetch it") as caught:
            collectively(communicator, own)
        return caught.value.common, set(caught.value.ranks)

    assert run_ranks(3, work) == [(True, failing if len(failing) < 3 else set())] * 3


def test_results_stay_with_their_ranks():
    assert run_ranks(3, lambda c: collectively(c, lambda: c.rank * 10)) == [0, 10, 20]
    assert collectively(Serial(), lambda: 7) == 7


# ---- weights


def test_every_bit_counts():
    for dtype, size in ((np.float32, 5), (np.float64, 3), (np.float16, 7)):
        x = np.random.default_rng(0).normal(size=size).astype(dtype)
        for bit in range(8 * x.nbytes):
            other = x.copy()
            other.view(np.uint8)[bit // 8] ^= 1 << bit % 8
            assert checksum(other) != checksum(x) == checksum(x.copy())


def sums(tensors):
    return {name: checksum(x) for name, x in tensors.items()}


@pytest.mark.parametrize(
    ("size", "changed", "words"),
    [
        (2, {1: "b"}, "the weights of rank 1 differ from those of rank 0, first in b"),
        (3, {0: "a"}, "the weights of rank 0 differ from those of ranks 1, 2, first in a"),
        (4, {1: "b", 3: "a"}, "the weights of ranks 1, 3 differ from those of ranks 0, 2, first in a"),
    ],
)
def test_ranks_whose_weights_differ_are_named(size, changed, words):
    def work(communicator):
        tensors = {"a": np.arange(3.0), "b": np.ones(2), "c": np.zeros(1)}
        if communicator.rank in changed:
            tensors[changed[communicator.rank]][0] += 2.0 ** -(20 + communicator.rank)
        agree_on_weights(communicator, sums({"a": np.ones(2)}), "step 0")
        with pytest.raises(CommunicationError) as error:
            agree_on_weights(communicator, sums(tensors), "step 7")
        return error.value

    for error in run_ranks(size, work):
        assert error.exit_code == 5 and error.common
        assert str(error).startswith(f"{words}; step 7; ") and error.ranks == tuple(changed)


def test_a_rank_whose_loss_is_not_finite_is_named():
    def work(communicator):
        weights = sums({"a": np.ones(2) * communicator.rank})
        with pytest.raises(NonFiniteError) as error:
            agree_on_weights(communicator, weights, "step 7", finite=communicator.rank != 1)
        return error.value

    for error in run_ranks(3, work):
        assert error.exit_code == 6 and error.ranks == (1,)
        assert str(error).startswith("the training loss of rank 1 is not finite; step 7; ")


@pytest.mark.parametrize(
    ("moved", "words"),
    [
        (
            True,
            "the weights of rank 1 differ from those of ranks 0, 2, first in a (lr: 0.1 on ranks 0, 2 and 0.05 on ",
        ),
        (False, "the ranks differ (lr: 0.1 on ranks 0, 2 and 0.05 on rank 1); step 7; do it"),
    ],
)
def test_settings_that_differ_are_the_likely_cause(moved, words):
    def work(communicator):
        apart = communicator.rank == 1
        weights, settings = sums({"a": np.ones(2) + apart * moved}), {"lr": "0.05" if apart else "0.1", "steps": "3"}
        with pytest.raises(CommunicationError) as error:
            agree_on_weights(communicator, weights, "step 7", settings=settings, fix="do it")
        return error.value

    for error in run_ranks(3, work):
        assert error.ranks == (1,) and str(error).startswith(words) and "steps" not in str(error)
        assert error.fix == "do it" and "\n" not in str(error)


def test_when_weights_are_compared():
    assert [step for step in range(1, 301) if due(step, 100)] == [2, 10, 100, 200, 300]
    assert not any(due(step, 0) for step in range(300))
