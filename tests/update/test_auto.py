"""The automatic choice: what is fastest on the clock, the plain gradient where it is as fast, the same on all ranks."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from hvd_train.compression import make
from hvd_train.protocol import Packing, TensorSpec
from hvd_train.update import auto
from tests.numpy_frontend import NumpyOps
from tests.rank_threads import Threads, run_ranks

SPECS = [TensorSpec("w", (300, 200), "float32"), TensorSpec("b", (200,), "float32")]
OPTIONS = {"topk": {"ratio": 0.01}, "powersgd": {"rank": 4}}


class Clock(threading.local):
    """Each rank's own time, which the link alone moves: no test waits, or depends on the machine."""

    now = 0.0

    def perf_counter(self):
        return self.now


class Slow(Threads):
    """A link of so many seconds per byte and per call."""

    def __init__(self, threads, clock, per_byte, per_call):
        self.__dict__.update(threads.__dict__)
        self.clock, self.per_byte, self.per_call = clock, per_byte, per_call

    def _take_time(self, x):
        self.clock.now += self.per_call + self.per_byte * x.nbytes

    def allreduce_async(self, x, name, op="sum"):
        self._take_time(x)
        return super().allreduce_async(x, name, op)

    def allgather_async(self, x, name):
        self._take_time(x)
        return super().allgather_async(x, name)

    def alltoall_async(self, x, sizes, name):
        self._take_time(x)
        return super().alltoall_async(x, sizes, name)


def chosen(monkeypatch, size, per_byte, per_call=0.0):
    clock = Clock()
    monkeypatch.setattr(auto, "time", clock)

    def work(communicator):
        link = Slow(communicator, clock, per_byte * (1 + communicator.rank), per_call)  # ranks see different times
        packing = Packing(1 << 20, 1 << 20)
        return auto.choose(SPECS, packing, lambda n: make(n, size, link.rank, **OPTIONS.get(n, {})), link, NumpyOps())

    results = run_ranks(size, work)
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.parametrize("size", [2, 3])
def test_a_slow_link_takes_what_sends_least(monkeypatch, size):
    choice, seconds = chosen(monkeypatch, size, 1e-6)
    assert choice == min(seconds, key=seconds.get) and choice in ("topk", "powersgd")
    assert seconds["none"] == pytest.approx(size * 1e-6 * (60_200 * 4)), "the slowest rank's time counts"
    assert set(seconds) == set(auto.CANDIDATES)


def test_what_leaves_more_out_must_be_worth_it(monkeypatch):
    """Where a call costs all and a byte nothing, fewer bytes are no reason."""
    assert chosen(monkeypatch, 2, 0.0, 1e-3)[0] == "none"


def test_int8_on_a_slow_link_where_what_leaves_out_more_is_no_faster(monkeypatch):
    monkeypatch.setattr(auto, "CANDIDATES", ("none", "fp16", "int8"))
    choice, seconds = chosen(monkeypatch, 4, 1e-6)
    assert choice == "int8" and seconds["int8"] < auto.WORTH * seconds["fp16"] < seconds["none"]


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

    def work(c):
        return auto.choose(specs, Packing(1, 1), lambda n: make(n, 2, c.rank, **OPTIONS.get(n, {})), c, Typed())

    run_ranks(2, work)
    assert kinds == {"float64"}
