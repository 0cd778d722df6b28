"""A program on the ranks of a launched world."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_train.engine.library import MISSING, horovod
from hvd_train.launch.start import command, environment

ROOT = Path(__file__).parents[1]
SECONDS = 3600  # of a whole world, on a busy machine; a case has its own limit, which ends a hang


def needs_horovod() -> None:
    """Skip a test that starts ranks where there is no Horovod, as with ``scripts/test --quick``."""
    if horovod() == MISSING:
        pytest.skip("Horovod is missing")


def launch(
    size: int, launcher: str, program: list[str], folder: Path = ROOT, seconds: float = SECONDS, **variables: str
) -> subprocess.CompletedProcess:
    """Run a Python program on so many ranks, behind the product's own launcher line, to its end.

    Worlds of this clone run one after the other. Ranks wait for one another thousands of times, and on cores that
    another world uses as well each time costs a slice of its time: two worlds side by side took several times as long.
    """
    line = [sys.executable, *program]
    if size > 1:
        line = command(size, launcher, [])
        at = len(line) - line[::-1].index(sys.executable)  # the last one: what starts ranks over Gloo is Python, too
        line = [*line[:at], *program]
    own = {**environment(), "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", **variables}
    with open(__file__) as file:  # closing it ends the turn
        if size > 1:
            fcntl.flock(file, fcntl.LOCK_EX)
        return subprocess.run(line, cwd=folder, env=own, capture_output=True, text=True, timeout=seconds, check=False)
