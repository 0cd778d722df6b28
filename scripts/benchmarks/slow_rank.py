"""Steps/s of rank 0 while rank 1 takes ten times as long per step: synchronous, and where no rank waits.

Each step ends with a pause, so that the figure is about waiting and not about cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from hvd_train.core.hooks import Hook

TITLE = "steps of rank 0 beside a slow rank"
MODES, FRAMEWORKS, RANKS, TURNS = ("allreduce", "async", "parameter_server"), ("pytorch", "tensorflow"), (2, 4), 2
PAUSE, FACTOR = 0.02, 10
FACTORS = "HVD_TRAIN_SLOW_RANK"  # rank 1's pause in multiples of rank 0's


class Pause(Hook):
    """Pauses after each step, and records the milliseconds between two steps of rank 0 in an epoch."""

    def __init__(self) -> None:
        self._times: list[tuple[float, int]] = []

    def on_step(self, trainer, info) -> None:
        rank = trainer.communicator.rank
        trainer.frontend.run_queued()
        time.sleep(PAUSE * (int(os.environ[FACTORS]) if rank == 1 else 1))
        self._times.append((time.perf_counter(), trainer.progress.epoch))

    def on_end(self, trainer, summary) -> None:
        if trainer.communicator.rank == 0:
            times, epochs = (np.array(column) for column in zip(*self._times, strict=True))
            # Not across an epoch's end, and not the step after a synchronization.
            inside = np.diff(times)[np.diff(epochs) == 0]
            Path("milliseconds.json").write_text(json.dumps((1000 * inside).tolist()))


def run(framework: str, mode: str, ranks: int, factor: int, folder: Path) -> list[float]:
    """Train for two epochs; return the milliseconds of each step of rank 0."""
    (folder / "slow_rank.py").write_text(Path(__file__).read_text())
    keys = {"framework": framework, "exchange.mode": mode, "hooks": "[slow_rank:Pause]", "max_epochs": 2}
    keys |= {"data.name": "digits", "model.name": "mlp", "model.hidden": "[64]", "batch_size": 8, "run_dir": "run"}
    sets = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    line = [str(Path(sys.executable).parent / "hvd-train"), "fit", "-np", str(ranks), "--overwrite", *sets]
    subprocess.run(line, cwd=folder, env=os.environ | {FACTORS: str(factor)}, check=True, stdout=subprocess.DEVNULL)
    return json.loads((folder / "milliseconds.json").read_text())


def measure() -> list[dict]:
    rows, cases = [], [(f, m, n) for f in FRAMEWORKS for n in RANKS for m in MODES]
    with tempfile.TemporaryDirectory() as folder:
        for framework, mode, ranks in cases:
            taken: dict[int, list[float]] = {1: [], FACTOR: []}
            for _ in range(TURNS):  # in turns: other work on the machine disturbs all alike
                for factor, times in taken.items():
                    times += run(framework, mode, ranks, factor, Path(folder))
            even, slow = (float(np.mean(taken[factor])) for factor in (1, FACTOR))
            row = {"framework": framework, "mode": mode, "ranks": ranks, "ms, all alike": even}
            rows.append(row | {f"ms, rank 1 {FACTOR} times slower": slow, "share of the speed": even / slow})
            print(json.dumps(rows[-1]), flush=True)
    return rows


if __name__ == "__main__":
    measure()
