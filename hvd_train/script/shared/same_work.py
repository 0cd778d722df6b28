"""The warning that all ranks compute the same gradients, for example because a loader is not sharded."""

from __future__ import annotations

import warnings

PASSES = 2  # the first passes, in which gradients are compared


def warn_of_same_work(shard: str) -> None:
    """Warn that nothing is gained by more ranks. ``shard``: the function that divides the samples."""
    what = "all ranks computed the same gradients: do they go through the same samples?"
    warnings.warn(f"{what} Use the loader that {shard} gives; draw other batches on each rank", stacklevel=3)
