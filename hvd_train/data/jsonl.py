"""Read JSON lines, one object a line, into columns."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_train.errors import DataError

if TYPE_CHECKING:
    from pyarrow import ChunkedArray

LONGEST = 1 << 26  # bytes of a line
FIX = "correct it, or leave the line out"


def keys_of(path: Path, every_line: bool = True) -> list[str]:
    """Return the keys of all lines, or of the first one, in the order in which they come."""
    keys: dict[str, None] | None = None
    with open(path, "rb") as stream:
        for number, line in enumerate(iter(lambda: stream.readline(LONGEST), b""), 1):
            if line.strip():
                keys = (keys or {}) | dict.fromkeys(_record(line, path, number))
                if not every_line:
                    break
    if keys is None:
        raise DataError("the file has no line", where=str(path))
    return list(keys)


def read_jsonl(
    path: Path, names: Sequence[str], gaps: Collection[str] = ()
) -> tuple[dict[str, ChunkedArray], list[str]]:
    """Read these keys of all lines; also return the keys that are missing in the first line.

    ``gaps``: the names whose value may be missing.
    """
    import pyarrow

    values: dict[str, list[Any]] = {name: [] for name in names}
    first: dict[str, Any] = {}
    late: dict[str, None] = {}
    with open(path, "rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            record = _record(line, path, number)
            first = first or record
            if record.keys() != first.keys():
                late |= dict.fromkeys(key for key in record if key not in first and key not in values)
            for name, column in values.items():
                if record.get(name) is None and name not in gaps:
                    raise DataError(f"'{name}' has no value", where=f"{path}, line {number}", fix=FIX)
                column.append(record.get(name))
    columns = {}
    for name, column in values.items():
        there = sum(value is not None for value in column)
        if 0 < (count := sum(isinstance(value, bool) for value in column)) < there:
            what = f"'{name}' holds values of several kinds: true or false in {count:,} of {len(column):,} lines"
            raise DataError(what, where=str(path), fix=FIX)
        try:
            columns[name] = pyarrow.chunked_array([pyarrow.array(column)])
        except (pyarrow.ArrowException, OverflowError) as error:
            reason = str(error).splitlines()[0]
            raise DataError(f"'{name}' holds values of several kinds: {reason}", where=str(path), fix=FIX) from error
    return columns, list(late)


def _record(line: bytes, path: Path, number: int) -> dict[str, Any]:
    where = f"{path}, line {number}"
    try:
        record = json.loads(line.rstrip(b"\r\n"), object_pairs_hook=_unique)
    except json.JSONDecodeError as error:  # its line counts within this one line of the file
        raise DataError(
            f"the line is not JSON: {error.msg} (character {error.pos + 1})", where=where, fix=FIX
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"the line is not JSON: {str(error).splitlines()[0]}", where=where, fix=FIX) from error
    if not isinstance(record, dict):
        raise DataError(
            "the line is not an object of names and values", where=where, fix='write {"text": "...", "label": 0}'
        )
    return record


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object and refuse duplicate keys, of which Python would keep the last one."""
    record = dict(pairs)
    if len(record) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"'{twice[:60]}' stands twice")
    return record
