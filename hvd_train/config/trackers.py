"""The table of trackers. The configuration reads it, so it imports no tracker."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


def _class_of(made_by: str) -> Any:
    file, name = made_by.split(":")
    return getattr(importlib.import_module(f"hvd_train.run_folder.trackers.{file}"), name)


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
        return _class_of(self.made_by)


@dataclass(frozen=True)
class TargetSpec:
    """A tracker to which ``hvd-train sync`` sends: a value of ``--to``.

    ``made_by``, ``package``, ``environment``: as for ``TrackerSpec``. ``address``, ``project``: whether it takes
    ``--uri`` and ``--project``. ``patience``: variables that end the wait for a server that does not answer.
    """

    made_by: str
    package: str
    environment: Mapping[str, str] = field(default_factory=dict)
    address: bool = True
    project: bool = True
    patience: Mapping[str, str] = field(default_factory=dict)

    @property
    def target_class(self) -> Any:
        return _class_of(self.made_by)


QUIET_WANDB = {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}
TRACKERS = {
    "csv": TrackerSpec("csv_file:CsvFile", thread=False),
    "mlflow": TrackerSpec("mlflow_store:MLflow", "mlflow", {"MLFLOW_DISABLE_TELEMETRY": "true"}),
    "wandb": TrackerSpec("weights_and_biases:WandB", "wandb", QUIET_WANDB),
    "aim": TrackerSpec("aim_repository:Aim", "aim"),
}
_ANSWER = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}
TARGETS = {
    "mlflow": TargetSpec("mlflow_store:MLflowTarget", "mlflow", TRACKERS["mlflow"].environment, patience=_ANSWER),
    "wandb": TargetSpec("weights_and_biases:WandBTarget", "wandb", QUIET_WANDB, address=False),
    "aim": TargetSpec("aim_repository:AimTarget", "aim"),
    "tensorboard": TargetSpec("tensorboard_folder:TensorBoardTarget", "", project=False),
    "csv": TargetSpec("csv_file:CsvTarget", "", address=False, project=False),
}
