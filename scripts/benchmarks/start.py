"""Seconds from the command to the end of the first step, on 1 and 2 ranks."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from one_rank import FRAMEWORKS, PYTHON

TITLE = "seconds from the command to the end of the first step (median and slowest of 3)"


def measure() -> list[dict]:
    ways = {ranks: ["-np", str(ranks)] for ranks in (1, 2)}
    return started([(framework, ranks, [], words) for framework in FRAMEWORKS for ranks, words in ways.items()])


def started(cases: list[tuple[str, int, list[str], list[str]]]) -> list[dict]:
    """Start each case three times, in turns. A case: (framework, ranks, words before ``hvd-train fit``, after it)."""
    from hvd_train.launch.start import environment

    seconds: list[list[float]] = [[] for _ in cases]
    for _ in range(3):
        for durations, (framework, ranks, before, after) in zip(seconds, cases, strict=True):
            with tempfile.TemporaryDirectory() as folder:
                sets = [f"framework={framework}", "model.name=cnn", "data.image_size=28", "log_every_n_steps=1"]
                words = [word for s in [*sets, "max_steps=2"] for word in ("--set", s)]
                line = [*before, str(PYTHON.parent / "hvd-train"), "fit", *after, "--run-dir", folder, *words]
                env = environment() if before else None
                began = time.perf_counter()
                job = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
                metrics = Path(folder) / "metrics.jsonl"
                while job.poll() is None and not (metrics.exists() and metrics.stat().st_size):
                    time.sleep(0.005)
                durations.append(time.perf_counter() - began)
                if job.wait():
                    sys.exit(f"error: {framework} on {ranks} ranks ended with exit code {job.returncode}")
    return [
        {"framework": framework, "ranks": ranks, "seconds": median(durations), "slowest": max(durations)}
        | ({"launcher": Path(before[0]).name} if before else {})
        for durations, (framework, ranks, before, _) in zip(seconds, cases, strict=True)
    ]
