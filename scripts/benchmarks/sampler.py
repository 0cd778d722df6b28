"""Memory and time of the order of an epoch, at 10^4 and 10^9 samples."""

from __future__ import annotations

import time
import tracemalloc

TITLE = "the first 8 192 samples of a shuffled epoch on one of 4 ranks, with fetching them"


def measure() -> list[dict]:
    from hvd_train.data.loader import Loader
    from hvd_train.data.synthetic import Synthetic

    rows = []
    for n in (10_000, 1_000_000_000):
        loader = Loader(Synthetic(n, (4,), 10), global_batch=1024, size=4)
        tracemalloc.start()
        began, count = time.perf_counter(), 0
        for work in loader._steps(0, 0):
            count += work().count
            if count >= 8192:
                break
        seconds, peak = time.perf_counter() - began, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        rows.append({"samples": n, "peak_bytes": peak, "microseconds_per_sample": 1e6 * seconds / count})
    return rows
