"""Each rank's part of the data that a script trains on.

The order of samples is cut into global batches of ``batch_size`` x N, of which each rank takes a contiguous part. All
ranks take the same number of steps. A remainder with fewer samples than ranks is dropped. ``steps`` count global
batches.
"""

from __future__ import annotations

import math
from typing import Any

from hvd_train.data.order import mix
from hvd_train.errors import ConfigError
from hvd_train.protocol import Communicator
from hvd_train.script.keras.data.arrays import ArrayParts
from hvd_train.script.keras.data.dataset import BatchOrderDigest, batch_size, dataset_parts, drops_rest, ends, in_order
from hvd_train.script.keras.data.epochs import Epochs
from hvd_train.script.keras.data.leaves import (
    BATCH,
    BATCH_SIZE,
    DIFFERS,
    columns,
    digest,
    first_batch,
    kind_of,
    length,
    packed,
    steps_of,
    take,
)
from hvd_train.script.keras.data.sequence import LocalSequence, SequenceParts
from hvd_train.script.keras.rng import Draws
from hvd_train.script.shared.record import recording

WHERE = "model.fit"
Division = tuple[dict[str, Any], dict[str, str]]  # replaced arguments of ``fit``; what must be equal on all ranks


def first_of(x: Any, y: Any, weight: Any) -> Any:
    """Return the first batch of this rank's ``fit``: (x, y, ...)."""
    if isinstance(x, Epochs):
        return x.part(0, 0)
    kind = kind_of(x)
    if kind == "arrays":
        return take(packed(columns(x, y, weight)), slice(0, BATCH))
    return x[0] if kind == "sequence" else first_batch(x)


def divide_training(
    x: Any,
    y: Any,
    weight: Any,
    *,
    batch: int | None,
    steps: int | None,
    seed: int | None,
    draws: Draws,
    execution: int = 1,
    order_digest: BatchOrderDigest | None = None,
) -> Division:
    """Divide the data of ``fit``. Raises ConfigError for data that cannot be divided.

    ``steps``: ``steps_per_epoch``; Keras makes whole executions of ``execution`` steps. ``seed``: of the order of
    samples; None: not shuffled. ``order_digest`` records the order of a tf.data.Dataset.
    """
    kind, world = kind_of(x), draws.world
    per_epoch = steps and -(-steps // execution) * execution
    together = record.together if (record := recording()) else 1  # ranks whose batches this one takes
    if kind == "other":
        what = f"{type(x).__name__} cannot be divided among ranks"
        fix = (
            "give arrays, a tf.data.Dataset or a PyDataset, or divide it yourself and call "
            "hk.distribute(model, shard=False)"
        )
        raise ConfigError(what, where=WHERE, fix=fix)
    if kind == "loader":
        return _loader(x, seed, together, world)
    if kind == "arrays":
        parts = packed(columns(x, y, weight))
        data, facts = _arrays(parts, batch, steps, per_epoch, seed, together, world)
    else:
        # All ranks read the whole pipeline: its order must be the same.
        x = in_order(x) if kind == "dataset" else x
        known = steps_of(kind, x, batch or BATCH)
        if known is None and not steps and not ends(x):
            what = "the number of batches of the data set is unknown"
            raise ConfigError(what, where=WHERE, fix="give steps_per_epoch=")
        if kind == "sequence":
            data, facts = _sequence(x, known, per_epoch, seed, together, draws)
        else:
            data, facts = _dataset(x, known, order_digest, together, world)
    return {"x": data, "y": None, "sample_weight": None}, {"data": kind, **facts}


def _arrays(
    parts: Any,
    batch: int | None,
    steps: int | None,
    per_epoch: int | None,
    seed: int | None,
    together: int,
    world: Communicator,
) -> tuple[Any, dict[str, str]]:
    n = length(parts)
    _enough(n, "samples", world)
    whole = (batch or BATCH) * together * world.size
    if steps and not batch:  # Keras divides the data into so many batches
        whole = math.ceil(n / steps)
        _enough(whole, f"samples in each of {steps} steps", world)
    size = str(batch or whole / world.size)
    facts = {"samples": str(n), BATCH_SIZE: size, f"data ({DIFFERS})": digest(parts)}
    return ArrayParts(parts, whole, world, per_epoch, seed), facts


def _sequence(
    x: Any, known: int | None, per_epoch: int | None, seed: int | None, together: int, draws: Draws
) -> tuple[Any, dict[str, str]]:
    if known is None:
        raise ConfigError("an infinite PyDataset cannot be divided among ranks", where=WHERE, fix="give it num_batches")
    first = x[0]
    size = length(first)
    # Assume all batches are as long as the first: to count them would take an epoch.
    _enough(known * size, "samples", draws.world)
    return SequenceParts(x, draws, per_epoch, seed, together), _batch_facts(known, size, first)


def _dataset(
    x: Any, known: int | None, order_digest: BatchOrderDigest | None, together: int, world: Communicator
) -> tuple[Any, dict[str, str]]:
    first = first_batch(x)
    # The first batch may be a short one; a map may make several samples of each.
    size = max(length(first), batch_size(x)) if first is not None else 0
    _enough(size if known == 1 else (known or world.size) * size, "samples", world)
    if known and known < world.size * together and drops_rest(x):
        what = (
            f"the data set has {known} batches for {world.size * together} ranks, and drop_remainder drops what is less"
        )
        raise ConfigError(what, where=WHERE, fix="make its batches smaller")
    return dataset_parts(x, world, size, order_digest, together), _batch_facts(known, size, first)


def _batch_facts(known: int | None, size: int, first: Any) -> dict[str, str]:
    return {"batches": str(known), BATCH_SIZE: str(size), f"first batch ({DIFFERS})": digest(first)}


def _loader(x: Any, seed: int | None, together: int, world: Communicator) -> Division:
    """Divide a PyTorch DataLoader as ``ht.shard`` does, with the loader's shuffle, samplers and workers."""
    # Imported here because it imports torch, which Keras on TensorFlow may not have.
    from hvd_train.script.shared.dataloader import passes, shares

    shares.check(x)
    loader = passes.shared(x, seed or 0, world.rank, world.size, together=together)
    facts = shares.facts(x) | {"data": "loader", BATCH_SIZE: str(x.batch_size or BATCH)}
    return {"x": loader, "y": None, "sample_weight": None}, facts


def check_local(
    x: Any, *, batch: int | None, steps: int | None, columns_: tuple[Any, Any, Any], draws: Draws
) -> Division:
    """Check data that the user has divided. Only the number of steps must be equal on all ranks."""
    kind = kind_of(x)
    batch = batch or (math.ceil(length(x) / steps) if steps and kind == "arrays" else BATCH)  # as Keras does
    known = steps_of(kind, x, batch)
    if known is None and not steps:
        what = "the number of batches of the data set is unknown"
        raise ConfigError(what, where=WHERE, fix="give .take(...) or steps_per_epoch=")
    if steps and kind == "dataset":
        x = x.repeat()  # a rank that runs out of data would leave the others waiting
        known = None
    x = LocalSequence(x, draws) if kind == "sequence" else x
    count = f"{steps or known}" if known is None or not steps else f"{steps} of {known}"
    data = {"x": x, "y": columns_[1], "sample_weight": columns_[2]}
    return data, {"steps in an epoch (make them equal: .take(...) or steps_per_epoch=)": count}


def _enough(n: int, what: str, world: Communicator) -> None:
    if n < world.size:
        raise ConfigError(f"the data set has {n} {what} for {world.size} ranks", where=WHERE, fix="start fewer ranks")


def pass_seed(seed: int, turn: int) -> int:
    """Return the key of the ``turn``-th call of ``fit``, so that successive calls have different orders."""
    return mix(seed, turn)
