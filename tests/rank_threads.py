"""Ranks that are threads of this process, over the third framework's communicator."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tests.limits import SECONDS
from tests.numpy_frontend import Gathered


class World:
    """What the threads of one world share."""

    def __init__(self, size: int) -> None:
        self.size, self.slots = size, [None] * size
        self.barrier = threading.Barrier(size, timeout=SECONDS)

    def gather(self, rank, value):
        self.slots[rank] = value
        self.barrier.wait()
        everyone = list(self.slots)
        self.barrier.wait()
        return everyone


class Threads(Gathered):
    """A communicator whose ranks are threads."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.size = world, rank, world.size
        self.local_rank, self.local_size = rank, world.size

    def open(self):
        pass

    def everyone(self, value):
        return self.world.gather(self.rank, value)

    def window(self, entries, dtype):
        memories = self.everyone(np.zeros(entries, dtype))
        return ThreadsWindow(memories, self.everyone(threading.Lock())[0])


class ThreadsWindow:
    """``memories``: of all ranks, under one lock."""

    def __init__(self, memories, lock):
        self.memories, self.lock = memories, lock

    def read(self, rank, into):
        with self.lock:
            into[:] = self.memories[rank]

    def add(self, rank, x):
        with self.lock:
            self.memories[rank] += x

    def change(self, rank, to):
        with self.lock:
            old = self.memories[rank].copy()
            self.memories[rank][:] = to(old)
            return old

    def close(self):
        pass


def run_ranks(size, work):
    """[work(communicator)] of all ranks; the first error ends the others."""
    world = World(size)

    def guarded(rank):
        try:
            return work(Threads(world, rank))
        except threading.BrokenBarrierError:
            return None
        except BaseException:
            world.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(guarded, rank) for rank in range(size)]
        return [future.result(SECONDS) for future in futures]
