"""Memory of the ranks of one host: sums, common tensors, and what happens when a rank ends."""

from __future__ import annotations

import mmap
import os
import random
import signal
import time
from itertools import pairwise
from multiprocessing import get_context

import numpy as np
import pytest

from hvd_train.errors import LostRankError
from hvd_train.frontends.host_memory import VARIABLE, HostMemory, offsets
from hvd_train.update.sharded import part_sizes
from tests.limits import SECONDS
from tests.rank_threads import run_ranks


def in_memory(memory: mmap.mmap, dtype, entries: int, start: int) -> np.ndarray:
    return np.frombuffer(memory, dtype, entries, start)


def connected(communicator) -> HostMemory:
    host = HostMemory.of(communicator, in_memory)
    assert host is not None
    return host


def one_piece_each(entries: int, ranks: int) -> list[list[tuple[int, int]]]:
    ends = np.cumsum([0, *part_sizes(entries, ranks)]).tolist()
    return [[cut] for cut in pairwise(ends)]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_in_rank_order_step_after_step(size):
    """Also where a rank is late, several tensors are under way, and a part or a tensor is small or empty."""
    entries, steps = [1000, 1, size, 77], 30
    rng = np.random.default_rng(0)
    values = [[rng.standard_normal((size, n)) for n in entries] for _ in range(steps)]

    def work(communicator):
        host, pauses = connected(communicator), random.Random(communicator.rank)
        sums = host.sums([8 * n for n in entries])
        results = []
        for step in values:
            started = []
            for k, tensor in enumerate(step):
                time.sleep(pauses.choice([0, 0, 0.002]))
                started.append(sums.start(k, tensor[host.rank].copy(), one_piece_each(tensor.shape[1], size)))
            results.append([finish() for finish in started])
            host.barrier("step")
        return results

    of_ranks = run_ranks(size, work)
    for number, step in enumerate(values):
        for k, tensor in enumerate(step):
            total = tensor[0].copy()
            for x in tensor[1:]:
                total += x
            np.testing.assert_array_equal(np.concatenate([results[number][k] for results in of_ranks]), total)


@pytest.mark.parametrize(
    ("ranks", "together", "hosts"),
    [(4, 2, [[0, 1], [2, 3]]), (6, 3, [[0, 1, 2], [3, 4, 5]]), (4, 4, [[0, 1, 2, 3]]), (3, 2, None), (4, 3, None)],
)
def test_hosts_of_equal_numbers_of_ranks(monkeypatch, ranks, together, hosts):
    monkeypatch.setenv(VARIABLE, str(together))

    def work(communicator):
        host = HostMemory.of(communicator, in_memory)
        if host is None:
            return None
        x, pieces = np.arange(10.0) + communicator.rank, [[(0, 2), (7, 10)], [(2, 3), (3, 7)], []][: host.size]
        total = host.sums([80]).start(0, x, [*pieces, *[[]] * (host.size - len(pieces))])()
        host.barrier("end")
        return host.rank, host.hosts, total.tolist()

    results = run_ranks(ranks, work)
    if hosts is None:
        assert results == [None] * ranks
        return
    for rank, (place, known, total) in enumerate(results):
        mates = next(one for one in hosts if rank in one)
        assert known == hosts and mates[place] == rank
        entries = [[0, 1, 7, 8, 9], [2, 3, 4, 5, 6], [], []][place]
        assert total == [sum(entry + one for one in mates) for entry in entries]


def test_half_the_type_takes_half_the_memory():
    """A compressor may send fewer bytes than the gradient has."""

    def work(communicator):
        host = connected(communicator)
        x = np.full(10, 1 + host.rank, np.float16)
        total = host.sums([40]).start(0, x, one_piece_each(10, 2))()
        host.barrier("end")
        return total

    assert [part.tolist() for part in run_ranks(2, work)] == [[3.0] * 5] * 2


def test_common_tensors_have_rank_0s_values_and_show_what_others_write():
    def work(communicator):
        host = connected(communicator)
        first, second = host.share([np.full(3, float(host.rank)), np.arange(5) * (1 - host.rank)])
        seen = first.tolist(), second.tolist()
        host.barrier("seen")
        second[host.rank] = 10 + host.rank
        host.barrier("written")
        return *seen, second.tolist()

    expected = ([0.0, 0.0, 0.0], [0, 1, 2, 3, 4], [10, 11, 12, 3, 4])
    assert run_ranks(3, work) == [expected] * 3


def test_many_messages_that_nobody_reads_hold_nobody_up():
    def work(communicator):
        host = connected(communicator)
        for _ in range(5000):
            host.send("a word")
        host.wait("a word")

    run_ranks(3, work)


@pytest.mark.parametrize("why", ["the variable", "a rank's device"])
def test_all_ranks_go_without_where_one_cannot(monkeypatch, why):
    if why == "the variable":
        monkeypatch.setenv(VARIABLE, "0")

    def work(communicator):
        usable = why == "the variable" or communicator.rank != 1
        return HostMemory.of(communicator, in_memory, usable)

    assert run_ranks(3, work) == [None] * 3


def test_one_rank_shares_with_nobody():
    assert run_ranks(1, lambda communicator: HostMemory.of(communicator, in_memory)) == [None]


class Piped:
    """A communicator of two processes, for the two gathers by which they connect."""

    def __init__(self, rank: int, pipe) -> None:
        self.rank, self.size, self._pipe = rank, 2, pipe

    def allgather_bytes(self, data: bytes, name: str = "") -> list[bytes]:
        self._pipe.send_bytes(data)
        other = self._pipe.recv_bytes()
        return [data, other] if self.rank == 0 else [other, data]


def _stand(pipe) -> None:
    host = connected(Piped(1, pipe))
    host.sums([80])
    host.barrier("ready")
    time.sleep(SECONDS)


@pytest.mark.parametrize("place", ["sum", "barrier", "allocate"])
def test_a_rank_that_is_killed_is_noticed_at_once(place):
    context = get_context("spawn")
    here, there = context.Pipe()
    other = context.Process(target=_stand, args=[there])
    other.start()
    host = connected(Piped(0, here))
    sums = host.sums([80])
    host.barrier("ready")
    os.kill(other.pid, signal.SIGKILL)
    other.join(SECONDS)
    with pytest.raises(LostRankError, match="was lost"):
        if place == "sum":
            sums.start(0, np.zeros(10), one_piece_each(10, 2))()
        elif place == "barrier":
            host.barrier("step")
        else:
            host.allocate([8, 8])


def test_arrays_begin_at_multiples_of_the_alignment():
    assert offsets([]) == [0] and offsets([1, 64, 65, 0]) == [0, 64, 128, 256, 256]
