"""Read files of a run folder, which may be another user's, with checks of file type, size and values.

All access to runs that this process does not train goes through here.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from hvd_train import files
from hvd_train.config.reading import plain
from hvd_train.errors import CheckpointError, ConfigError

MAX_BYTES = 4 << 20  # for summary.json, config.yaml and the like
MAX_DIGITS = 18  # limit of integers: 64 bits
LARGEST = 1e300  # limit of numbers, so that differences are finite


def content(path: Path, most: int = MAX_BYTES) -> bytes:
    """Return the bytes of a file. Raises FileNotFoundError and CheckpointError."""
    try:
        return files.content(path, most)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"the file cannot be read: {error.strerror}", where=str(path)) from error


def json_object(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file. Raises FileNotFoundError and CheckpointError."""
    try:
        return parsed(content(path))
    except ValueError as error:
        raise CheckpointError(f"the file is damaged: {error}", where=str(path)) from error


def yaml_object(path: Path) -> dict[str, Any]:
    """Return the object of a YAML file; {} if there is none, or it cannot be read."""
    with suppress(OSError, CheckpointError, ConfigError, yaml.YAMLError, ValueError, RecursionError):
        read = plain(content(path).decode("utf-8"), str(path))
        return read if isinstance(read, dict) else {}
    return {}


def number(value: object) -> TypeGuard[int | float]:
    """Return whether a JSON value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def parsed(text: bytes) -> dict[str, Any]:
    """Return the object of a JSON text. Non-finite numbers (NaN, 1e999) become None. Raises ValueError."""
    try:
        value = json.loads(text, parse_int=_whole, parse_float=_finite, parse_constant=lambda name: None)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON ({str(error)[:80]})") from error
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def _whole(digits: str) -> int:
    if len(digits.lstrip("-")) > MAX_DIGITS:
        raise ValueError(f"a whole number of {len(digits)} digits")
    return int(digits)


def _finite(digits: str) -> float | None:
    number = float(digits)
    return number if abs(number) <= LARGEST else None
