"""Ranks that differ are stopped: before the first collective of training, with a table instead of a hang, and later."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from hvd_train import errors
from hvd_train.errors import CommunicationError, ConfigError, NonFiniteError, TrainError
from hvd_train.protocol import Communicator, FrontEnd

T = TypeVar("T")
NONFINITE_FIX = "lower optim.lr, set gradient_clip_val, or look for NaN in the data"


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


def agree_on_weights(frontend: FrontEnd, finite: bool, where: str) -> None:
    """Raises the same error on all ranks where one's loss is not finite, or its weights are not those of the others.

    Nine bytes of a rank travel: a hash of its weights, and whether its loss is ``finite``. Only where hashes differ
    the sums of all tensors follow.
    """
    sums, communicator = frontend.checksums(), frontend.communicator
    digest = hashlib.blake2b(json.dumps(list(sums.values())).encode(), digest_size=8).digest()
    everyone = communicator.allgather_bytes(digest + bytes([finite]))
    broken = [rank for rank, part in enumerate(everyone) if not part[8]]
    if broken:
        what = f"the training loss of {_ranks(broken)} is not finite"
        raise NonFiniteError(what, where=where, fix=NONFINITE_FIX, common=True, ranks=broken)
    # Most ranks are right; of two that differ nobody knows which.
    right = Counter(everyone).most_common(1)[0][0]
    apart = [rank for rank, part in enumerate(everyone) if part != right]
    if apart:
        tables = [json.loads(part) for part in communicator.allgather_bytes(json.dumps(sums).encode())]
        first = next(name for name in sums if len({table[name] for table in tables}) > 1)
        others = _ranks([rank for rank in range(len(everyone)) if rank not in apart])
        what = f"the weights of {_ranks(apart)} differ from those of {others}, first in {first}"
        fix = "look for a faulty host or code that depends on the rank; --resume auto goes on from the last checkpoint"
        raise CommunicationError(what, where=where, fix=fix, common=True, ranks=apart)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
