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
    *arguments: str, cwd: Path = ROOT, code: int | None = 0, seconds: int = SECONDS, **environ: str
) -> subprocess.CompletedProcess:
    """Run ``hvd-train`` to its end. ``code``: what it must end with; None: anything."""
    pytest.importorskip("horovod")
    line = [sys.executable, "-m", "hvd_train", *arguments]
    own = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    done = subprocess.run(line, cwd=cwd, env=own, capture_output=True, text=True, timeout=seconds, check=False)
    assert code in (None, done.returncode), done.stdout + done.stderr
    return done
