"""Checks that all ranks agree, before the first collective of training and later: an error table instead of a hang."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypeVar

from hvd_train import errors
from hvd_train.errors import CommunicationError, ConfigError, NonFiniteError, TrainError, name_ranks
from hvd_train.protocol import Communicator, Model, allgather_json

T = TypeVar("T")
EARLY = (2, 10)  # check after these steps, to report early differences at once
WEIGHTS_FIX = "look for a faulty host or code that depends on the rank; --resume auto goes on from the last checkpoint"
NONFINITE_FIX = "lower optim.lr, set gradient_clip_val, or look for NaN in the data"


def agree(communicator: Communicator, facts: Mapping[str, str], name: str = "agree") -> None:
    """Raise the same ConfigError on all ranks if a fact differs, with one line per fact and rank group.

    ``name``: of the collective, which the user sees if a rank does not join.
    """
    everyone = allgather_json(communicator, dict(facts), name)
    rows = []
    for key in dict.fromkeys(k for local in everyone for k in local):
        values = [local.get(key, "(none)") for local in everyone]
        if len(set(values)) > 1:
            groups = {v: [r for r, other in enumerate(values) if other == v] for v in dict.fromkeys(values)}
            rows += [f"  {key:<20} rank {', '.join(map(str, ranks))}: {value}" for value, ranks in groups.items()]
    if rows:
        raise ConfigError("\n".join(["the ranks differ, so training would hang or be wrong:", *rows]), common=True)


def agree_on_start(name: str, model: Model, facts: Mapping[str, str]) -> None:
    """Compare model, data, configuration and versions before the first collective that could hang."""
    specs = json.dumps([(s.name, s.shape, s.dtype) for s in model.specs()])
    digest = hashlib.sha256(specs.encode()).hexdigest()[:12]
    agree(model.groups.world, {**facts, "model": f"{name}, {len(model.specs())} tensors, {digest}"})


def collectively(communicator: Communicator, work: Callable[[], T]) -> T:
    """Run ``work`` on every rank. If it fails on any, all ranks raise that error. ``work`` must call no collective."""
    result, failure = None, None
    # TrainError only: any other exception is a bug, and ends this rank and thus the job.
    try:
        result = work()
    except TrainError as error:
        failure = error
    record = [type(failure).__name__, failure.what, failure.where, failure.fix] if failure else None
    records = allgather_json(communicator, record, "together")
    failed = {rank: record for rank, record in enumerate(records) if record}
    if failed:
        kind, what, where, fix = next(iter(failed.values()))
        ranks = () if len(failed) == len(records) else tuple(failed)
        raise getattr(errors, kind)(what, where=where, fix=fix, common=True, ranks=ranks) from failure
    return result  # type: ignore[return-value]


def due(step: int, every: int) -> bool:
    """Return whether ranks of a script compare weights at ``step``: regularly (``every`` 0: never), and early."""
    return bool(every) and (step % every == 0 or step in EARLY)


def agree_on_weights(
    communicator: Communicator,
    sums: Mapping[str, int],
    where: str,
    *,
    finite: bool = True,
    settings: Mapping[str, str] | None = None,
    fix: str = WEIGHTS_FIX,
) -> None:
    """Raise the same error on all ranks if one has a loss that is not ``finite``, or different weights.

    Must be called on all ranks. ``sums``: {name: 64-bit sum of a weight's bits}, in the same order on every rank. Each
    rank sends nine bytes, and the sums only if something differs. ``settings``: other values that must be equal, and if
    not are the likely cause: {"learning rate of SGD": "0.1"}. The message then shows them, with ``fix``.
    """
    local = json.dumps([dict(sums), dict(settings or {})]).encode()
    # Digest first, and sums only if it differs, because a large model has megabytes of them.
    everyone = communicator.allgather_bytes(hashlib.blake2b(local, digest_size=8).digest() + bytes([finite]), "weights")
    broken = [rank for rank, part in enumerate(everyone) if not part[8]]
    if broken:
        what = f"the training loss of {name_ranks(broken)} is not finite"
        raise NonFiniteError(what, where=where, fix=NONFINITE_FIX, common=True, ranks=broken)
    # The majority is right. With two ranks that cannot be known.
    right = Counter(everyone).most_common(1)[0][0]
    deviating = [rank for rank, part in enumerate(everyone) if part != right]
    if deviating:
        tables = [json.loads(part) for part in communicator.allgather_bytes(local, "weights")]
        first = next((name for name in sums if len({weights.get(name) for weights, _ in tables}) > 1), None)
        others = name_ranks([rank for rank in range(len(everyone)) if rank not in deviating])
        what = f"the weights of {name_ranks(deviating)} differ from those of {others}, first in {first}"
        causes = []
        for name in dict.fromkeys(key for _, table in tables for key in table):
            values: dict[str | None, list[int]] = {}
            for rank, (_, table) in enumerate(tables):
                values.setdefault(table.get(name), []).append(rank)
            if len(values) > 1:
                causes.append(f"{name}: " + " and ".join(f"{v} on {name_ranks(ranks)}" for v, ranks in values.items()))
        if causes:
            what = f"{what if first else 'the ranks differ'} ({'; '.join(causes)})"
        raise CommunicationError(what, where=where, fix=fix, common=True, ranks=deviating)
