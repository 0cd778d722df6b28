"""Ranks that differ are stopped before the first collective of training, with a table instead of a hang."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TypeVar

from hvd_train import errors
from hvd_train.errors import ConfigError, TrainError
from hvd_train.protocol import Communicator

T = TypeVar("T")


def agree(communicator: Communicator, facts: Mapping[str, str]) -> None:
    """Raises the same ConfigError on all ranks when a fact differs, with one line per fact and rank group."""
    everyone = [json.loads(part) for part in communicator.allgather_bytes(json.dumps(dict(facts)).encode())]
    rows = []
    for key in dict.fromkeys(k for own in everyone for k in own):
        values = [own.get(key, "(none)") for own in everyone]
        if len(set(values)) > 1:
            groups = {v: [r for r, other in enumerate(values) if other == v] for v in dict.fromkeys(values)}
            rows += [f"  {key:<20} rank {', '.join(map(str, ranks))}: {value}" for value, ranks in groups.items()]
    if rows:
        raise ConfigError("\n".join(["the ranks differ, so training would hang or be wrong:", *rows]), common=True)


def together(communicator: Communicator, work: Callable[[], T]) -> T:
    """Runs ``work`` on every rank; if it fails on any, all ranks raise that error. ``work`` holds no collective."""
    result, failure = None, None
    try:
        result = work()
    except TrainError as error:
        failure = error
    record = [type(failure).__name__, failure.what, failure.where, failure.fix] if failure else None
    records = [json.loads(part) for part in communicator.allgather_bytes(json.dumps(record).encode())]
    failed = {rank: record for rank, record in enumerate(records) if record}
    if failed:
        kind, what, where, fix = next(iter(failed.values()))
        ranks = () if len(failed) == len(records) else tuple(failed)
        raise getattr(errors, kind)(what, where=where, fix=fix, common=True, ranks=ranks) from failure
    return result  # type: ignore[return-value]
