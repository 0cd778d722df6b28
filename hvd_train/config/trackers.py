"""The table of trackers. The configuration reads it, so it imports no tracker."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TrackerSpec:
    """A tracker: a value of ``loggers``.

    ``made_by``: file in ``run_folder/trackers`` and class. ``package``: the package that it needs. ``environment``:
    variables that keep it offline, set unless the user has set them. ``thread``: it is called in a thread of its own.
    """

    made_by: str
    package: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    thread: bool = True

    @property
    def tracker_class(self) -> Any:
        file, name = self.made_by.split(":")
        return getattr(importlib.import_module(f"hvd_train.run_folder.trackers.{file}"), name)


QUIET_WANDB = {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}
TRACKERS = {
    "csv": TrackerSpec("csv_file:CsvFile", thread=False),
    "mlflow": TrackerSpec("mlflow_store:MLflow", "mlflow", {"MLFLOW_DISABLE_TELEMETRY": "true"}),
    "wandb": TrackerSpec("weights_and_biases:WandB", "wandb", QUIET_WANDB),
    "aim": TrackerSpec("aim_repository:Aim", "aim"),
}
