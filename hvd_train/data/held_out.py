"""Which samples are held out for validation: a share of each class, or a fold, whatever the seed of the run.

Of samples that are read in their own order, every k-th.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hvd_train.data.order import permute
from hvd_train.errors import DataError

# The held-out part is a property of the data, not of a run.
SPLIT_SEED = 20200101


def share_held_out(labels: np.ndarray, fraction: float, where: str) -> np.ndarray:
    """Return for each sample whether it is held out (n,): ``fraction`` of each class. labels: (n,) integers."""
    # At least one sample of each class, but never its only one.
    return _held_out(labels, lambda label, count: (0, min(count - 1, max(1, round(fraction * count)))), where)


def fold_held_out(labels: np.ndarray, part: int, parts: int, where: str) -> np.ndarray:
    """Return for each sample whether it is in fold ``part`` of ``parts`` (n,).

    Each sample is in exactly one fold; the only sample of a class in none.
    """

    def bounds(label: int, count: int) -> tuple[int, int]:
        # Rotated from class to class, or the last folds would get the remainders of all classes.
        turned = (part + label) % parts
        return (turned * count // parts, (turned + 1) * count // parts) if count > 1 else (0, 0)

    return _held_out(labels, bounds, where)


def spread_share(count: int, fraction: float, where: str) -> np.ndarray:
    """Return which of ``count`` samples or batches in a row are held out (count,), evenly spread over them."""
    # Rounded up a little: 100 x 0.29 is just below 29 in floating point.
    held = np.diff(np.floor(np.arange(count + 1) * fraction + 1e-9)) > 0
    if not held.any() or held.all():
        what = f"{fraction:g} of {count} in a row leaves nothing to hold out or to train on"
        raise DataError(what, where=where, fix="set another data.val_fraction, or give a validation part")
    return held


def spread_fold(count: int, part: int, parts: int, where: str) -> np.ndarray:
    """Return which of ``count`` samples or batches in a row are in fold ``part`` of ``parts`` (count,)."""
    if count < parts:
        raise DataError(f"{count} in a row cannot be divided into {parts} folds", where=where, fix="take fewer folds")
    return np.arange(count) % parts == part


def _held_out(labels: np.ndarray, bounds: Callable[[int, int], tuple[int, int]], where: str) -> np.ndarray:
    """Shuffle each class and hold out its samples [first, last), given by ``bounds(label, number of samples)``."""
    held = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        # Each class is shuffled independently, so adding samples to one class moves none of another.
        shuffled = members[permute(np.arange(len(members)), len(members), SPLIT_SEED, int(label))]
        first, last = bounds(int(label), len(members))
        held[shuffled[first:last]] = True
    if not held.any():
        fix = "give more samples, or a validation part"
        raise DataError("no class has two samples, so nothing can be held out", where=where, fix=fix)
    return held
