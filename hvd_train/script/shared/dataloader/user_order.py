"""A rank's share of a loader with the user's sampler or batch sampler.

Every rank draws the same whole order and takes its part of it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils import data

from hvd_train.data.order import mix
from hvd_train.errors import DataError
from hvd_train.script.shared.dataloader import rng
from hvd_train.script.shared.dataloader.last_batch import counts_of, places_of
from hvd_train.script.shared.dataloader.shares import WHERE, Passes, Plan, Share

MOST = 20_000_000  # samples of a pass


class UserOrder(Share):
    """A share in the order of the user's ``sampler``, which may shuffle, skip or repeat samples.

    Its random numbers, from its own generators or those of torch, NumPy and ``random``, depend on (seed, epoch).
    """

    def __init__(self, sampler: Iterable, source: Any, *, seed: int, rank: int, size: int) -> None:
        Passes.__init__(self, seed, rank, size)
        self.source = source
        self._sampler, self._held = sampler, rng.SamplerGenerators(sampler)
        self._last: tuple[int, list, list] | None = None  # epoch, attributes of the sampler, the order
        self._planned: tuple[list, Any, Plan] | None = None  # the order, facts of the source, the plan

    def __len__(self) -> int:
        """Return the number of batches without drawing, if the sampler tells how many samples it gives.

        The script may still change what the sampler draws from.
        """
        try:
            count = len(self._sampler)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):  # it has none, or one within it has none
            return super().__len__()
        return self._steps_of(count)

    def _steps_of(self, count: int) -> int:
        return len(self._even(count))

    def planned(self, epoch: int) -> Plan:
        """Draw the order, once per epoch unless the script changes its sampler."""
        if self._last is None or self._last[0] != epoch or not _same(self._last[1], _attributes(self._sampler)):
            key = mix(self.seed, epoch)
            # The sampler may use the process' generators, which differ between ranks.
            with rng.CommonDraws(key).drawing():
                self._held.seed(epoch)
                order = self._drawn()
            self._last = epoch, _attributes(self._sampler), order
        order, facts = self._last[2], self._facts()
        if self._planned is None or self._planned[0] is not order or self._planned[1] != facts:
            self._planned = order, facts, self.plan_of(order)
        return self._planned[2]

    def _facts(self) -> Any:
        return self.source.batch_size, self.source.drop_last

    def _drawn(self) -> list:
        order = list(itertools.islice(self._given(), MOST))
        if len(order) == MOST:
            what = f"the sampler gives {MOST:,} samples and more: an order without an end cannot be divided"
            fix = "end it after the samples of an epoch, or make a stream of it (IterableDataset)"
            raise DataError(what, where=WHERE, fix=fix, common=True)
        return order

    def _given(self) -> Iterator:
        return iter(self._sampler)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next pass, also in the user's samplers that have ``set_epoch``."""
        super().set_epoch(epoch)
        for sampler in _within(self._sampler):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    def plan_of(self, order: list) -> Plan:
        even = self._even(len(order))

        def batch(k: int) -> list:
            return [order[i] for i in even.places(k)]

        return Plan(len(even), batch, even.counts, _digest(order))


class UserBatches(UserOrder):
    """A share of a user's batch sampler: a step takes one batch for each rank, weighted by its samples.
    A rest of fewer batches is divided by samples, or dropped if the batch sampler has ``drop_last``.
    """

    def __init__(self, sampler: Iterable, *, seed: int, rank: int, size: int) -> None:
        super().__init__(sampler, SimpleNamespace(batch_size=0), seed=seed, rank=rank, size=size)

    def _facts(self) -> Any:
        return self._drop_last

    @property
    def _drop_last(self) -> bool:
        return bool(getattr(self._sampler, "drop_last", False))

    def _given(self) -> Iterator:
        return map(list, self._sampler)  # a batch sampler may fill one list again and again

    def _steps_of(self, count: int) -> int:
        if count and count % self.size == 0:
            return count // self.size
        return self.planned(self.epoch).count  # how a rest of batches is divided depends on its samples

    def plan_of(self, order: list) -> Plan:
        n, size = len(order), self.size
        steps = [order[at : at + size] for at in range(0, n - n % size, size)]
        batches, counts = [list(step[self.rank]) for step in steps], [tuple(map(len, step)) for step in steps]
        rest: list[Any] = [i for batch in order[n - n % size :] for i in batch]
        if len(rest) >= size and not self._drop_last:
            batches.append([rest[i] for i in places_of(len(rest), len(rest), self.rank, size)])
            counts.append(counts_of(len(rest), len(rest), size))
        elif rest and batches and not self._drop_last:
            batches[-1] = batches[-1] + rest[self.rank : self.rank + 1]
            counts[-1] = tuple(n + (rank < len(rest)) for rank, n in enumerate(counts[-1]))
        if not batches:
            what = f"{n} batches of {len(rest)} samples are too few for {size} ranks"
            raise DataError(what, where=WHERE, fix="start fewer ranks", common=True)
        return Plan(len(batches), batches.__getitem__, counts.__getitem__, _digest(order))


def _within(sampler: Any) -> list[Any]:
    """Return a sampler and its nested samplers."""
    inner = [x for x in getattr(sampler, "__dict__", {}).values() if isinstance(x, data.Sampler)]
    return [sampler, *(each for x in inner for each in _within(x))]


def _attributes(sampler: Any) -> list[Any]:
    each = [x for one in _within(sampler) for x in getattr(one, "__dict__", {}).values()]
    return [_content(x) for x in (sampler, *each)]


def _content(x: Any) -> Any:
    """Return what changes with ``x``, also where it is changed in place: lists of indices, tensors of weights."""
    if isinstance(x, torch.Tensor):
        return x.detach().cpu().double().numpy().tobytes()
    if isinstance(x, np.ndarray):
        return x.tobytes()
    return repr(x) if _of_numbers(x) else x  # a list may also hold all samples


def _of_numbers(x: Any) -> bool:
    """Return whether this is a container of numbers and words, or of such containers."""
    if not isinstance(x, list | tuple | set | dict):
        return False
    values = x.values() if isinstance(x, dict) else x
    return all(isinstance(one, int | float | str) or _of_numbers(one) for one in values)


def _same(ones: list[Any], others: list[Any]) -> bool:
    plain = (int, float, str, bytes)
    pairs = zip(ones, others, strict=False)
    return len(ones) == len(others) and all(x is y or (isinstance(x, plain) and x == y) for x, y in pairs)


def _digest(order: list) -> str:
    return hashlib.sha256(repr(order).encode()).hexdigest()[:12]
