"""Generators of torch, NumPy and Python in a PyTorch script: they differ between ranks and repeat with a seed."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler, get_worker_info

from hvd_train.data.order import mix

_seed_set: int | None = None  # torch's seed as it was set here; another one is the script's
_epoch: tuple[int, int] | None = None  # of the last end of an epoch: the key that draws follow from, the steps made
_pass: int | None = None  # in a worker: the key of the pass over a stream, if it came with a batch


def set_apart(rank: int) -> None:
    """Let rank 0 draw on as the script seeded it, the others from functions of that and their rank.

    Once for each seed that the script sets: data and first weights that were drawn before are the same on all ranks.
    """
    global _seed_set
    # A second ht.distribute must not set the generators back, unless the script has seeded again.
    if rank and torch.initial_seed() != _seed_set:
        # NumPy and random do not show their seed: a draw stands for it.
        numpys, pythons = np.random.randint(2**63, dtype=np.int64), random.getrandbits(64)
        _set(*(mix(int(seed), rank) for seed in (torch.initial_seed(), numpys, pythons)))
    _seed_set = torch.initial_seed()


def start_epoch(key: int, steps: int, rank: int) -> None:
    """Seed the next epoch of training, at the end of one. ``key``: of the loader's seed and epoch."""
    global _epoch
    _epoch = (key, steps)
    resume(state(key, steps), rank)


def state(key: int, steps: int) -> int:
    """Return the key of the draws of a run that resumes after ``steps`` steps.

    The uninterrupted run draws from the same where no step was made since an epoch ended. ``key`` stands in where none
    has ended.
    """
    key, start = _epoch or (key, 0)
    return mix(key, steps - start)


def start_pass(key: int, rank: int) -> None:
    """Seed a later pass of training, so that what was drawn since the last one shifts nothing.

    A resumed run does not repeat a validation, for example. A script that has seeded torch in between keeps its seed.
    """
    if torch.initial_seed() == _seed_set:
        resume(mix(key, -1), rank)


def resume(state: int, rank: int) -> None:
    seed = mix(state, rank)
    _set(seed, mix(seed, 1), mix(seed, 2))  # of one number NumPy and random would draw the same


def _set(torchs: int, numpys: int, pythons: int) -> None:
    global _seed_set
    torch.manual_seed(torchs)
    # NumPy takes words of 32 bits.
    np.random.seed([numpys & 0xFFFFFFFF, numpys >> 32])
    random.seed(pythons)
    _seed_set = torch.initial_seed()


class SeededBatch(list):
    """The samples of a batch on the way to a loader's worker, whose generators ``key`` seeds when they arrive.

    A worker that persists has drawn before, which a resumed run's worker has not. No samples: of a stream, which goes
    on drawing until it begins anew.
    """

    def __init__(self, samples: Iterable, key: int) -> None:
        super().__init__(samples)
        self._key = key

    def __reduce__(self) -> tuple:
        # Pickled for a worker, it becomes a plain list there, and seeds on the way.
        return _arrived, (list(self), self._key)


def _arrived(samples: list, key: int) -> list:
    global _pass
    if get_worker_info():
        _pass = key
        if samples:
            _seed(key)
    return samples


def start_stream(worker: int) -> None:
    """Seed a worker that begins its part of a stream, the same on all ranks."""
    if _pass is not None:
        _seed(mix(_pass, worker))


def _seed(key: int) -> None:
    torch.default_generator.manual_seed(key)
    np.random.seed([mix(key, 1) & 0xFFFFFFFF, mix(key, 1) >> 32])
    random.seed(mix(key, 2))


class CommonDraws:
    """The process' generators, seeded by ``key`` within ``drawing``: all ranks draw the same there.

    Each ``drawing`` goes on where the last one ended. What a rank draws outside stays as it is.
    """

    def __init__(self, key: int) -> None:
        self._states: tuple | None = None
        self._key = key

    @contextmanager
    def drawing(self) -> Iterator[None]:
        before = _states()
        if self._states is None:
            _seed(self._key)
        else:
            _put(self._states)
        try:
            yield
        finally:
            self._states = _states()
            _put(before)


def _states() -> tuple:
    return torch.default_generator.get_state(), np.random.get_state(), random.getstate()


def _put(states: tuple) -> None:
    torch.default_generator.set_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


class SamplerGenerators:
    """The generators among a sampler's attributes, also in samplers in it.

    Each pass seeds them by their first state and its ``key``. So a pass draws the same on all ranks, whichever passes
    there were before.
    """

    def __init__(self, sampler: Any) -> None:
        self._all = _generators(sampler)
        self._first = [zlib.crc32(_state_of(x)) for x in self._all]

    def seed(self, key: int) -> None:
        for first, x in zip(self._first, self._all, strict=True):
            seed = mix(key, first)
            if isinstance(x, torch.Generator):
                x.manual_seed(seed)
            elif isinstance(x, np.random.Generator):
                x.bit_generator.state = type(x.bit_generator)(seed).state
            elif isinstance(x, np.random.RandomState):
                x.seed([seed & 0xFFFFFFFF, seed >> 32])
            else:
                x.seed(seed)


def _generators(owner: Any) -> list[Any]:
    kinds = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    values = list(getattr(owner, "__dict__", {}).values())
    inner = [x for value in values if isinstance(value, Sampler) for x in _generators(value)]
    return [x for x in values if isinstance(x, kinds)] + inner


def _state_of(generator: Any) -> bytes:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state()[1].tobytes()  # type: ignore[index]
    state = generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.getstate()
    return repr(state).encode()
