"""Read files of a run folder, which may be another user's: a plain file, not too large, of values that can be shown.

Everything that reads a run which this process does not train goes through here.
"""

from __future__ import annotations

import io
import json
import math
import os
import stat
from pathlib import Path
from typing import Any

from hvd_train.errors import CheckpointError

MAX_BYTES = 4 << 20  # of summary.json, config.yaml and the like
MAX_DIGITS = 18  # of a whole number: 64 bits


def content(path: Path, most: int = MAX_BYTES) -> bytes:
    """Return the bytes of a file. Raises FileNotFoundError, and CheckpointError for what is no file or has too many."""
    with opened(path, most) as stream:
        return stream.read(most + 1)


def opened(path: Path, most: int) -> io.BufferedReader:
    """Open a plain file of at most ``most`` bytes; the opening of a pipe or a device would wait, or have no end."""
    try:
        # Twice: opening a device may do something, and what lies there may be another file when it is opened.
        _check(path, os.stat(path), most)
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        stream = open(descriptor, "rb")  # noqa: SIM115
        try:
            _check(path, os.fstat(descriptor), most)
        except CheckpointError:
            stream.close()
            raise
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", where=str(path)) from error
    return stream


def _check(path: Path, status: os.stat_result, most: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError("is no plain file", where=str(path), fix="take it away")
    if status.st_size > most:
        what = f"has {status.st_size:,} bytes; {most:,} are the most"
        raise CheckpointError(what, where=str(path), fix="take it away")


def json_object(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file. Raises FileNotFoundError and CheckpointError."""
    try:
        return parsed(content(path))
    except ValueError as error:
        raise CheckpointError(f"is damaged: {error}", where=str(path)) from error


def parsed(text: bytes) -> dict[str, Any]:
    """Return the object of a JSON text. What is no finite number (NaN, 1e999) is None. Raises ValueError."""
    try:
        value = json.loads(text, parse_int=_whole, parse_float=_finite, parse_constant=lambda name: None)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON ({str(error)[:80]})") from error
    if not isinstance(value, dict):
        raise ValueError("it holds no object")
    return value


def _whole(digits: str) -> int:
    if len(digits.lstrip("-")) > MAX_DIGITS:
        raise ValueError(f"a whole number of {len(digits)} digits")
    return int(digits)


def _finite(digits: str) -> float | None:
    number = float(digits)
    return number if math.isfinite(number) else None
