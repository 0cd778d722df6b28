"""One command as a user gives it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import SECONDS

ROOT = Path(__file__).parents[2]


def run(
    *arguments: str, cwd: Path = ROOT, code: int = 0, seconds: int = SECONDS, **environ: str
) -> subprocess.CompletedProcess:
    pytest.importorskip("horovod")
    line = [sys.executable, "-m", "hvd_train", *arguments]
    own = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    done = subprocess.run(line, cwd=cwd, env=own, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done
