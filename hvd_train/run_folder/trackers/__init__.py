"""The trackers of ``loggers``, which show the numbers of many runs. Each is a file and a row of ``TRACKERS``."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hvd_train.errors import ConfigError


@dataclass(frozen=True)
class Row:
    """A tracker: a value of ``loggers``.

    ``made_by``: the file in this folder, and the class in it. ``package``: what it needs. ``environment``: variables
    that keep it from the network, set where the user has not set them. ``thread``: it is called in its own thread.
    """

    made_by: str
    package: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    thread: bool = True

    @property
    def tracker_class(self) -> Any:
        file, name = self.made_by.split(":")
        return getattr(importlib.import_module(f"{__name__}.{file}"), name)


TRACKERS = {
    "csv": Row("csv_file:CsvFile", thread=False),
    "mlflow": Row("mlflow_store:MLflow", "mlflow", {"MLFLOW_DISABLE_TELEMETRY": "true"}),
    "wandb": Row("weights_and_biases:WandB", "wandb", {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}),
    "aim": Row("aim_repository:Aim", "aim"),
}


def load(names: Iterable[str]) -> dict[str, Row]:
    """Import what the named trackers need; return their rows. Raises ConfigError for one that is not installed."""
    rows = {name: TRACKERS[name] for name in names if name in TRACKERS}
    for name, row in rows.items():
        for variable, value in row.environment.items():
            os.environ.setdefault(variable, value)  # read when the package is imported
        if row.package:
            _import(name, row.package)
    return rows


def _import(name: str, package: str) -> None:
    try:
        importlib.import_module(package)
    except Exception as error:  # an incomplete installation may raise anything
        gone = isinstance(error, ModuleNotFoundError) and error.name == package
        reason = "is not installed" if gone else f"cannot be imported: {type(error).__name__}: {error}"
        fix = f"pip install {package} on the host of rank 0, or take it out of loggers"
        raise ConfigError(f"{package} {reason}".splitlines()[0], where=f"loggers: {name}", fix=fix) from error
