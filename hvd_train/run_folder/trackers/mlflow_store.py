"""MLflow: into MLFLOW_TRACKING_URI, or else a database in the run folder."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hvd_train.run_folder.trackers.tracker import Known, Point, SavedRun, Target, TrackedRun, Tracker, numbers

BATCH, NUMBERS = 100, 1000  # MLflow's limits of parameters and of metrics in one call
LONGEST = 500  # MLflow's limit of characters in a parameter
TAG = "hvd_train.run"  # which run folder a run was sent from
STATES = {"running": "RUNNING", "finished": "FINISHED", "stopped": "KILLED"}


def _client(run: TrackedRun) -> tuple[Any, str, Path]:
    """Return MLflow's client, the address of its store, and the folder of a store in the run folder."""
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)  # a new database logs 20 lines
    place = run.folder / "mlflow"
    address = run.address or os.environ.get("MLFLOW_TRACKING_URI")
    if not address:
        place.mkdir(parents=True, exist_ok=True)
        address = f"sqlite:///{place.resolve() / 'mlflow.db'}"
    return MlflowClient(tracking_uri=address), address, place


def _experiment(client: Any, run: TrackedRun, place: Path) -> str:
    name = run.project or os.environ.get("MLFLOW_EXPERIMENT_NAME", "hvd_train")
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        local = place.resolve().as_uri() if place.is_dir() else None  # else the server decides where files go
        number: str = client.create_experiment(name, artifact_location=local)
        return number
    return str(experiment.experiment_id)


def _log_config(client: Any, made: str, config: Mapping[str, Any]) -> None:
    from mlflow.entities import Param

    parameters = [Param(key, text) for key, text in _parameters(config).items()]
    for start in range(0, len(parameters), BATCH):
        client.log_batch(made, params=parameters[start : start + BATCH])


def _parameters(config: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value)[:LONGEST] for key, value in config.items()}


class MLflow(Tracker):
    def __init__(self, run: TrackedRun) -> None:
        self._client, _, place = _client(run)
        old = run.old_id("mlflow")
        self._id = old or self._create(run, place)
        if old:
            self._client.update_run(old, status="RUNNING")

    def _create(self, run: TrackedRun, place: Path) -> str:
        made: str = self._client.create_run(_experiment(self._client, run, place), run_name=run.name).info.run_id
        run.keep_id("mlflow", made)
        _log_config(self._client, made, run.config)
        return made

    def scalars(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        values = {**values, "epoch": epoch}
        self._client.log_batch(self._id, metrics=[Metric(name, float(x), now, step) for name, x in values.items()])

    def close(self, finished: bool, summary: Mapping[str, Any]) -> None:
        if summary:
            self.scalars(summary.get("epochs", 0), summary.get("steps", 0), numbers(summary))
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")


class MLflowTarget(Target):
    """The run that training logs to if it is in this store, else one that a tag marks."""

    def __init__(self, run: TrackedRun) -> None:
        self._client, address, place = _client(run)
        self._run, self._experiment, self._known = run, _experiment(self._client, run, place), set[tuple[str, int]]()
        self._id, self.live = self._find(), False
        if not self._id:
            logged = run.old_id("mlflow")
            self.live = bool(logged) and self._has(str(logged))
            self._id = str(logged) if self.live else self._create()
        self.place = f"mlflow ({address}, run {self._id})"

    def _find(self) -> str:
        found = self._client.search_runs([self._experiment], f"tags.`{TAG}` = '{self._run.own_id()}'", max_results=1)
        return found[0].info.run_id if found else ""

    def _has(self, name: str) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            tags = self._client.get_run(name).data.tags
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise
        return TAG not in tags

    def _create(self) -> str:
        # With its tag from the start, so that a kill leaves no run that is not found again.
        tags = {TAG: self._run.own_id()}
        return str(self._client.create_run(self._experiment, tags=tags, run_name=self._run.name).info.run_id)

    def known(self, saved: SavedRun) -> Known:
        names = self._client.get_run(self._id).data.metrics
        history = {name: self._client.get_metric_history(self._id, name) for name in names}
        known = {(name, one.step): one.value for name, rows in history.items() for one in rows}
        self._known = set(known)
        return known

    def renew(self, step: int) -> str:
        # MLflow removes no number from a run.
        old = self._id
        self._client.set_tag(old, TAG, f"{self._run.own_id()} until step {step}")
        self._client.update_run(old, status="KILLED", name=f"{self._run.name} (replaced)")
        self._id, self._known = self._create(), set()
        self.place = self.place.replace(old, self._id)
        return f"all are in a new run, and the old one, {old}, is now called '{self._run.name} (replaced)'"

    def send(self, points: Iterable[Point]) -> None:
        from mlflow.entities import Metric

        now, waiting = int(time.time() * 1000), list[Any]()
        for epoch, step, values in points:
            more = {} if ("epoch", step) in self._known else {"epoch": float(epoch)}
            self._known.add(("epoch", step))
            waiting += [Metric(name, float(x), now, step) for name, x in {**more, **values}.items()]
        for start in range(0, len(waiting), NUMBERS):
            self._log(waiting[start : start + NUMBERS])

    def _log(self, metrics: list[Any]) -> None:
        self._client.log_batch(self._id, metrics=metrics)

    def finish(self, saved: SavedRun) -> None:
        epochs, steps = (saved.summary.get(name, 0) for name in ("epochs", "steps"))
        results = {name: x for name, x in numbers(saved.summary).items() if (name, steps) not in self._known}
        self.send([Point(epochs, steps, results)] if results else [])
        known, config = self._client.get_run(self._id).data.params, _parameters(self._run.config)
        _log_config(self._client, self._id, {key: text for key, text in config.items() if key not in known})
        for key, text in config.items():
            if known.get(key, text) != text:  # which a resumed run may change, and MLflow does not
                self._client.set_tag(self._id, f"now.{key}", text)
        self._client.update_run(self._id, status=STATES[saved.state])
