"""All ranks learn who differs in what, or whose work failed."""

from __future__ import annotations

import pytest

from hvd_train.core.agreement import agree, together
from hvd_train.errors import ConfigError, DataError, TrainError
from hvd_train.frontends.serial import Serial
from tests.numpy_frontend import run_ranks


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
            together(communicator, own)
        return caught.value.common, set(caught.value.ranks)

    assert run_ranks(3, work) == [(True, failing if len(failing) < 3 else set())] * 3


def test_results_stay_with_their_ranks():
    assert run_ranks(3, lambda c: together(c, lambda: c.rank * 10)) == [0, 10, 20]
    assert together(Serial(), lambda: 7) == 7
