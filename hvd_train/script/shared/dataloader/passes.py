"""Passes over sharded loaders: the batch that gradients belong to, and its weight.

In a plain loop the gradients of an exchange belong to the batch that was taken last. Where a script takes batches in
another way (ahead, from two loaders, kept in a list), the batch is known by its length: see ``averaged``.
"""

from __future__ import annotations

import atexit
import functools
import json
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

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
inputs: Inputs | None = None
_open: weakref.WeakSet[Pass] = weakref.WeakSet()  # unfinished passes that have returned a training batch
_newest: Pass | None = None  # the last pass that returned a training batch: its batch may be used when it is gone
_quiet: Pass | None = None  # the unfinished pass that last returned a batch under ``torch.no_grad``
_last: Pass | None = None  # a pass that has ended before the step of its last batch
_kinds: dict[int, Mapping[Counts, None]] = {}  # the lengths of batches of each loader's latest pass
_blind = False  # whether another thread reads a stream, whose lengths ranks cannot know at the same time
_decided: tuple[float, ...] | None = None  # all ranks' weights for the next exchange, where they had to be found out
_settled = False  # whether that was tried
_before: tuple[float, ...] | None = None  # what was found out last
_gathers = True  # whether all ranks compare the lengths of inputs in the next exchange; the same on all ranks
_agreed = False  # the same, once there was an exchange
_after = False  # whether the last training pass has ended with an uneven batch, and no batch came since
_steps_after = False  # whether there were ever steps after such a pass
_stepless = False  # whether a pass has ended without a step or a sum over ranks, and nothing has followed
_rank = 0
_asked = 0
_summed = False  # whether ht.sum was called between an uneven batch and the exchange of its gradients


Counts = tuple[int, ...]  # each rank's number of samples in a batch


class Inputs(Protocol):
    """The inputs of models since the last exchange: the ``lengths`` of their first and of their second dimensions.

    ``follow``: say whether they are needed from now on. ``watched``: whether they are. ``gather`` returns each rank's
    bytes.
    """

    lengths: tuple[set[int], set[int]]

    @property
    def watched(self) -> bool: ...

    def follow(self, needed: bool) -> None: ...

    def gather(self, own: bytes) -> list[bytes]: ...


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
        self._plan = plan if in_order else None  # None for a stream, whose batches carry it
        self._in_order, self.home = in_order, share.at_home
        # The lengths of its batches so far. Where it is not known which batch of the plan comes, of all.
        self._kinds: dict[Counts, None] = {}
        if plan and not (in_order and self.home):
            self._kinds = dict.fromkeys(plan.counts(k) for k in range(plan.count))
        _begin(self)
        self._known = in_order  # whether batch k is the k-th of the plan
        self._single_exchange = in_order  # whether also each exchange is of one batch, as far as can be known
        self._ahead: int | None = None  # how many batches ahead the script fetches; None before the first exchange
        self._fresh = 0  # batches since the last exchange
        self._lengths: list[tuple[int, ...]] = []  # each rank's samples in the last two batches
        self._steps, self._batch = shares.steps(), -1
        self.over = False  # whether the pass has ended, seemingly before the step of its last batch
        self.listed = False  # whether it has ended without a step: its batches may be in a list
        self._begun, self._most = self._steps, 0  # steps before the last batch; the most steps between two batches
        self._weights: dict[int, str] = {}  # digests of the models' weights in a pass without steps
        self._joined = unshared.count if unshared else 0
        self.whole = False  # whether the models got all of the last batch at once
        self.new = self.used = False  # whether the last batch came after the last exchange, or before it

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> Any:
        global _newest, _quiet, _decided, _settled, _after
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
            _newest, _quiet = (None if one is self else one for one in (_newest, _quiet))
            if training:
                _after = shares.steps() > self._steps and any(len({*one}) > 1 for one in self._lengths[-1:])
                self._keep_last()
                self._end()
            if unshared:
                unshared.passed(self._joined)
            if inputs:
                inputs.follow((_steps_after or bool(in_use())) and needs_lengths())
            raise
        self._batch += 1
        if training and self._batch == 1 and shares.steps() == self._steps and self._share.at_home:
            self._weights = weight_check.digests()  # this pass may train without optimizers
        if training and self._plan and self._batch + 1 == self._plan.count and shares.steps() > self._steps:
            _ask()  # with the last batch of a pass
        self._known = self._known and self._share.at_home
        if watch:
            batch = watch(self, batch, training)
        self._fresh += 1
        self.new, _decided, _settled = True, None, False
        if self._batch:
            self._most = max(self._most, shares.steps() - self._begun)
        self._begun = shares.steps()
        if self._in_order:
            self._lengths = [*self._lengths[-1:], self._counts]
            if not self.of_stream:
                self._kinds[self._counts] = None
        if training:
            _forget_last()
            _newest, _after = self, False
            _open.add(self)
        else:
            _quiet = self
        _follow_inputs()
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
        return _weights(self.lengths or (1,) * self._share.size)

    @property
    def possible(self) -> set[Counts]:
        """Return the lengths that the batch of the next exchange may have."""
        return {*(self._lengths[-1:] if self.plain else self.kinds)}

    @property
    def plain(self) -> bool:
        """Return whether every exchange so far used the batch that was taken last."""
        ordered = self._in_order and self._single_exchange and not self._ahead
        return ordered and self._fresh <= 1 and not self.over

    @property
    def comes_uneven(self) -> bool:
        """Return whether the ranks' parts of the pass's last batch will differ in length."""
        plan = self._plan
        return plan is not None and plan.count > 0 and len(set(plan.counts(plan.count - 1))) > 1

    @property
    def used_up(self) -> bool:
        """Return whether the last batch had as many steps as any before: more may be on data of the script's own."""
        return self._complete and not self.new and 0 < self._most <= shares.steps() - self._begun

    @property
    def of_stream(self) -> bool:
        return isinstance(self._share, streams.Stream)

    @property
    def kinds(self) -> Mapping[Counts, None]:
        """Return the lengths of the batches of this pass: of those so far, or of all."""
        # The batches of a loader with an __iter__ of its own may be others than those that the stream gives it.
        return self._share.kinds if isinstance(self._share, streams.Stream) else self._kinds

    @property
    def _complete(self) -> bool:
        return self._plan is not None and self._batch + 1 == self._plan.count

    @property
    def ends_uneven(self) -> bool:
        """Return whether the last batch of the pass has come, and the ranks' parts of it differ in length."""
        return self._complete and len(set(self._lengths[-1])) > 1

    @property
    def ahead(self) -> bool:
        """Return whether the script takes each batch before the step of the one before."""
        return self._ahead == 1 and self._single_exchange and bool(self.lengths)

    def trained(self) -> None:
        """Record that the gradients of the batch of ``lengths`` are computed."""
        own = self.lengths
        self.whole = bool(own) and inputs is not None and own[self.rank] in inputs.lengths[0]
        self._single_exchange = self._single_exchange and bool(own)
        if self._ahead is None:
            self._ahead = self._fresh - 1
        self._fresh = 0

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
        global _last
        if self._ahead == 1 and self.lengths and not self.new:
            self._ahead, self._fresh, self.new, self.over = 0, 1, True, True
            self._begun = shares.steps()
        if self.new and self.home:
            _last = self
            _open.add(self)

    def _end(self) -> None:
        global _stepless
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
        self.listed = True
        _stepless = _stepless or bool(unshared and unshared.count == self._joined)
        if share.shuffle and share.repeated() and share.rank == 0:
            what = "the samples came twice in the same order, because no distributed optimizer made a step"
            warnings.warn(f"{what}; ht.shard; call loader.set_epoch(number) for another order", stacklevel=3)


@functools.cache
def _tell_at_exit() -> None:
    """At exit, warn of the last pass: if it seemed to fetch ahead and had left out its first batch, or had no step."""
    atexit.register(_forget_last)
    atexit.register(_tell_of_stepless)


def _tell_of_stepless() -> None:
    """Warn if the last pass had neither a step nor a sum over ranks, and none came after it."""
    global _stepless
    for work in without_steps if _stepless else ():
        work()
    _stepless = False


def _begin(one: Pass) -> None:
    global _rank, _blind
    _tell_at_exit()
    _tell_of_stepless()
    _rank = one.rank
    stream = one.of_stream
    if one.home or not stream:
        _kinds[one.number] = one.kinds
    _blind = _blind or not one.home and stream


def _forget_last() -> None:
    """Close the pass that was left open: a training batch has come, to which the next exchange belongs."""
    global _last
    if _last is not None:
        if _last.over and _last.new and _last.ends_uneven and _before is None:  # its first batch was left out
            _warn_of_uncertain_batch(_rank)
        _open.discard(_last)
    _last = None


class Sharded(data.DataLoader):
    """A mixin that restricts a loader of the user's class to this rank's share."""

    share: shares.Passes
    watched: tuple[torch.Generator, ...]  # besides the loader's own

    @property
    def _index_sampler(self) -> Any:
        # The script's own batch sampler stays where it was: it may set its batch_size, or an epoch.
        return self.share if isinstance(self.share, shares.Share) else super()._index_sampler

    def __iter__(self) -> Any:
        share = self.share
        shares.check_count(share, self.dataset)
        share.take_seed()
        share.start()
        key = mix(share.seed, share.epoch)
        inner: Any = super().__iter__
        in_order = inner.__func__ is data.DataLoader.__iter__ and (self.in_order or not self.num_workers)
        # Workers are seeded from here, so torch's generator stays unchanged. Persistent workers are seeded once.
        first = share.seed if self.persistent_workers else key
        self.generator.manual_seed(first if isinstance(self.dataset, streams.StreamShare) else mix(first, share.rank))
        share.watch(self.generator, *self.watched)
        if isinstance(self.dataset, streams.StreamShare):
            self.dataset.key = key
        batches = iter(inner())
        plan = None
        if isinstance(share, shares.Share):  # a generator has not begun yet
            plan = share.plan if in_order else share.planned(share.epoch)
        return Pass(batches, share, in_order, plan)

    def __len__(self) -> int:
        return self.dataset.batches() if isinstance(self.dataset, streams.StreamShare) else super().__len__()

    def _get_iterator(self) -> Any:
        iterator = super()._get_iterator()
        if not isinstance(self.share, streams.Stream):
            return iterator
        self.share.kinds.clear()
        return streams.Batches(iterator, self.share.kinds)

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
    again: int = 0,
    shuffled: torch.Generator | None = None,
) -> data.DataLoader:
    """Return a copy of the loader over this rank's share of the samples.

    ``together``: the number of ranks whose batches this single process takes. ``number``: of the loader. ``shuffled``:
    the script's generator that shuffles it, which ``again`` other loaders have had before.
    """
    attributes: dict[str, Any] = {"generator": torch.Generator(), "_iterator": None}
    # A sampler of the user's draws from its own generators, which are seeded for each pass, and torch's own is seeded
    # by rank.
    watches = type(loader.sampler) is data.RandomSampler and shuffled is not torch.default_generator
    watched = (shuffled,) if shuffled and watches else ()
    attributes["watched"] = watched
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
    attributes["share"].again = again
    attributes["share"].watch(attributes["generator"], *watched)
    # The script may seed workers itself (worker_init_fn), in persistent workers only once.
    seeds_workers = loader.persistent_workers or loader.worker_init_fn is None
    attributes["share"].seeds_workers = loader.num_workers > 0 and seeds_workers
    kind = type(loader)
    # A subclass of ours and the user's, without __init__, which would check and replace the attributes below.
    copy: Any = object.__new__(type(kind.__name__, (Sharded, kind), {"__module__": kind.__module__}))
    # DataLoader forbids setting these one by one.
    vars(copy).update(vars(loader) | attributes)
    return copy


def _share(loader: data.DataLoader, seed: int, rank: int, size: int) -> shares.Share:
    options: Any = dict(seed=seed, rank=rank, size=size)
    sampler, batch_size = loader.sampler, loader.batch_size
    # A subclass may build batches in its own way, so its batches are used.
    if type(loader.batch_sampler) is not data.BatchSampler or batch_size is None:
        return user_order.UserBatches(loader.batch_sampler, **options)
    if _plain(sampler, loader.dataset):
        shuffle = type(sampler) is data.RandomSampler
        options |= {"drop_last": loader.drop_last, "source": loader.batch_sampler}
        return shares.Share(len(loader.dataset), batch_size, shuffle=shuffle, **options)
    return user_order.UserOrder(sampler, loader.batch_sampler, **options)


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

    It differs from 1 only where ranks' parts of a batch differ in length, as at the end of an epoch. The ranks' weights
    have a mean of 1 up to rounding. The loss is assumed to be a mean over its batch.
    """
    passes = in_use()
    # All ranks' weights are compared: two loaders may have equal weights here, and different ones on another rank.
    weights = {_decided} if _decided else {p.weights for p in passes}
    return weights.pop()[_rank] if len(weights) == 1 else 1.0


def _weights(counts: Counts) -> tuple[float, ...]:
    return tuple(n * len(counts) / sum(counts) for n in counts)


def in_use() -> list[Pass]:
    """Return the passes whose batches the next exchanged gradients may belong to.

    These are the passes over which the script still iterates: those whose batch came after the last exchange, else
    those that it belonged to. If the script iterates over none, it is a pass under ``torch.no_grad``, or one that was
    left before the step of its last batch.
    """
    left = _newest if sys.getrefcount(_newest) <= 2 else None  # one reference is that of this module, one the call's
    passes = [p for p in _open if p.home and p is not left and p is not _last]
    ended = [] if _last is None else [_last]
    if found := [p for p in passes if p.new] or [p for p in ended if p.over]:
        return found
    if passes or ended:
        return [p for p in passes if p.used] or passes or ended
    quiet, gone = ([p] if p is not None and p.home else [] for p in (_quiet, left))
    return [p for p in (*quiet, *gone) if p.new][:1] or quiet


def uneven() -> list[Pass]:
    """Return the passes in use whose batch has unequal lengths on the ranks; the same on all ranks."""
    return [p for p in in_use() if p.uneven]


def summed() -> None:
    """Record that ``ht.sum`` was called."""
    global _summed
    _summed = _summed or any(p.new for p in uneven())


def averaged() -> float:
    """Return ``weight`` for averaged gradients that are about to be exchanged; may warn of a loss or a batch.

    All ranks call it. If the batch is not known by the order of batches and exchanges, and its lengths are not the same
    in all cases, each rank tells the lengths of its models' inputs; the batch that fits everywhere is taken.
    """
    global _decided, _settled, _newest, _last
    if _summed:
        warn_of_divided_loss()
    if _settled:  # another model in the same backward pass
        return weight()
    for one in [one for one in _open if one.used_up]:
        _open.discard(one)
        _newest, _last = (None if each is one else each for each in (_newest, _last))
    _settled, passes = True, in_use()
    possible, guess, unknown = _by_order(passes)
    if inputs and _gathers:
        again = bool(passes) and not any(p.new for p in passes)  # a further exchange after the batch's first
        _decided, unknown = _found(inputs, possible | _current(), passes, guess, again)
    else:
        _decided = guess
        if unknown and len(passes) == 1 and not passes[0].new:  # ranks may make unequal numbers of backward passes
            _decided, unknown = _before or guess, False
    # The order tells enough of a loop that takes one batch ahead, and in steps on data of the script's own.
    if (unknown and not (len(passes) == 1 and (passes[0].ahead or passes[0].over))) or (_blind and not passes):
        _warn_of_uncertain_batch(0 if inputs and not _gathers else _rank)
    return weight()


def weight_of_part() -> float:
    """Return ``weight`` for gradients that are accumulated on this rank alone; may warn of a batch.

    Ranks may accumulate unequal numbers of times, so they cannot compare the lengths of inputs.
    """
    passes = in_use()
    possible, _, unknown = _by_order(passes)
    if unknown and not (len(passes) == 1 and (passes[0].ahead or passes[0].over)):
        seen = inputs.lengths[0] if inputs else ()
        counts = {one[_rank] for one in possible if one} - {0}
        if not seen or any(length % n == 0 for length in seen for n in counts):
            _warn_of_uncertain_batch(_rank)
    return weight()


def _current() -> set[Counts]:
    """Return the lengths of the last batch of each open pass."""
    return {p._lengths[-1] for p in _open if p.home and p._lengths}


def _by_order(passes: list[Pass]) -> tuple[set[Counts], tuple[float, ...] | None, bool]:
    """Return the lengths that the batch may have, all ranks' weights if they are known, and whether they are not."""
    if passes:
        possible = set[Counts]().union(*(p.possible for p in passes))
    else:
        possible = {(), *(one for kinds in _kinds.values() for one in kinds)}
    known = {_weights(one or (1,) * max(map(len, possible))) for one in possible}
    by_order = {p.weights for p in passes}
    guess = next((tuple(*one) for one in ({*by_order}, known) if len(one) == 1), None)
    return possible, guess, len(known) > 1


class _Report(NamedTuple):
    """What a rank tells of its next exchange: see ``_found``."""

    first: list[int]  # the lengths of inputs' first dimensions
    second: list[int]
    own: bool  # whether the step may use data of the script's own
    again: bool  # whether the batch had an exchange already
    possible: list[list[int]]
    guess: list[float] | None  # the weights by order

    def ratios(self, count: int) -> set[int] | None:
        """Return how many rows the inputs may have for each of ``count`` samples; None: any number."""
        if not count or not self.first:
            return None if 0 in self.first or not self.first else set()
        return {length // count for length in self.first if length and length % count == 0}


def _found(
    inputs: Inputs, possible: set[Counts], passes: list[Pass], guess: tuple[float, ...] | None, again: bool
) -> tuple[tuple[float, ...], bool]:
    """Return all ranks' weights, the same on all ranks, and whether they may be wrong.

    Each rank tells which batches are possible, and the lengths of its models' inputs. What fits on all ranks is taken;
    if nothing does, what the order says (``guess``), if it says the same everywhere. ``again``: the batch had an
    exchange already, so this one may be of data of the script's own.
    """
    global _before
    # After a pass data of the script's own is only known by batches of this pass that did fit. Within a batch they are
    # known if the models had all of it before: parts of a batch have several exchanges, too.
    own = not passes or (all(p.over for p in passes) and _before is not None)
    own = own or (again and all(p.whole for p in passes))
    first, second = map(sorted, inputs.lengths)
    report = _Report(first, second, own, again, [[*one] for one in possible if one], [*guess] if guess else None)
    reports = [_Report(*json.loads(part)) for part in inputs.gather(json.dumps(report).encode())]
    equal = (1.0,) * len(reports)
    fitting = _fitting(reports) if any(one.first for one in reports) else set()
    if fitting:
        left = {_weights(one) for one in fitting}
    elif all(one.own and one.first == report.first for one in reports) and report.first:
        left = {equal}  # inputs as long on all ranks, which are no batch
    elif len({one.own for one in reports}) > 1:
        left = set()
    else:
        kinds = [{_weights(tuple(counts)) for counts in one.possible} for one in reports]
        left = set.intersection(*(one | {equal} if own or not one else one for one in kinds))
    guesses = {one.guess and (*one.guess,) for one in reports}
    agreed = guesses.pop() if len(guesses) == 1 else None
    # Parts of the batch, or a second loss of the same forward pass.
    same = not any(one.first for one in reports) or not (fitting or any(one.own for one in reports))
    if agreed and same and all(one.again for one in reports):
        return agreed, False
    if len(left) != 1:
        # In the first step on data of the script's own the models were not watched yet. It may be of the pass's last
        # batch as well.
        return agreed or equal, inputs.watched or bool(passes) or _after
    (found,) = left
    _before = found if fitting else _before
    return found, False


def _fitting(reports: list[_Report]) -> set[Counts]:
    """Return the lengths that fit the inputs on all ranks.

    Samples are usually the first dimension, or are flattened with others in it. That the lengths of another dimension
    fit is no accident if they are unequal, so it is then uncertain which. Equal lengths do not count there: the inputs
    may be as wide.
    """
    possible = {(*counts,) for one in reports for counts in one.possible}
    ratios, across = dict[Counts, set[int]](), set[Counts]()
    for counts in possible:
        pairs = [*zip(reports, counts, strict=True)]
        known = [own for one, n in pairs if (own := one.ratios(n)) is not None]
        ratios[counts] = set.intersection(*known) if known else {1}
        if len({*counts}) > 1 and all(n in one.second for one, n in pairs):
            across.add(counts)
    exact = {counts for counts, fit in ratios.items() if 1 in fit}
    flat = {counts for counts, fit in ratios.items() if fit}
    found = exact or flat or across
    uneven = {counts for counts in flat | across if len({*counts}) > 1}
    return found if any(len({*counts}) > 1 for counts in found) else found | uneven


def needs_lengths() -> bool:
    """Return whether this rank may not know the batch of the next exchange by the order of batches alone."""
    passes = in_use()
    uneven = any(len(set(one)) > 1 for kinds in _kinds.values() for one in kinds)
    uneven = uneven or any(p.comes_uneven for p in passes)
    others = any(p not in passes and p._lengths and len(set(p._lengths[-1])) > 1 for p in _open if p.home)
    return uneven and (others or not (len(passes) == 1 and passes[0].plain and not passes[0].ends_uneven))


def gathers() -> bool:
    """Return whether all ranks compare lengths in the next exchange."""
    return _gathers


def agree_on_lengths(needed: bool) -> None:
    """Set whether all ranks compare lengths in the next exchange; all ranks call it with the same value."""
    global _gathers, _agreed
    _gathers = _agreed = needed


def _follow_inputs() -> None:
    """Record the next inputs of the models if their lengths may be needed."""
    if inputs:
        inputs.follow(_agreed or needs_lengths())


@functools.cache
def warn_of_divided_loss() -> None:
    """Warn once, on rank 0, that a loss may be divided by a global sum, so it is no mean over local samples."""
    if not in_use()[0].rank:
        what = "ht.sum before backward(), where gradients are weighted by the ranks' unequal numbers of samples"
        fix = "if the loss is divided by this sum, use ht.distribute(average=False), and do not divide by ht.size()"
        warnings.warn(f"{what}; {fix}", stacklevel=5)


@functools.cache
def _warn_of_uncertain_batch(rank: int) -> None:
    """Warn once that all ranks have weight 1 in an uneven batch; only if ``rank`` is 0."""
    if not rank:
        what = (
            "it is not known which batch a step belongs to, so where ranks' parts differ in length all count the same"
        )
        fix = "take each batch in a for loop, and make its step before the next one, or set drop_last=True"
        warnings.warn(f"{what}; ht.shard; {fix}", stacklevel=5)


def exchanged() -> None:
    """Record that the gradients of the batches in use have been exchanged."""
    global _summed, _stepless
    _summed = _stepless = False
    if unshared:
        unshared.stepped(of_list=_last is not None and _last.listed)
    accumulated()
    if inputs:
        for lengths in inputs.lengths:
            lengths.clear()


def accumulated() -> None:
    """Record that gradients of the batches in use are computed, so that the next batch has its own."""
    global _decided, _settled, _last, _steps_after
    _decided, _settled = None, False
    passes = [*_open, *([] if _quiet is None else [_quiet])]
    if any(p.new for p in passes):
        for p in passes:
            if p.new:
                p.trained()
            p.used, p.new = p.new, False
        if _last is not None and not _last.over:
            _open.discard(_last)
            _last = None
        _follow_inputs()
    elif not passes:
        _steps_after = _steps_after or _after
        _follow_inputs()
