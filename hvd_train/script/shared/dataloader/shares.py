"""A rank's share of a DataLoader: its batches are a pure function of (seed, epoch, rank, size)."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import data
from torch.utils.data.dataloader import _BaseDataLoaderIter

from hvd_train.data.order import mix, permute
from hvd_train.errors import ConfigError, DataError
from hvd_train.script.shared.dataloader import fingerprint, rng
from hvd_train.script.shared.dataloader.last_batch import EvenBatches
from hvd_train.script.shared.pass_order import PassNumbers

WHERE = "ht.shard"


_steps = 0


def steps() -> int:
    """Return the number of steps of distributed optimizers in this process.

    It is equal on all ranks at the same point of the script.
    """
    return _steps


def stepped() -> None:
    """Count a step."""
    global _steps
    _steps += 1


@dataclass(frozen=True)
class Plan:
    """The batches of one pass on this rank.

    ``counts(k)``: the number of samples of batch k on each rank, (ranks,). ``digest``: a hash of the global order of
    samples; "" if it cannot differ between ranks.
    """

    count: int
    batch: Callable[[int], list]
    counts: Callable[[int], tuple[int, ...]]
    digest: str = ""


class Passes:
    """The passes over a loader, numbered by the steps of distributed optimizers since ``ht.shard``.

    One step of each of two optimizers counts as two. Passes in other threads than the one that made this object are
    counted separately, because steps may be made meanwhile.
    """

    shuffle = True  # whether passes have different orders
    number = 0  # of the loader
    orders: fingerprint.Orders  # of its data set
    seeds_workers = False  # whether each batch brings a seed for its worker
    trained = False  # whether steps were made in a pass over this loader
    again = 0  # how many loaders have had this one's generator before
    reseeded = False  # whether the script has seeded a generator of the loader anew

    def __init__(self, seed: int, rank: int, size: int) -> None:
        self.seed, self.rank, self.size = seed, rank, size
        self._numbers, self._thread = PassNumbers(steps, 0), threading.get_ident()
        self._thread_passes = 0  # passes in other threads
        self._whole = [0, 0]  # epoch, and its number of complete passes without a step
        self._watched: list[tuple[torch.Generator, int]] = []

    def watch(self, *generators: torch.Generator) -> None:
        """Remember the seeds of generators, so that ``take_seed`` notices when the script sets another."""
        self._watched = [(one, one.initial_seed()) for one in generators]

    def take_seed(self) -> None:
        """Shuffle by another seed, if the script has set one on a watched generator."""
        for generator, before in self._watched:
            if (seed := generator.initial_seed()) != before:
                self.seed, self.reseeded = mix(seed, self.again) if self.again else seed, True

    @property
    def at_home(self) -> bool:
        """Return whether this thread made the object. Other threads may be at different batches on each rank."""
        return threading.get_ident() == self._thread

    @property
    def epoch(self) -> int:
        """Return the number of the next pass."""
        return self._numbers.next

    def begin(self) -> int:
        """Begin a pass; return its number."""
        if self.at_home:
            return self.epoch
        # Negative, so they never equal the numbers of the main thread's passes.
        self._thread_passes += 1
        return -self._thread_passes

    def start(self) -> None:
        """Seed this rank's generators by the number of the training pass that begins.

        The first pass keeps the script's seed. A pass in another thread does not touch the generators.
        """
        if self.trained and torch.is_grad_enabled() and self.at_home:
            rng.start_pass(mix(self.seed, self.epoch), self.rank)

    def renumber(self, epoch: int) -> None:
        """Set the number of the next pass, from which later ones count by steps; on all ranks."""
        self._numbers.set(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next pass, for scripts; on all ranks."""
        self.renumber(epoch)

    def repeated(self) -> bool:
        """Return whether this complete pass without a step is the second one with this order."""
        epoch, count = self._whole
        self._whole = [self.epoch, count + 1 if epoch == self.epoch else 1]
        return self._whole[1] == 2

    def state_dict(self) -> dict[str, int]:
        counts = {"epoch": self.epoch, "thread_passes": self._thread_passes, "trained": int(self.trained)}
        return {"seed": self.seed, **counts, "draws": rng.state(self.seed, steps())}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore a state, and this rank's generators."""
        self.seed, self._thread_passes = state["seed"], state["thread_passes"]
        self.renumber(state["epoch"])
        self.trained = bool(state["trained"])
        rng.resume(state["draws"], self.rank)


class Share(Passes, data.Sampler):
    """A batch sampler whose global batch k is the same set of samples for every number of ranks.

    Every sample comes once per epoch (with ``drop_last``: those of full global batches). With ``shuffle`` the order is
    a function of (seed, epoch).
    """

    plan: Plan  # of the latest pass
    count: int | None = None  # samples; None: the order is drawn again for each pass
    source: Any  # the loader's own batch sampler: the script may set its batch_size and drop_last between passes

    def __init__(
        self,
        count: int,
        batch_size: int,
        *,
        shuffle: bool,
        drop_last: bool,
        seed: int,
        rank: int,
        size: int,
        source: Any = None,
    ) -> None:
        super().__init__(seed, rank, size)
        self.count, self.shuffle = count, shuffle
        self.source = source or SimpleNamespace(batch_size=batch_size, drop_last=drop_last)
        self._even(count)  # raises for too few samples

    def _even(self, count: int) -> EvenBatches:
        return EvenBatches(count, self.source.batch_size, self.source.drop_last, self.rank, self.size, WHERE)

    def __len__(self) -> int:
        return self.planned(self.epoch).count

    def __iter__(self) -> Iterator[list]:
        epoch = self.begin()
        self.plan = plan = self.planned(epoch)
        if not self.seeds_workers:
            return self._batches(plan)
        # Each batch carries a seed for the worker that loads it.
        key = mix(mix(self.seed, epoch), self.rank)
        return (rng.SeededBatch(batch, mix(key, k)) for k, batch in enumerate(self._batches(plan)))

    def _batches(self, plan: Plan) -> Iterator[list]:
        size = self.source.batch_size
        for k in range(plan.count):
            if self.source.batch_size != size and not self.rank:
                what = f"batch_size became {self.source.batch_size} within a pass, whose batches keep {size} samples"
                warnings.warn(f"{what}; {WHERE}; the next pass takes it", stacklevel=2)
                size = self.source.batch_size
            yield plan.batch(k)

    def planned(self, epoch: int) -> Plan:
        assert self.count is not None
        even, seed = self._even(self.count), self.seed

        def batch(k: int) -> list:
            # (samples of this rank,) int64: positions in the shuffled order, then indices of samples
            places = even.places(k)
            return (permute(places, even.count, seed, epoch) if self.shuffle else places).tolist()

        return Plan(len(even), batch, even.counts, f"seed {seed}" if self.shuffle and self.reseeded else "")


class Joined(Share):
    """The batches of all ranks, joined for a single process."""

    def __init__(self, shares: Sequence[Share], seed: int) -> None:
        # As rank 0 of 1: the order comes from the joined shares.
        Passes.__init__(self, seed, 0, 1)
        self._shares, self.source = shares, shares[0].source

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        for each in self._shares:
            each.set_epoch(epoch)

    def planned(self, epoch: int) -> Plan:
        plans = [share.planned(epoch) for share in self._shares]

        def batch(k: int) -> list:
            return [i for plan in plans for i in plan.batch(k)]

        return Plan(plans[0].count, batch, lambda k: (sum(plans[0].counts(k)),))


def check(loader: data.DataLoader) -> None:
    """Raise ConfigError for a loader that cannot be sharded."""

    def refuse(what: str, fix: str) -> None:
        raise ConfigError(what, where=WHERE, fix=fix)

    if not isinstance(loader, data.DataLoader):
        refuse(f"it takes a torch.utils.data.DataLoader, not a {type(loader).__name__}", "make one of your data set")
    if isinstance(getattr(loader, "share", None), Passes):
        refuse("this loader is sharded already", "call ht.shard once")
    if loader.batch_sampler is None:
        what = "the loader's batch_size is None, so its data set makes batches"
        refuse(what, "let the data set return samples, and set batch_size")
    # A loader that prefetches has already begun a pass over all samples.
    if any(isinstance(x, _BaseDataLoaderIter) for name, x in vars(loader).items() if name != "_iterator"):
        refuse(f"this {type(loader).__name__} has already begun a pass over its data", "shard a new DataLoader")
    inner = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if isinstance(inner, data.DistributedSampler):
        refuse("the loader has a DistributedSampler", "remove it, and use shuffle=True")


def check_count(passes: Passes, samples: Any) -> None:
    """Raise DataError if the data set's length has changed since ``ht.shard``: some samples would never come."""
    if isinstance(passes, Share) and passes.count is not None and passes.count != len(samples):
        what = f"the data set has {len(samples)} samples, and had {passes.count}"
        raise DataError(what, where=WHERE, fix="shard a new DataLoader of it, on all ranks", common=True)


def facts(loader: data.DataLoader) -> dict[str, str]:
    """Return {name: text} for all properties that must be equal on all ranks."""
    try:
        samples = str(len(loader.dataset))
    except TypeError:  # a stream, or a chain of streams
        samples = type(loader.dataset).__name__
    return {
        "samples": samples,
        "batch_size": str(loader.batch_size),
        "sampler": f"{type(loader.sampler).__name__} in {type(loader.batch_sampler).__name__}",
        "drop_last": str(loader.drop_last),
        **fingerprint.content(loader.dataset),
    }
