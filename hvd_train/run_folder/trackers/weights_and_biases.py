"""Weights & Biases: files in the run folder for ``wandb sync``; with WANDB_MODE=online directly to its server."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvd_train import files
from hvd_train.run_folder.trackers.tracker import MAX_ID_BYTES, Known, Point, SavedRun, Target, TrackedRun, Tracker

DIGEST = "sent.sha256"  # of all that the files beside it hold


def _open(run: TrackedRun, name: str, folder: Path, resume: str | None, mode: Any = None) -> Any:
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    # It would intercept the program's output.
    settings = wandb.Settings(console="off", silent=True)
    opened = wandb.init(
        project=run.project or os.environ.get("WANDB_PROJECT", "hvd_train"),
        name=run.name,
        id=name,
        resume=resume,
        dir=str(folder),
        mode=mode,
        config=dict(run.config),
        settings=settings,
    )
    # A resumed run repeats steps, which W&B's own step counter would reject.
    opened.define_metric("*", step_metric="step")
    return opened


class WandB(Tracker):
    def __init__(self, run: TrackedRun) -> None:
        name = run.old_id("wandb") or secrets.token_hex(8)
        self._run = _open(run, name, run.folder, "allow")
        run.keep_id("wandb", name)

    def scalars(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "epoch": epoch, "step": step})

    def close(self, finished: bool, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=0 if finished else 1)


class WandBTarget(Target):
    """An offline run that holds all numbers, under the same id each time.

    An upload replaces what the server has of this id. Files of parts, such as those of a resumed training, would
    replace one another.
    """

    whole = True

    def __init__(self, run: TrackedRun) -> None:
        self._run, self._id = run, run.old_id("wandb") or run.own_id()
        self._folder, self._points = run.folder / "wandb-sync", list[Point]()
        self.place = f"files for 'wandb sync {self._folder}/wandb/offline-run-*'"

    def _digest(self, saved: SavedRun) -> bytes:
        held = [self._id, self._run.project, dict(self._run.config), *saved]
        return hashlib.sha256(json.dumps(held, default=str).encode()).hexdigest().encode()

    def known(self, saved: SavedRun) -> Known:
        with suppress(OSError):
            if files.content(self._folder / DIGEST, MAX_ID_BYTES) == self._digest(saved):
                return {(name, step): x for _, step, values in saved.points for name, x in values.items()}
        return {}

    def send(self, points: Iterable[Point]) -> None:
        self._points = list(points)

    def finish(self, saved: SavedRun) -> None:
        if self._points:
            fresh = self._folder.with_suffix(files.LEFT)
            shutil.rmtree(fresh, ignore_errors=True)
            self._write(fresh, saved)
            files.put(fresh / DIGEST, self._digest(saved))
            shutil.rmtree(self._folder, ignore_errors=True)
            os.rename(fresh, self._folder)

    def _write(self, folder: Path, saved: SavedRun) -> None:
        run = _open(self._run, self._id, folder, None, "offline")
        for epoch, step, values in self._points:
            run.log({**values, "epoch": epoch, "step": step})
        run.summary.update(dict(saved.summary))
        run.finish(exit_code=1 if saved.state == "stopped" else 0)
