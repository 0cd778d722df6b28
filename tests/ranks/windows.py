"""One rank of a world of MPI: memory that others read and change while its rank is elsewhere. Prints "ok" on rank 0.

``windows.py FOLDER``: where the others leave a file when they have read and changed it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

from hvd_train.frontends.mpi import MpiWindow
from tests.limits import SECONDS

TIMES, LENGTH = 200, 1000


def main() -> int:
    ranks, folder = MPI.COMM_WORLD, Path(sys.argv[1])
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
            done = [folder / f"{kind}.{host}.{rank}" for rank in range(ranks.size) if rank != host]
            if ranks.rank == host:
                stop = time.monotonic() + SECONDS
                while not all(path.exists() for path in done):
                    assert time.monotonic() < stop, "who is elsewhere takes no part"
                    time.sleep(0.01)
            else:
                window.add(host, ones)
                window.read(host, found)
                (folder / f"{kind}.{host}.{ranks.rank}").touch()
            window.close()
    if ranks.rank == 0:
        print("ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
