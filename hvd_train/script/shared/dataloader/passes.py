"""Passes over sharded loaders: the batch that gradients belong to, and its weight."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils import data

from hvd_train.data.order import mix
from hvd_train.script.shared import weight_check
from hvd_train.script.shared.dataloader import fingerprint, rng, shares, streams, user_order
from hvd_train.script.shared.main_rank import UnsharedSums

watch: Callable[[Pass, Any, bool], Any] | None = None  # may replace each batch
leaving: Callable[[], None] | None = None  # called before the batch after an uneven one is taken
fetching: Callable[[], AbstractContextManager[None]] = nullcontext  # in which each batch is fetched
unshared: UnsharedSums | None = None  # once there is a loader
at_end: list[Callable[[], None]] = []  # called at the end of a pass with steps, on all ranks
without_steps: list[Callable[[], None]] = []  # called at the end of a pass without a step or a sum over ranks
_open: weakref.WeakSet[Pass] = weakref.WeakSet()  # unfinished passes that have returned a training batch
_last: Pass | None = None  # a pass that has ended before the step of its last batch
_unused: Pass | None = None  # a pass with an uneven batch that has ended before any step, and none has begun since
_asked = 0
_summed = False  # whether ht.sum was called between an uneven batch and the exchange of its gradients


def asked() -> int:
    """Return how often this rank has requested a comparison of the ranks.

    The next exchange of gradients carries the request, because other ranks may have none.
    """
    return _asked


def _ask() -> None:
    global _asked
    _asked += 1


class Pass:
    """The iterator of a sharded loader, which remembers the last batch."""

    def __init__(self, batches: Iterator, share: shares.Passes, in_order: bool, plan: shares.Plan | None) -> None:
        self._batches, self._share = batches, share
        self._plan = plan  # None for a stream, whose batches carry it
        self._known = in_order  # whether batch k is the k-th of the plan
        self._single_exchange = in_order  # whether also each exchange is of one batch, as far as can be known
        self._ahead: int | None = None  # how many batches ahead the script fetches; None before the first exchange
        self._fresh = 0  # batches since the last exchange
        self._lengths: list[tuple[int, ...]] = []  # each rank's samples in the last two batches
        self._steps, self._batch = shares.steps(), -1
        self._weights: dict[int, str] = {}  # digests of the models' weights in a pass without steps
        self._joined = unshared.count if unshared else 0
        self.new = self.used = False  # whether the last batch came after the last exchange, or before it

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> Any:
        training = torch.is_grad_enabled()
        # Before the next batch: other ranks may still process parts of this one.
        if training and leaving and any(p in (self, _last) for p in uneven()):
            leaving()
        if training and shares.steps() > self._steps:
            self._share.trained = True
        try:
            with fetching():
                batch = next(self._batches)
        except StopIteration:
            _open.discard(self)
            if training:
                self._keep_last()
                self._end()
            if unshared:
                unshared.passed(self._joined)
            raise
        self._batch += 1
        if training and self._batch == 1 and shares.steps() == self._steps and self._share.at_home:
            self._weights = weight_check.digests()  # this pass may train without optimizers
        if training and self._plan and self._batch + 1 == self._plan.count and shares.steps() > self._steps:
            _ask()  # with the last batch of a pass
        self._known = self._known and self._share.at_home
        if watch:
            batch = watch(self, batch, training)
        if training:
            _forget_last()
            self._fresh += 1
            if self._single_exchange:
                self._lengths = [*self._lengths[-1:], self._counts]
            self.new = True
            _open.add(self)
        return batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":
            raise AttributeError(name)
        return getattr(self._batches, name)

    def indices(self) -> list:
        """Return the indices of the last batch; empty if unknown."""
        return self._plan.batch(self._batch) if self._plan else []

    @property
    def number(self) -> int:
        """Return the number of the loader."""
        return self._share.number

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return each rank's number of samples, (ranks,), in the batch that the next exchange belongs to, or the last
        one if there was no batch since; () if that is uncertain.

        A script that takes each batch before the step of the one before, as prefetchers do, is known by its first
        exchange, which comes after two batches, and by one batch between exchanges.
        """
        ahead = self._fresh - 1 if self._ahead is None else self._ahead
        several = self._ahead is not None and self._fresh > 1
        return () if several or ahead > 1 or not self._single_exchange else self._lengths[-1 - ahead]

    @property
    def weights(self) -> tuple[float, ...]:
        """Return each rank's weight, (ranks,), for the batch of ``lengths``; see ``weight``."""
        if not self.lengths:
            return (1.0,) * self._share.size
        return tuple(n * self._share.size / sum(self.lengths) for n in self.lengths)

    def trained(self) -> None:
        """Record that the gradients of the batch of ``lengths`` are computed."""
        self._single_exchange = bool(self.lengths)
        if self._ahead is None:
            self._ahead = self._fresh - 1
        self._fresh = 0

    @property
    def uncertain(self) -> bool:
        """Return whether all ranks have weight 1 although a batch is uneven, as the batch in use is not known."""
        return not self.lengths and any(len(set(one)) > 1 for one in self._lengths)

    @property
    def uneven(self) -> bool:
        """Return whether ranks have unequal numbers of samples in the batch of ``lengths``."""
        return self._known and len(set(self.weights)) > 1

    @property
    def _counts(self) -> tuple[int, ...]:
        stream: Any = self._batches
        return self._plan.counts(self._batch) if self._plan else stream.counts

    @property
    def rank(self) -> int:
        return self._share.rank

    @property
    def share_of_batch(self) -> int:
        """Return this rank's number of samples in the batch of ``lengths``."""
        return self.lengths[self.rank]

    @property
    def digest(self) -> str:
        """Return the digest of the order of samples; "" if no step was made in this pass."""
        if shares.steps() == self._steps:
            return ""
        stream: Any = self._batches
        return self._plan.digest if self._plan else f"{stream.digest:08x}" if self._known else ""

    def moved(self) -> dict[str, str]:
        """Return ``fingerprint.Orders.moved`` if steps were made in this pass, else {}."""
        return self._share.orders.moved() if shares.steps() > self._steps else {}

    def _keep_last(self) -> None:
        """Leave the pass open if the step of its last batch is still to come."""
        global _last, _unused
        if self._ahead is None:
            if any(len(set(one)) > 1 for one in self._lengths):
                _unused = self
        elif self._ahead == 1 and self.lengths and not self.new:
            self._ahead, self._fresh, self.new, _last = 0, 1, True, self
            _open.add(self)

    def _end(self) -> None:
        share = self._share
        if shares.steps() > self._steps:
            if isinstance(share, streams.Stream):
                share.ended(self._batch + 1)
            elif not self._plan:
                _ask()
            if share.at_home:
                for work in at_end:
                    work()
            # An epoch ends: from here on random numbers equal those of a run that resumes here.
            rng.start_epoch(mix(share.seed, share.epoch), shares.steps(), share.rank)
            return
        weight_check.pass_ended(self._weights, "the end of a pass over ht.shard")
        if unshared and unshared.count == self._joined:
            for work in without_steps:
                work()
        if share.shuffle and share.repeated() and share.rank == 0:
            what = "the samples came twice in the same order, because no distributed optimizer made a step"
            warnings.warn(f"{what}; ht.shard; call loader.set_epoch(number) for another order", stacklevel=3)


def _forget_last() -> None:
    """Close the pass that was left open: a training batch has come, to which the next exchange belongs."""
    global _last, _unused
    if _last:
        if _last.new and _last.uneven:  # the first batch of its pass was left out
            _warn_of_uncertain_batch(_last.rank)
        _open.discard(_last)
    _last = _unused = None


class Sharded(data.DataLoader):
    """A mixin that restricts a loader of the user's class to this rank's share."""

    share: shares.Passes

    def __iter__(self) -> Any:
        share = self.share
        shares.check_count(share, self.dataset)
        share.start()
        key = mix(share.seed, share.epoch)
        inner: Any = super().__iter__
        in_order = inner.__func__ is data.DataLoader.__iter__ and (self.in_order or not self.num_workers)
        # Workers are seeded from here, so torch's generator stays unchanged. Persistent workers are seeded once.
        first = share.seed if self.persistent_workers else key
        self.generator.manual_seed(first if isinstance(self.dataset, streams.StreamShare) else mix(first, share.rank))
        if isinstance(self.dataset, streams.StreamShare):
            self.dataset.key = key
        batches = iter(inner())
        return Pass(batches, share, in_order, share.plan if in_order and isinstance(share, shares.Share) else None)

    def __len__(self) -> int:
        return self.dataset.batches() if isinstance(self.dataset, streams.StreamShare) else super().__len__()

    def _get_iterator(self) -> Any:
        iterator = super()._get_iterator()
        return streams.Batches(iterator) if isinstance(self.dataset, streams.StreamShare) else iterator

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next pass; call it on all ranks."""
        self.share.set_epoch(epoch)


def shared(
    loader: data.DataLoader,
    seed: int,
    rank: int,
    size: int,
    *,
    ended: Callable[[int], None] = lambda batches: None,
    together: int = 1,
    number: int = 0,
) -> data.DataLoader:
    """Return a copy of the loader over this rank's share of the samples.

    ``together``: the number of ranks whose batches this single process takes. ``number``: of the loader.
    """
    attributes: dict[str, Any] = {"generator": torch.Generator(), "_iterator": None}
    if isinstance(loader.dataset, data.IterableDataset):
        part = streams.StreamShare(loader.dataset, (loader.batch_size or 1) * together, loader.drop_last, rank, size)
        stream = streams.Stream(seed, rank, size, ended)
        attributes |= {"share": stream, "dataset": part, "batch_sampler": None, "sampler": streams.WorkerSeeds(stream)}
        attributes["collate_fn"] = streams.Collate(loader.collate_fn)
    elif together > 1:
        attributes["share"] = shares.Joined([_share(loader, seed, k, together) for k in range(together)], seed)
    else:
        attributes["share"] = _share(loader, seed, rank, size)
    attributes["share"].number, attributes["share"].orders = number, fingerprint.Orders(loader.dataset)
    # The script may seed workers itself (worker_init_fn), in persistent workers only once.
    seeds_workers = loader.persistent_workers or loader.worker_init_fn is None
    attributes["share"].seeds_workers = loader.num_workers > 0 and seeds_workers
    kind = type(loader)
    # A subclass of ours and the user's, without __init__, which would check and replace the attributes below.
    copy: Any = object.__new__(type(kind.__name__, (Sharded, kind), {"__module__": kind.__module__}))
    # DataLoader forbids setting these one by one.
    vars(copy).update(vars(loader) | {"batch_sampler": attributes["share"]} | attributes)
    return copy


def _share(loader: data.DataLoader, seed: int, rank: int, size: int) -> shares.Share:
    options: Any = dict(drop_last=loader.drop_last, seed=seed, rank=rank, size=size)
    sampler, batch_size = loader.sampler, loader.batch_size
    # A subclass may build batches in its own way, so its batches are used.
    if type(loader.batch_sampler) is not data.BatchSampler or batch_size is None:
        return user_order.UserBatches(loader.batch_sampler, seed=seed, rank=rank, size=size)
    if _plain(sampler, loader.dataset):
        shuffle = type(sampler) is data.RandomSampler
        return shares.Share(len(loader.dataset), batch_size, shuffle=shuffle, **options)
    return user_order.UserOrder(sampler, batch_size, **options)


def _plain(sampler: Any, samples: Any) -> bool:
    """Return whether the sampler is sequential, or shuffles all samples once."""
    drawn = type(sampler) is data.RandomSampler and not sampler.replacement
    return (drawn or type(sampler) is data.SequentialSampler) and len(sampler) == len(samples)


def orders() -> dict[str, str]:
    """Return digests of the orders of samples in use, and of lists that the script has shuffled.

    Only orders that may differ between ranks are included.
    """
    digests = sorted({p.digest for p in _open if p.used} - {""})
    digests_by_name = {"order of samples": " ".join(digests)} if digests else {}
    for p in sorted(_open, key=lambda p: p.number):
        for name, digest in p.moved().items() if p.used else ():
            text = f"order of {name} in loader {p.number}, which random.Random(epoch).shuffle makes equal"
            digests_by_name[text] = digest
    return digests_by_name


def weight() -> float:
    """Return this rank's weight in the mean over ranks: its samples times ranks / all ranks' samples.

    It differs from 1 only at the end of an epoch, where batches may differ in length, and only if it is certain which
    batch the gradient belongs to: each batch of this pass had its own exchange, before or after the next one was taken,
    and no other sharded loader has returned a batch of another weight since the last exchange. Batches taken under
    ``torch.no_grad`` do not count, and an exchange without a new batch belongs to the last one. The ranks' weights have
    a mean of 1 up to rounding. The loss is assumed to be a mean over its batch.
    """
    passes = in_use()
    # All ranks' weights are compared: two loaders may have equal weights here, and different ones on another rank.
    weights = {p.weights for p in passes}
    return weights.pop()[passes[0].rank] if len(weights) == 1 else 1.0


def in_use() -> list[Pass]:
    """Return the passes whose batches the next exchanged gradients belong to."""
    return [p for p in _open if p.new] or [p for p in _open if p.used]


def uneven() -> list[Pass]:
    """Return the passes in use whose batch has unequal lengths on the ranks; the same on all ranks."""
    return [p for p in in_use() if p.uneven]


def summed() -> None:
    """Record that ``ht.sum`` was called."""
    global _summed
    _summed = _summed or any(p.new for p in uneven())


def averaged() -> float:
    """Return ``weight`` for averaged gradients that are about to be exchanged; may warn of a loss or a batch."""
    if _summed:
        warn_of_divided_loss()
    uncertain = [p for p in in_use() if p.uncertain]
    if _unused and not in_use():
        uncertain = [_unused]
    if uncertain:
        _warn_of_uncertain_batch(uncertain[0].rank)
    return weight()


@functools.cache
def warn_of_divided_loss() -> None:
    """Warn once, on rank 0, that a loss may be divided by a global sum, so it is no mean over local samples."""
    if not in_use()[0].rank:
        what = "ht.sum before backward(), where gradients are weighted by the ranks' unequal numbers of samples"
        fix = "if the loss is divided by this sum, use ht.distribute(average=False), and do not divide by ht.size()"
        warnings.warn(f"{what}; {fix}", stacklevel=5)


@functools.cache
def _warn_of_uncertain_batch(rank: int) -> None:
    """Warn once, on rank 0, that all ranks have weight 1 in an uneven batch."""
    if not rank:
        what = "it is not known which batch a step belongs to, so in an uneven batch all ranks have the same weight"
        fix = "make a step for each batch and fetch at most one batch ahead, or set drop_last=True"
        warnings.warn(f"{what}; ht.shard; {fix}", stacklevel=5)


def exchanged() -> None:
    """Record that the gradients of the batches in use have been exchanged."""
    global _summed
    _summed = False
    if unshared:
        unshared.stepped()
    accumulated()


def accumulated() -> None:
    """Record that gradients of the batches in use are computed, so that the next batch has its own."""
    passes = list(_open)
    if any(p.new for p in passes):
        for p in passes:
            if p.new:
                p.trained()
            p.used, p.new = p.new, False
