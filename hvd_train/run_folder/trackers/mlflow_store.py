"""MLflow: into MLFLOW_TRACKING_URI, or else a database in the run folder."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from hvd_train.run_folder.trackers.tracker import TrackedRun, Tracker, numbers

BATCH = 100  # MLflow's limit of parameters in one call
LONGEST = 500  # MLflow's limit of characters in a parameter


class MLflow(Tracker):
    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)  # a new database logs 20 lines
        place = run.folder / "mlflow"
        address = os.environ.get("MLFLOW_TRACKING_URI")
        if not address:
            place.mkdir(parents=True, exist_ok=True)
            address = f"sqlite:///{place.resolve() / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=address)
        old = run.old_id("mlflow")
        self._id = old or self._create(run, place)
        if old:
            self._client.update_run(old, status="RUNNING")

    def _create(self, run: TrackedRun, place: Any) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "hvd_train")
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            local = place.resolve().as_uri() if place.is_dir() else None  # else the server decides where files go
            number = self._client.create_experiment(name, artifact_location=local)
        else:
            number = experiment.experiment_id
        made: str = self._client.create_run(number, run_name=run.name).info.run_id
        run.keep_id("mlflow", made)
        self._log_config(made, run)
        return made

    def _log_config(self, made: str, run: TrackedRun) -> None:
        from mlflow.entities import Param

        parameters = [Param(key, str(value)[:LONGEST]) for key, value in run.config.items()]
        for start in range(0, len(parameters), BATCH):
            self._client.log_batch(made, params=parameters[start : start + BATCH])

    def scalars(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        values = {**values, "epoch": epoch}
        self._client.log_batch(self._id, metrics=[Metric(name, float(x), now, step) for name, x in values.items()])

    def close(self, finished: bool, summary: Mapping[str, Any]) -> None:
        if summary:
            self.scalars(summary.get("epochs", 0), summary.get("steps", 0), numbers(summary))
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")
