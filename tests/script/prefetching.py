"""A loop that fetches ahead. No framework is loaded: scripts of each one use it."""

from __future__ import annotations


def early(batches):
    """Each batch is taken before the step of the one before, as prefetchers do."""
    taken = iter(batches)
    following = next(taken)
    while following is not None:
        batch, following = following, next(taken, None)
        yield batch
