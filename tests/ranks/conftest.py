"""Launched worlds, started once each: ``worlds(framework, launcher, size)`` gives the results of all cases."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_train.launch.start import command, environment
from tests.ranks.cases import cases
from tests.ranks.job import SHARED, Job, cores_of_rank_0, settings, summary

ROOT = Path(__file__).parents[2]
SECONDS = 3600  # of a whole world, on a busy machine: some 50 cases, each of which has its own limit in the worker


class Results:
    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size

    def json(self, name: str) -> list[dict]:
        return [json.loads((self.folder / f"{name}.{rank}.json").read_text()) for rank in range(self.size)]

    def trees(self, name: str) -> list[dict[str, np.ndarray]]:
        return [dict(np.load(self.folder / f"{name}.{rank}.npz")) for rank in range(self.size)]


def world_command(size: int, launcher: str, program: list[str]) -> list[str]:
    """The product's own launcher line, with another program behind it."""
    if size == 1:
        return [sys.executable, *program]
    line = command(size, launcher, [])
    at = len(line) - line[::-1].index(sys.executable)  # the last one: what starts ranks over Gloo is Python, too
    return [*line[:at], *program]


@contextmanager
def in_turn(size: int) -> Iterator[None]:
    """Around a large world: those of this clone run one after the other.

    Ranks wait for one another thousands of times, and on cores that another world uses as well each time costs a slice
    of its time: two worlds side by side took several times as long as one after the other.
    """
    with open(__file__) as file:  # closing it ends the turn
        if size > 1:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run_world(size: int, line: list[str], **options: Any) -> subprocess.CompletedProcess:
    """Run the command line of a world of ``size`` ranks to its end, as ``subprocess.run`` does."""
    with in_turn(size):
        return subprocess.run(line, capture_output=True, text=True, check=False, **options)


@pytest.fixture(scope="session")
def worlds(tmp_path_factory, request):
    done: dict[tuple, Results] = {}

    def get(framework: str, launcher: str, size: int) -> Results:
        key = (framework, launcher if size > 1 else "", size)
        if key not in done:
            folder = tmp_path_factory.mktemp("-".join(map(str, key)))
            (folder / "cases.json").write_text(
                json.dumps(cases(framework, size, folder, request.config.getoption("--long")))
            )
            line = world_command(size, launcher, ["-m", "tests.ranks.worker", framework, str(folder)])
            run = run_world(size, line, cwd=ROOT, env=environment(), timeout=SECONDS)
            assert run.returncode == 0, f"{line}\n{run.stdout[-3000:]}\n{run.stderr[-3000:]}"
            done[key] = Results(folder, size)
        return done[key]

    return get


@pytest.fixture(scope="module", autouse=True)
def nothing_in_shared_memory():
    """Nothing of the ranks that were killed here stays in memory."""
    yield
    stop = time.monotonic() + SECONDS
    while (left := [path for path in SHARED if Path(path).exists()]) and time.monotonic() < stop:
        time.sleep(0.1)
    assert not left


@pytest.fixture(scope="session")
def expected(tmp_path_factory):
    """The summary of two ranks under ``-np``, which each framework and settings need to train only once."""
    found: dict[tuple, dict] = {}

    def get(framework: str, *sets: str) -> dict:
        key = (framework, *sets)
        if key not in found:
            folder = tmp_path_factory.mktemp(f"expected-{framework}")
            code, out, err = Job("-np", folder, *settings(folder / "run", f"framework={framework}", *sets)).end()
            assert code == 0, out + err
            assert cores_of_rank_0(folder / "run") == max(1, len(os.sched_getaffinity(0)) // 2)
            found[key] = summary(folder / "run")
        return found[key]

    return get
