"""Code of the user's own, as the configuration names it: ``package.module:function``, or handed over in Python."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from hvd_train.errors import ConfigError, TrainError

GIVEN: dict[str, Callable[..., Any]] = {}  # what ``hvd_train.fit`` was handed over, while it runs


def look_here() -> None:
    """A console script does not look where the user stands."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def own_function(name: str, where: str, kind: type[TrainError] = ConfigError) -> Callable[..., Any]:
    """The function of this name; raises ``kind`` where there is none."""
    if name in GIVEN:
        return GIVEN[name]
    module, _, function = name.partition(":")
    look_here()
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise kind(f"cannot be imported: {error}", where=where, fix=handed_over(name, where)) from error


def handed_over(name: str, where: str) -> str:
    """What to do about code that only a script or notebook had, at its key ``where``."""
    if not name.startswith("__main__:") and "<" not in name:
        return ""
    key = where.partition(":")[0]
    return f"it was handed over in Python; put it into a module of its own and name it, --set {key}=package.module:name"
