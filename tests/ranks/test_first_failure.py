"""One rank alone cannot read its data, and its launcher ends the others: the line of another rank claims no more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_train.launch.start import environment
from tests.limits import SECONDS

BIN = Path(sys.executable).parent
DATA = """
import os
import time
from pathlib import Path

import numpy as np


def parts():
    if "0" in (os.environ.get("OMPI_COMM_WORLD_RANK"), os.environ.get("HOROVOD_RANK")):
        Path("begun").touch()  # the signal of the launcher is handled by now
        return (np.zeros((8, 4), np.float32), np.arange(8) % 2), (np.zeros((8, 4), np.float32), np.arange(8) % 2)
    while not Path("begun").exists():
        time.sleep(0.05)
    return np.load("/no/such/data.npz")
"""


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun"])
def test_only_the_failure_is_blamed(tmp_path, launcher):
    (tmp_path / "mine.py").write_text(DATA)
    before = [str(BIN / launcher), *(["-np", "2"] if launcher == "mpirun" else ["-np", "2", "--gloo"])]
    line = [*before, str(BIN / "hvd-train"), "fit", "--run-dir", "run", "--set", "data.name=mine:parts"]
    env = environment() | {"PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))}
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
    said = done.stdout + done.stderr
    assert done.returncode, said
    assert said.count("error[rank 1]: ") == 1 and "/no/such/data.npz" in said
    assert "stopped by" not in said and "look for a crash" not in said and "lost" not in said
    if "SIGTERM" in said:
        assert "rank 0 was told to stop (SIGTERM) before the first step: there was nothing to save" in said
