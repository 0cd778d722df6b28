"""Aim: into the repository AIM_REPO, or else one in the run folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hvd_train.run_folder.trackers.tracker import Known, Point, SavedRun, Target, TrackedRun, Tracker


def _repository(run: TrackedRun) -> str:
    address = run.address or os.environ.get("AIM_REPO")
    if not address:
        (run.folder / "aim").mkdir(parents=True, exist_ok=True)
        return str(run.folder / "aim")
    return address if "://" in address else str(Path(address).expanduser().resolve())


def _open(run: TrackedRun, name: str | None, repository: str) -> Any:
    """Open the run with this hash, None: a new one."""
    import aim

    quiet: dict[str, Any] = {"system_tracking_interval": None, "capture_terminal_logs": False}
    opened = aim.Run(name, repo=repository, experiment=run.project or "hvd_train", **quiet)
    opened.name = run.name
    return opened


def _track(opened: Any, epoch: int, step: int, values: Mapping[str, float]) -> None:
    for name, value in values.items():
        metric, _, subset = name.partition("/")
        opened.track(value, name=metric, step=step, epoch=epoch, context={"subset": subset} if subset else {})


class Aim(Tracker):
    def __init__(self, run: TrackedRun) -> None:
        self._run = _open(run, run.old_id("aim"), _repository(run))
        self._run["config"] = dict(run.config)
        run.keep_id("aim", self._run.hash)

    def scalars(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        _track(self._run, epoch, step, values)

    def close(self, finished: bool, summary: Mapping[str, Any]) -> None:
        self._run["finished"], self._run["summary"] = finished, dict(summary)
        self._run.close()


class AimTarget(Target):
    """The run that training logs to if it is in this repository, else one whose hash the run folder keeps."""

    def __init__(self, run: TrackedRun) -> None:
        from aim.sdk.errors import MissingRunError

        self._run, self._repository = run, _repository(run)
        # The run folder may be moved with its own repository.
        place = self._repository if run.address or os.environ.get("AIM_REPO") else ""
        self._key = f"aim-{hashlib.sha256(f'{run.own_id()} {place}'.encode()).hexdigest()[:8]}"
        sent, logged = run.old_id(self._key), run.old_id("aim")
        for name in dict.fromkeys((sent, logged, None)):
            try:
                self._opened = _open(run, name, self._repository)
                break
            except MissingRunError:  # removed, or in another repository
                continue
        self.live = sent is None and self._opened.hash == logged
        self._keep()

    def _keep(self) -> None:
        if not self.live:
            self._run.keep_id(self._key, self._opened.hash)
        self.place = f"aim ({self._repository}, run {self._opened.hash})"

    def known(self, saved: SavedRun) -> Known:
        known = {}
        for metric in self._opened.metrics():
            subset = metric.context.to_dict().get("subset", "")
            steps, (values, *_) = metric.data.numpy()
            name = f"{metric.name}/{subset}" if subset else metric.name
            known.update({(name, int(step)): float(x) for step, x in zip(steps, values, strict=True)})
        return known

    def renew(self, step: int) -> str:
        # Aim replaces the number of a step, but removes none.
        old, self.live = self._opened, False
        old.name = f"{self._run.name} (replaced)"
        old.close()
        self._opened = _open(self._run, None, self._repository)
        self._keep()
        return f"all are in a new run, and the old one, {old.hash}, is now called '{old.name}'"

    def send(self, points: Iterable[Point]) -> None:
        for epoch, step, values in points:
            _track(self._opened, epoch, step, values)

    def finish(self, saved: SavedRun) -> None:
        for key, value in (("config", self._run.config), ("summary", saved.summary)):
            self._opened[key] = dict(value)
        self._opened["finished"] = saved.state == "finished"
        self._opened.close()
