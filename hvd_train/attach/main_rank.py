"""What a script's rank 0 does for all ranks: it prints, and shows progress."""

from __future__ import annotations

import builtins
from typing import Any

from hvd_train.errors import ConfigError


def print_on(main: bool, *values: Any, **options: Any) -> None:
    """Python's ``print`` where ``main`` is true; nothing elsewhere."""
    if main:
        builtins.print(*values, **options)


def progress_on(main: bool, where: str, *arguments: Any, **options: Any) -> Any:
    """tqdm's progress bar over an iterable. It shows where ``main`` is true, and is silent elsewhere.

    ``where``: the function's name in the script. Raises ConfigError where tqdm is not installed.
    """
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ConfigError("tqdm is not installed", where=where, fix="pip install tqdm", common=True) from error
    return tqdm(*arguments, **{**options, "disable": options.get("disable", False) if main else True})
