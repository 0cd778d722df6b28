"""Resident memory of one rank after 400 and after 2 400 steps."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from one_rank import FRAMEWORKS, alone, cnn_trainer

STEPS = 400, 2400
TITLE = "resident memory of one rank in a long run"


def train(framework: str) -> dict:
    """Train in this process; return its resident memory at two steps."""
    from hvd_train.core.hooks import Hook
    from hvd_train.launch.environment import keep_memory

    resident: list[int] = []

    class Watching(Hook):
        def on_step(self, trainer, info) -> None:
            if trainer.progress.step in STEPS:
                pages = int(Path("/proc/self/statm").read_text().split()[1])
                resident.append(pages * os.sysconf("SC_PAGE_SIZE"))

    trainer = cnn_trainer(framework, {"max_steps": STEPS[1] + 1}, Watching())
    keep_memory()
    trainer.fit()
    first, last = (x / 2**20 for x in resident)
    return {"framework": framework} | {
        f"MB after {step:,} steps": x for step, x in zip(STEPS, (first, last), strict=True)
    }


def measure() -> list[dict]:
    return [alone(__file__, framework) for framework in FRAMEWORKS]


if __name__ == "__main__":
    print(json.dumps(train(sys.argv[1])))
