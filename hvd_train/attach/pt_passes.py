"""Passes over sharded loaders: which batch is in use when gradients travel, and how much it counts."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import data

from hvd_train.attach import pt_draws, pt_share
from hvd_train.data.order import mix

_open: weakref.WeakSet[Pass] = weakref.WeakSet()  # passes that gave a batch to train on, and have not ended


class Pass:
    """What ``iter(loader)`` gives: the loader's own iterator, and a note of the batch that it gave last."""

    def __init__(self, batches: Iterator, share: pt_share.Share, counted: bool) -> None:
        self._batches, self._share = batches, share
        self._counted = counted  # whether batch k is the k-th that the share names, and has an exchange of its own
        self._steps, self._batch = pt_share.steps(), -1
        self.new = self.used = False  # given since the last exchange; given before it

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> Any:
        training = torch.is_grad_enabled()
        try:
            batch = next(self._batches)
        except StopIteration:
            _open.discard(self)
            if training and self._share.shuffle:
                self._end()
            raise
        self._batch += 1
        if training:
            self._counted = self._counted and not self.new
            self.new = True
            _open.add(self)
        return batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":
            raise AttributeError(name)
        return getattr(self._batches, name)

    @property
    def weight(self) -> float:
        return self._share.weight(self._batch) if self._counted else 1.0

    def _end(self) -> None:
        share = self._share
        if pt_share.steps() > self._steps:
            pt_draws.start_epoch(mix(share.seed, share.epoch), pt_share.steps(), share.rank)
        elif share.repeated() and share.rank == 0:
            what = "the samples came twice in the same order, for no distributed optimizer made a step"
            warnings.warn(f"{what}; ht.shard; call loader.set_epoch(number) for another one", stacklevel=3)


class Sharded(data.DataLoader):
    """The user's loader over this rank's share: of the user's class, with its ``__iter__`` and attributes."""

    batch_sampler: pt_share.Share

    def __iter__(self) -> Any:
        share = self.batch_sampler
        # Workers' seeds come from here, and torch's generator is left alone.
        self.generator.manual_seed(mix(mix(share.seed, share.epoch), share.rank))
        inner: Any = super().__iter__
        counted = inner.__func__ is data.DataLoader.__iter__ and (self.in_order or not self.num_workers)
        return Pass(iter(inner()), share, counted)

    def set_epoch(self, epoch: int) -> None:
        """Share.set_epoch; on all ranks."""
        self.batch_sampler.set_epoch(epoch)


def shared(loader: data.DataLoader, seed: int, rank: int, size: int) -> data.DataLoader:
    """A copy of the loader that draws from this rank's share of its samples."""
    shuffle = isinstance(loader.sampler, data.RandomSampler)
    options: Any = dict(shuffle=shuffle, drop_last=loader.drop_last, seed=seed, rank=rank, size=size)
    share = pt_share.Share(len(loader.dataset), loader.batch_size, **options)
    kind = type(loader)
    copy: Any = object.__new__(type(kind.__name__, (Sharded, kind), {"__module__": kind.__module__}))
    # DataLoader forbids to set these one by one.
    vars(copy).update(vars(loader) | {"batch_sampler": share, "generator": torch.Generator(), "_iterator": None})
    return copy


def weight() -> float:
    """By how much this rank's gradient counts in the mean over ranks: its samples times ranks / all ranks' samples.

    Other than 1 at an epoch's end alone, where batches may differ in length, and only if it is certain which batch the
    gradient is of: every batch of this pass had an exchange of its own before the next one was taken, and no other
    sharded loader gave a batch of another weight since the exchange before. Batches taken without gradients
    (``torch.no_grad``) do not count, and an exchange without a new batch is of the last one. Ranks' weights have a mean
    of 1 up to rounding. The loss is taken for a mean over its batch.
    """
    weights = {p.weight for p in _open if p.new} or {p.weight for p in _open if p.used}
    return weights.pop() if len(weights) == 1 else 1.0


def exchanged() -> None:
    """Gradients of the batches in use have travelled."""
    passes = list(_open)
    if any(p.new for p in passes):
        for p in passes:
            p.used, p.new = p.new, False
