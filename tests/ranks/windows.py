"""One rank of a world of MPI: memory that others read and change while its rank is elsewhere. Prints "ok" on rank 0."""

from __future__ import annotations

import sys
import time

import numpy as np
from mpi4py import MPI

from hvd_train.frontends.mpi import MpiWindow

TIMES, LENGTH, SLEEP = 200, 1000, 1.0


def main() -> int:
    ranks = MPI.COMM_WORLD
    for kind in ("float32", "float64", "int64"):
        for host in (0, ranks.size - 1):
            window = MpiWindow(ranks, LENGTH if ranks.rank == host else 0, kind)
            found, ones = np.empty(LENGTH, kind), np.ones(LENGTH, kind)
            window.read(host, found)
            assert not found.any()
            ranks.Barrier()
            for _ in range(TIMES):
                window.add(host, ones)
            ranks.Barrier()
            window.read(host, found)
            assert (found == TIMES * ranks.size).all(), found
            ranks.Barrier()
            olds = [int(window.change(host, lambda old: old + 1)[0]) for _ in range(TIMES)]
            everyone = sorted(old for part in ranks.allgather(olds) for old in part)
            assert everyone == [*range(TIMES * ranks.size, 2 * TIMES * ranks.size)], "each number once"
            if ranks.rank == host:
                time.sleep(SLEEP)
            else:
                began = time.monotonic()
                window.add(host, ones)
                window.read(host, found)
                assert time.monotonic() - began < SLEEP / 2, "who sleeps takes no part"
            window.close()
    if ranks.rank == 0:
        print("ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
