"""The state of a model in pipeline stages: each rank has a part, and rank 0 gathers those of its replica."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hvd_train.checkpoint.serialize import pack, unpack, weights_sha256
from hvd_train.protocol import Groups, Model, Tree


def of_other_stages(groups: Groups, read: Callable[[], Tree], has: Mapping[str, object] = {}) -> Tree:
    """Gather on rank 0 the results of ``read`` from the other stages of its replica, except names in ``has``; {} on
    other ranks.

    Called on all ranks. Replicas are equal, so one of them is read.
    """
    if groups.links is None or groups.world.rank >= groups.links.size:
        return {}
    others: Tree = {}
    parts = groups.links.gather(pack(read()) if groups.links.stage else b"", "state of a stage")
    del parts[:1]
    while parts:  # avoids a second copy
        others |= {key: x for key, x in unpack(parts.pop(0)).items() if key not in has}
    return others


def model_sha256(model: Model) -> str:
    """Return the hash of the whole model's weights and running statistics, equal on all ranks. Called on all ranks."""
    local, groups = model.state(), model.groups
    if groups.links is None:
        return weights_sha256(local)
    whole = local | of_other_stages(groups, lambda: local, local)
    return groups.world.broadcast_bytes(weights_sha256(whole).encode()).decode()
