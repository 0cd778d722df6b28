"""Hosts have unequal cores: what ranks compute after an exchange has the same bits under any number of threads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_the_bits_after_an_exchange_do_not_depend_on_threads(framework):
    found = []
    for threads in ("1", "2"):
        line = [sys.executable, "-m", "tests.compression.bits", framework, threads]
        run = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
        assert run.returncode == 0, run.stderr[-2000:]
        found.append(json.loads(run.stdout.splitlines()[-1]))
    assert len(found[0]) == 32
    assert not [key for key in found[0] if len({one[key] for one in found}) > 1]
