"""A worker of pytest-xdist that crashes costs one test, and the run ends."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.limits import SECONDS

ROOT = Path(__file__).parents[1]
CONFTEST = """
import pytest
from tests.scheduling import Scheduling

def pytest_xdist_make_scheduler(config, log):
    return Scheduling(config, log)
"""
TESTS = """
import os, time, pytest

@pytest.mark.parametrize("k", range({}))
def test(k):
    time.sleep(0.02)
    if k == {}:
        os._exit(3)
"""


def test_a_crash_fails_one_test_and_all_others_run(tmp_path):
    """Two at once, one in the middle of a file, one at its end, after files that are done."""
    files = [("a", 3, 1), ("b", 3, 1), ("c", 5, -1), ("d", 6, 2), ("e", 1, -1), ("f", 4, 3), ("g", 9, -1)]
    for name, count, crash in files:
        (tmp_path / f"test_{name}.py").write_text(TESTS.format(count, crash))
    (tmp_path / "conftest.py").write_text(CONFTEST)
    line = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-p"]
    line += ["no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(
        line, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 1 and "4 failed, 27 passed" in done.stdout, done.stdout + done.stderr
    crashed = re.findall(r"crashed while running '(.*)'", done.stdout)
    assert sorted(one.split("/")[-1] for one in crashed) == [
        f"test_{name}.py::test[{crash}]" for name, _, crash in files if crash >= 0
    ]
