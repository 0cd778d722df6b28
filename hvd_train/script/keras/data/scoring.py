"""Each rank's part of the data that a script evaluates or predicts.

Each rank takes one contiguous part, every sample exactly once. If a result depends on the batch boundaries, the parts
are whole global batches. ``steps`` count global batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from hvd_train.data.order import share
from hvd_train.protocol import Communicator
from hvd_train.script.keras.data.dataset import BatchOrderDigest, in_order, joined, varies
from hvd_train.script.keras.data.leaves import (
    BATCH,
    DIFFERS,
    columns,
    digest,
    first_batch,
    kind_of,
    length,
    steps_of,
    take,
    texts,
)
from hvd_train.script.keras.data.sequence import SequenceRange
from hvd_train.script.keras.rng import Draws


@dataclass
class EvalShard:
    """The data that this rank evaluates or predicts.

    ``part``: whether they are only a part of the whole. ``counts``: whether their results count; another rank may score
    the same data. ``window``: how many consecutive batches make a global batch. ``limit``: Keras' ``steps``.
    """

    data: tuple[Any, Any, Any]
    part: bool = True
    counts: bool = True
    window: int = 1
    batch: int | None = None
    limit: int | None = None
    order_digest: BatchOrderDigest | None = None
    facts: dict[str, str] = field(default_factory=dict)


def divide_scoring(
    x: Any,
    y: Any,
    weight: Any,
    draws: Draws,
    *,
    batch: int | None,
    steps: int | None,
    uncut: bool,
    execution: int = 1,
    order_digest: BatchOrderDigest | None = None,
) -> EvalShard:
    """Divide the data of ``evaluate`` or ``predict``.

    ``steps``: in global batches; Keras makes whole executions of ``execution`` steps. ``uncut``: do not divide a global
    batch among ranks. If there are too few samples or batches, or their number is unknown, every rank scores all of
    them.
    """
    kind, world = kind_of(x), draws.world
    window, size = world.size, world.size
    whole_steps = steps and -(-steps // execution) * execution
    if kind == "arrays":
        parts = columns(x, y, weight)
        count, same = length(parts), digest(parts)
        if steps and not batch:  # Keras divides the data into so many batches
            batch, window = math.ceil(count / steps), 1
        # Samples per global batch; in the branch below, batches per global batch.
        unit = (batch or BATCH) * window
        limit, count = None, min(count, whole_steps * unit) if whole_steps else count
    else:
        unit = size
        if kind == "dataset":
            x = in_order(x)
            if varies(x):
                alone = not isinstance(x.element_spec, tuple)
                x, unit, window = joined(x, size), 1, 1
                x = x.map(lambda only: only) if alone else x
            x = x if order_digest is None else order_digest.watched(x)
        limit = whole_steps and whole_steps * unit
        if kind == "dataset":
            x = x.take(limit) if limit else x
        count = (steps_of(kind, x, 1) or 0) if kind in ("sequence", "dataset") else 0
        same = "" if not count else digest(x[0] if kind == "sequence" else first_batch(x))
        if count:
            limit, count = None, min(count, limit or count)
    facts = {f"data to score ({DIFFERS})": f"{kind} of {count}, {same}", "batch_size to score": str(batch)}
    data = ((texts(parts) + (None, None))[:3]) if kind == "arrays" else (x, y, weight)
    whole = EvalShard(data, False, True, window, batch, limit, order_digest, facts | {"steps to score": str(steps)})

    def rows(start: int, stop: int) -> tuple[Any, Any, Any]:
        if kind == "arrays":
            return (texts(take(parts, slice(start, stop))) + (None, None))[:3]
        piece = SequenceRange(x, draws, start, stop) if kind == "sequence" else x.skip(start).take(stop - start)
        return piece, None, None

    # Fewer pieces than ranks, or unknown: every rank scores everything, and rank 0's sums count.
    if count < size:
        return whole if not count else replace(whole, data=rows(0, count))
    start, stop, counts = _rows_of_rank(count, unit if uncut else 1, world)
    return replace(whole, data=rows(start, stop), part=True, counts=counts)


def _rows_of_rank(count: int, unit: int, world: Communicator) -> tuple[int, int, bool]:
    """Return (first row of this rank's part, end, whether its results count); parts are multiples of ``unit``."""
    # Parts differ by at most one unit: a sample, or a global batch.
    pieces = -(-count // unit)
    start, stop = share(max(pieces, world.size), world.size, world.rank)
    if pieces < world.size:  # a rank without a piece scores another's again, without counting it
        start, stop = world.rank % pieces, world.rank % pieces + 1
    return start * unit, min(stop * unit, count), world.rank < pieces
