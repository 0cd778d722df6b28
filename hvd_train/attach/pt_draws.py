"""What a rank draws at random: torch's, NumPy's and Python's generators differ between ranks and repeat with a seed."""

from __future__ import annotations

import random

import numpy as np
import torch

from hvd_train.data.order import mix

_own: int | None = None  # torch's seed as it was set here; another one is the script's
_epoch: tuple[int, int] | None = None  # of the last end of an epoch: the key that draws follow from, the steps made


def set_apart(rank: int) -> None:
    """Rank 0 draws on as the script seeded it, the others from functions of that and their rank.

    Once for each seed that the script sets: data and first weights that were drawn before are the same on all ranks.
    """
    if rank and torch.initial_seed() != _own:
        numpys, pythons = np.random.randint(2**63, dtype=np.int64), random.getrandbits(64)
        _set(*(mix(int(seed), rank) for seed in (torch.initial_seed(), numpys, pythons)))


def start_epoch(key: int, steps: int, rank: int) -> None:
    """At the end of an epoch of training: the next one's draws follow from ``key``, the loader's seed and epoch."""
    global _epoch
    _epoch = (key, steps)
    resume(state(key, steps), rank)


def state(key: int, steps: int) -> int:
    """What the draws after ``steps`` steps go on from in a resumed run; in the uninterrupted one, too, where no step
    was made since an epoch ended. ``key`` stands in where none has ended."""
    key, start = _epoch or (key, 0)
    return mix(key, steps - start)


def resume(state: int, rank: int) -> None:
    own = mix(state, rank)
    _set(own, mix(own, 1), mix(own, 2))  # of one number NumPy and random would draw the same


def _set(torchs: int, numpys: int, pythons: int) -> None:
    global _own
    torch.manual_seed(torchs)
    np.random.seed([numpys & 0xFFFFFFFF, numpys >> 32])
    random.seed(pythons)
    _own = torch.initial_seed()
