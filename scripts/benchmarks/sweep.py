"""Trials as separate launches, and in one world of 2 ranks."""

from __future__ import annotations

import subprocess
import tempfile
import time

from one_rank import PYTHON, ROOT

TRIALS = 8
TITLE = f"seconds for {TRIALS} trials of scripts/configs/tiny.yaml, once each"


def measure() -> list[dict]:
    rates = ",".join(str(0.01 * (k + 1)) for k in range(TRIALS))
    sweep = ["-c", str(ROOT / "scripts" / "configs" / "tiny.yaml"), "--param", f"optim.lr={rates}", "-np", "2"]
    ways = {
        f"{TRIALS} launches of 2 ranks": [],
        "2 ranks a trial": ["--ranks-per-trial", "2"],
        "1 rank a trial": ["--ranks-per-trial", "1"],
    }
    rows: list[dict] = []
    for name, words in ways.items():
        with tempfile.TemporaryDirectory() as folder:
            line = [str(PYTHON.parent / "hvd-train"), "sweep", *sweep, *words, "--run-dir", f"{folder}/sweep"]
            began = time.perf_counter()
            subprocess.run(line, stdout=subprocess.DEVNULL, check=True)
            seconds = time.perf_counter() - began
        rows.append({"how": name, "seconds": seconds, "ratio": (rows[0]["seconds"] if rows else seconds) / seconds})
    return rows
