"""Launched worlds, started once each: ``worlds(framework, launcher, size)`` gives the results of all cases."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

from tests.launching import SECONDS, launch
from tests.ranks.cases import cases
from tests.ranks.job import SHARED, Job, cores_of_rank_0, settings, summary


class Results:
    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size

    def json(self, name: str) -> list[dict]:
        return [json.loads((self.folder / f"{name}.{rank}.json").read_text()) for rank in range(self.size)]

    def trees(self, name: str) -> list[dict[str, np.ndarray]]:
        return [dict(np.load(self.folder / f"{name}.{rank}.npz")) for rank in range(self.size)]


@pytest.fixture(scope="session")
def worlds(tmp_path_factory):
    done: dict[tuple, Results] = {}

    def get(framework: str, launcher: str, size: int) -> Results:
        key = (framework, launcher if size > 1 else "", size)
        if key not in done:
            folder = tmp_path_factory.mktemp("-".join(map(str, key)))
            (folder / "cases.json").write_text(json.dumps(cases(framework, size, folder)))
            run = launch(size, launcher, ["-m", "tests.ranks.worker", framework, str(folder)])
            assert run.returncode == 0, f"{run.args}\n{run.stdout[-3000:]}\n{run.stderr[-3000:]}"
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
