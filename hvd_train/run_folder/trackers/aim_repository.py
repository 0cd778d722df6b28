"""Aim: into the repository AIM_REPO, or else one in the run folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hvd_train.run_folder.trackers.tracker import TrackedRun, Tracker


class Aim(Tracker):
    def __init__(self, run: TrackedRun) -> None:
        import aim

        repository = os.environ.get("AIM_REPO")
        if not repository:
            (run.folder / "aim").mkdir(parents=True, exist_ok=True)
            repository = str(run.folder / "aim")
        quiet: dict[str, Any] = {"system_tracking_interval": None, "capture_terminal_logs": False}
        self._run = aim.Run(run.old_id("aim"), repo=repository, experiment="hvd_train", **quiet)
        self._run.name = run.name
        self._run["config"] = dict(run.config)
        run.keep_id("aim", self._run.hash)

    def scalars(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            metric, _, subset = name.partition("/")
            self._run.track(value, name=metric, step=step, epoch=epoch, context={"subset": subset} if subset else {})

    def close(self, finished: bool, summary: Mapping[str, Any]) -> None:
        self._run["finished"], self._run["summary"] = finished, dict(summary)
        self._run.close()
