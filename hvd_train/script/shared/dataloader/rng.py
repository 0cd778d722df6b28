"""Random generators of torch, NumPy and Python in a PyTorch script: different on each rank, reproducible by seed."""

from __future__ import annotations

import random
import weakref
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler, get_worker_info

from hvd_train.data.order import mix

_seed_set: int | None = None  # the seed that this module set in torch; any other is the script's
_epoch: tuple[int, int] | None = None  # at the end of the last epoch: (key of the random numbers, steps made)
_pass: int | None = None  # in a worker: the key of the pass over a stream, if a batch brought it


def seed_by_rank(rank: int) -> None:
    """Reseed all ranks but 0 from the script's seed and the rank.

    Happens once for each seed that the script sets. Data and weights drawn before it are the same on all ranks.
    """
    global _seed_set
    # A second ht.distribute must not reset the generators, unless the script has seeded again.
    if rank and torch.initial_seed() != _seed_set:
        # NumPy and random do not expose their seed, so a random number is used instead.
        numpys, pythons = np.random.randint(2**63, dtype=np.int64), random.getrandbits(64)
        _set(*(mix(int(seed), rank) for seed in (torch.initial_seed(), numpys, pythons)))
    _seed_set = torch.initial_seed()


def start_epoch(key: int, steps: int, rank: int) -> None:
    """Seed the generators at the end of an epoch of training. ``key``: of the loader's seed and epoch."""
    global _epoch
    _epoch = (key, steps)
    resume(state(key, steps), rank)


def state(key: int, steps: int) -> int:
    """Return the key for the random numbers of a run that resumes after ``steps`` steps.

    The uninterrupted run uses the same key if no step was made since the end of an epoch. ``key``: the default before
    the end of the first epoch.
    """
    key, start = _epoch or (key, 0)
    return mix(key, steps - start)


def start_pass(key: int, rank: int) -> None:
    """Seed the generators for a later pass of training, so random numbers drawn in between have no effect.

    A resumed run does not repeat a validation, for example. If the script has seeded torch since, its seed is kept.
    """
    if torch.initial_seed() == _seed_set:
        resume(mix(key, -1), rank)


def resume(state: int, rank: int) -> None:
    seed = mix(state, rank)
    _set(seed, mix(seed, 1), mix(seed, 2))  # with equal seeds NumPy and random would draw the same


def _set(torchs: int, numpys: int, pythons: int) -> None:
    global _seed_set
    torch.manual_seed(torchs)
    # NumPy takes words of 32 bits.
    np.random.seed([numpys & 0xFFFFFFFF, numpys >> 32])
    random.seed(pythons)
    _seed_set = torch.initial_seed()


class SeededBatch(list):
    """A batch of indices that seeds a loader worker's generators with ``key`` when it is unpickled there.

    A persistent worker has drawn random numbers before, a resumed run's worker has not. An empty batch belongs to a
    stream, which seeds only at its beginning.
    """

    def __init__(self, samples: Iterable, key: int) -> None:
        super().__init__(samples)
        self._key = key

    def __reduce__(self) -> tuple:
        # Unpickled in a worker, it seeds and becomes a plain list.
        return _arrived, (list(self), self._key)


def _arrived(samples: list, key: int) -> list:
    global _pass
    if get_worker_info():
        _pass = key
        if samples:
            _seed(key)
    return samples


def start_stream(worker: int) -> None:
    """Seed a worker at the beginning of its stream, the same on all ranks."""
    if _pass is not None:
        _seed(mix(_pass, worker))


def _seed(key: int) -> None:
    torch.default_generator.manual_seed(key)
    np.random.seed([mix(key, 1) & 0xFFFFFFFF, mix(key, 1) >> 32])
    random.seed(mix(key, 2))


class CommonDraws:
    """A context in which all ranks draw the same random numbers, seeded by ``key``.

    Each ``drawing`` continues where the last one ended. Outside, the generators are unaffected.
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


_uses: weakref.WeakKeyDictionary[torch.Generator, int] = weakref.WeakKeyDictionary()


def uses(generator: torch.Generator) -> int:
    """Return how many loaders have had this generator before; it counts as used once more."""
    _uses[generator] = _uses.get(generator, -1) + 1
    return _uses[generator]


class SamplerGenerators:
    """The generators among the attributes of a sampler and its nested samplers.

    Each pass seeds them from their initial state and its ``epoch``. So it draws the same on all ranks, whichever passes
    came before, and as another sampler's generators with the same seeds.
    """

    def __init__(self, sampler: Any) -> None:
        self._all = _generators(sampler)
        self._first = [zlib.crc32(_state_of(x)) for x in self._all]

    def seed(self, epoch: int) -> None:
        for first, x in zip(self._first, self._all, strict=True):
            seed = mix(epoch, first)
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
