"""The automatic choice: what is fastest on the clock, the plain gradient where it is as fast, the same on all ranks."""

from __future__ import annotations

import time

import numpy as np
import pytest

from hvd_train.compression import make
from hvd_train.core import auto
from hvd_train.protocol import Packing, TensorSpec
from tests.numpy_frontend import NumpyOps, Threads, run_ranks

SPECS = [TensorSpec("w", (300, 200), "float32"), TensorSpec("b", (200,), "float32")]
OPTIONS = {"topk": {"ratio": 0.01}, "powersgd": {"rank": 4}}


class Slow(Threads):
    """A link of so many seconds per byte."""

    def __init__(self, threads, seconds):
        self.__dict__.update(threads.__dict__)
        self.seconds = seconds

    def allreduce_async(self, x, name, op="sum"):
        time.sleep(self.seconds * x.nbytes)
        return super().allreduce_async(x, name, op)

    def allgather_async(self, x, name):
        time.sleep(self.seconds * x.nbytes)
        return super().allgather_async(x, name)


def chosen(size, seconds):
    def work(communicator):
        link = Slow(communicator, seconds * (1 + communicator.rank))  # ranks see different clocks
        return auto.choose(
            SPECS, Packing(1 << 20, 1 << 20), lambda n: make(n, size, **OPTIONS.get(n, {})), link, NumpyOps()
        )

    results = run_ranks(size, work)
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.parametrize("size", [2, 3])
def test_a_slow_link_takes_what_sends_least(size):
    choice, seconds = chosen(size, 4e-6)
    assert choice in ("topk", "powersgd") and seconds[choice] < 0.5 * seconds["none"]
    assert set(seconds) == set(auto.CANDIDATES)


def test_a_fast_link_sends_the_gradient_itself():
    # Every candidate sends 4 or more times fewer bytes; that the waits are equal leaves the arithmetic to decide.
    assert chosen(2, 0.0)[0] in ("none", "fp16")


def test_one_rank_has_nothing_to_send():
    (result,) = run_ranks(1, lambda c: auto.choose(SPECS, Packing(1, 1), make, c, NumpyOps()))
    assert result == ("none", {})


def test_gradients_have_the_type_of_the_weights():
    kinds = set()

    class Typed(NumpyOps):
        def from_numpy(self, x):
            kinds.add(np.asarray(x).dtype.name)
            return super().from_numpy(x)

    specs = [TensorSpec("w", (100, 100), "float64")]
    run_ranks(2, lambda c: auto.choose(specs, Packing(1, 1), lambda n: make(n, 2, **OPTIONS.get(n, {})), c, Typed()))
    assert kinds == {"float64"}
