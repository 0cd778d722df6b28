"""An environment with more packages than that of the tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import SECONDS

ROOT = Path(__file__).parents[1]


def run_pytest_with(packages: list[str], folder: Path, *words: str) -> str:
    """Install the packages beside those that are here, and run pytest with ``words``; what it printed."""
    python = folder / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True, timeout=SECONDS)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    installed = subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=False, capture_output=True)
    if installed.returncode:
        pytest.skip(f"pip cannot install them: {installed.stderr.decode().splitlines()[-1]}")
    (site / "hvd_train.pth").write_text(f"{ROOT}\n{Path(pytest.__file__).parents[1]}\n")
    line = [python, "-m", "pytest", "-n", "0", "-q", "-rs", "-p", "no:cacheprovider", *words]
    done = subprocess.run(line, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout
