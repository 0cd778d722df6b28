"""Where the suite's minutes go: CPU seconds, which do not depend on what else the machine does, by file and by case.

A worker appends a line per case to the file that ``FILE`` names; ``tests/conftest.py`` adds them up.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FILE = "HVD_TRAIN_TEST_SECONDS"
_told = []


def spent() -> float:
    """CPU seconds of this process and of all that it started and that have ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def tell(worker: str, case: str, seconds: float) -> None:
    if FILE in os.environ:
        with open(os.environ[FILE], "a") as file:  # one write of one short line: ranks do not mix theirs
            file.write(json.dumps([worker, case, seconds]) + "\n")


@contextmanager
def counted(worker: str, case: str) -> Iterator[None]:
    """Around one case of a worker on one rank."""
    before = time.process_time()
    if not _told:
        _told.append(worker)
        tell(worker, "(start)", before)
    yield
    tell(worker, case, time.process_time() - before)


def cases() -> list[tuple[float, str, str, int]]:
    """(CPU seconds of all ranks, worker or "" for a whole file, case or file, how many ranks ran it), largest first."""
    seconds: Counter[tuple[str, str]] = Counter()
    ranks: Counter[tuple[str, str]] = Counter()
    for line in Path(os.environ[FILE]).read_text().splitlines():
        worker, case, one = json.loads(line)
        seconds[worker, case] += one
        ranks[worker, case] += 1
    return [(total, *key, ranks[key]) for key, total in seconds.most_common()]
