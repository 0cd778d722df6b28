"""Weights & Biases: files in the run folder for ``wandb sync``; with WANDB_MODE=online directly to its server."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import Any

from hvd_train.run_folder.trackers.tracker import TrackedRun, Tracker


class WandB(Tracker):
    def __init__(self, run: TrackedRun) -> None:
        import wandb

        run.folder.mkdir(parents=True, exist_ok=True)
        name = run.old_id("wandb") or secrets.token_hex(8)
        # It would intercept the program's output.
        settings = wandb.Settings(console="off", silent=True)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "hvd_train"),
            name=run.name,
            id=name,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.config),
            settings=settings,
        )
        run.keep_id("wandb", name)
        # A resumed run repeats steps, which W&B's own step counter would reject.
        self._run.define_metric("*", step_metric="step")

    def scalars(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "epoch": epoch, "step": step})

    def close(self, finished: bool, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=0 if finished else 1)
