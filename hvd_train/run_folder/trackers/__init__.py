"""The experiment trackers of ``loggers``. Each is a file and a row of ``config/trackers``."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable

from hvd_train.config.trackers import TRACKERS, TrackerSpec
from hvd_train.errors import ConfigError


def load(names: Iterable[str]) -> dict[str, TrackerSpec]:
    """Import the named trackers' packages, and return their rows. Raises ConfigError if one is not installed."""
    rows = {name: TRACKERS[name] for name in names if name in TRACKERS}
    for name, row in rows.items():
        for variable, value in row.environment.items():
            os.environ.setdefault(variable, value)  # read when the package is imported
        if row.package:
            fix = f"pip install {row.package} on the host of rank 0, or take it out of loggers"
            import_package(row.package, f"loggers: {name}", fix)
    return rows


def import_package(package: str, where: str, fix: str) -> None:
    """Import a package. Raises ConfigError if it is not installed, or incomplete."""
    try:
        importlib.import_module(package)
    except Exception as error:  # an incomplete installation may raise anything
        gone = isinstance(error, ModuleNotFoundError) and error.name == package
        reason = "is not installed" if gone else f"cannot be imported: {type(error).__name__}: {error}"
        raise ConfigError(f"{package} {reason}".splitlines()[0], where=where, fix=fix) from error
