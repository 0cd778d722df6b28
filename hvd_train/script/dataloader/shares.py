"""A rank's share of a DataLoader: which samples make its batches, a pure function of (seed, epoch, rank, size)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import data
from torch.utils.data.dataloader import _BaseDataLoaderIter

from hvd_train.data.order import mix, permute, share
from hvd_train.errors import ConfigError, DataError
from hvd_train.script.dataloader import fingerprint, rng

WHERE = "ht.shard"


_steps = 0


def steps() -> int:
    """Steps that distributed optimizers have made in this process: the same number on all ranks, at the same place of
    the script."""
    return _steps


def stepped() -> None:
    global _steps
    _steps += 1


def part(count: int, whole: int, rank: int, size: int) -> np.ndarray:
    """A rank's places among the ``count`` samples of a global batch that should have ``whole``: the last may have
    fewer, or, where fewer than ``size`` followed it, those as well."""
    places = np.arange(*share(min(count, whole), size, rank))
    return np.append(places, whole + rank) if rank < count - whole else places


@dataclass(frozen=True)
class Plan:
    """The batches of one pass on this rank. ``weight``: of batch k, its samples times ranks / samples of global batch
    k; ``uneven``: whether ranks have unequal numbers of them; ``digest``: tells ranks apart whose samples come in other
    orders ("" where they cannot)."""

    count: int
    batch: Callable[[int], list]
    weight: Callable[[int], float]
    uneven: Callable[[int], bool]
    digest: str = ""


class Passes:
    """Numbers the passes over a loader: by the steps that distributed optimizers have made since ``ht.shard`` (a step
    of each of two counts twice). All ranks count alike, so whatever one of them looks at by itself shifts nothing. Each
    pass that begins after a step has a number of its own, also where the pass before was left early; without a step
    between them two have the same. Passes that begin in another thread than this object, where steps may be made
    meanwhile, are counted by themselves.
    """

    shuffle = True  # whether passes differ
    number = 0  # of the loader
    orders: fingerprint.Orders  # of its data set
    told = False  # whether workers are told what to draw from
    trained = False  # whether steps were made in a pass over this loader

    def __init__(self, seed: int, rank: int, size: int) -> None:
        self.seed, self.rank, self.size = seed, rank, size
        self._offset, self._aside, self._thread = -steps(), 0, threading.get_ident()  # _aside: passes in other threads
        self._whole = [0, 0]  # of which epoch there were how many whole passes without a step

    @property
    def at_home(self) -> bool:
        """Whether this thread made the object; another one may be at other batches on each rank."""
        return threading.get_ident() == self._thread

    @property
    def epoch(self) -> int:
        """The number of a pass that begins now."""
        return self._offset + steps()

    def begin(self) -> int:
        """The number of the pass that begins now, in this thread."""
        if self.at_home:
            return self.epoch
        self._aside += 1
        return -self._aside

    def start(self) -> None:
        """At the beginning of a pass: draws of one of training follow from its number. The first goes on as the script
        seeded it; no pass moves the generators under the feet of another thread."""
        if self.trained and torch.is_grad_enabled() and self.at_home:
            rng.start_pass(mix(self.seed, self.epoch), self.rank)

    def renumber(self, epoch: int) -> None:
        """The number of the next pass; later passes count on from it, by steps. On all ranks."""
        self._offset = epoch - steps()

    def set_epoch(self, epoch: int) -> None:
        """``renumber``, as a script says it."""
        self.renumber(epoch)

    def repeated(self) -> bool:
        """At the end of a whole pass without a step: whether it is the second one of this order."""
        epoch, count = self._whole
        self._whole = [self.epoch, count + 1 if epoch == self.epoch else 1]
        return self._whole[1] == 2

    def state_dict(self) -> dict[str, int]:
        draws = rng.state(self.seed, steps())
        counts = {"epoch": self.epoch, "aside": self._aside, "trained": int(self.trained)}
        return {"seed": self.seed, **counts, "draws": draws}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Also lets this rank's generators go on from there."""
        self.seed, self._aside = state["seed"], state.get("aside", 0)
        self.renumber(state["epoch"])
        self.trained = bool(state.get("trained", 1))
        rng.resume(state.get("draws", mix(self.seed, self.epoch)), self.rank)


class Even:
    """``count`` samples in global batches of ``batch_size`` x ``size``. Every rank has the same number of batches: the
    last global batch is divided as evenly as it can be, and fewer samples than ranks join the batch before. So batches
    of different ranks differ in length by at most one sample, at the end."""

    def __init__(self, count: int, batch_size: int, drop_last: bool, rank: int, size: int) -> None:
        self.count, self.drop_last, self.rank, self.size = count, drop_last, rank, size
        self.whole = whole = batch_size * size
        if count < (whole if drop_last else size):
            what = f"{count} samples are too few for {size} ranks" + (f" of batches of {batch_size}" * drop_last)
            fix = "start fewer ranks" + ", or drop_last=False" * drop_last
            raise DataError(what, where=WHERE, fix=fix, common=True)
        rest = 0 if drop_last else count % whole
        self._batches = count // whole + (rest >= size)

    def __len__(self) -> int:
        return self._batches

    def places(self, k: int) -> np.ndarray:
        """This rank's places of global batch k in the order of samples."""
        return part(self._samples(k), self.whole, self.rank, self.size) + k * self.whole

    def weight(self, k: int) -> float:
        return 1.0 if k + 1 < len(self) else len(self.places(k)) * self.size / self._samples(k)

    def uneven(self, k: int) -> bool:
        return self._samples(k) % self.size > 0

    def _samples(self, k: int) -> int:
        return self.count - k * self.whole if k + 1 == len(self) and not self.drop_last else self.whole


class Share(Passes, data.Sampler):
    """A batch sampler. Global batch k is the same set of samples for every number of ranks.

    Every sample comes once an epoch (with ``drop_last``: those of full global batches). With ``shuffle`` the order is
    a function of (seed, epoch).
    """

    plan: Plan  # of the pass that began last
    count: int | None = None  # samples; None: the order is asked anew for each pass

    def __init__(
        self, count: int, batch_size: int, *, shuffle: bool, drop_last: bool, seed: int, rank: int, size: int
    ) -> None:
        super().__init__(seed, rank, size)
        self.count, self.shuffle = count, shuffle
        self._even = Even(count, batch_size, drop_last, rank, size)
        self.weight = self._even.weight

    def __len__(self) -> int:
        return self.planned(self.epoch).count

    def __iter__(self) -> Iterator[list]:
        epoch = self.begin()
        self.plan = plan = self.planned(epoch)
        if not self.told:
            return (plan.batch(k) for k in range(plan.count))
        key = mix(mix(self.seed, epoch), self.rank)
        return (rng.Told(plan.batch(k), mix(key, k)) for k in range(plan.count))

    def planned(self, epoch: int) -> Plan:
        def batch(k: int) -> list:
            places = self._even.places(k)
            return (permute(places, self._even.count, self.seed, epoch) if self.shuffle else places).tolist()

        return Plan(len(self._even), batch, self.weight, self._even.uneven)


class Joined(Share):
    """The batches of all ranks, as one process takes them."""

    def __init__(self, shares: Sequence[Share], seed: int) -> None:
        Passes.__init__(self, seed, 0, 1)
        self._shares = shares

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        for each in self._shares:
            each.set_epoch(epoch)

    def planned(self, epoch: int) -> Plan:
        plans = [share.planned(epoch) for share in self._shares]

        def batch(k: int) -> list:
            return [i for plan in plans for i in plan.batch(k)]

        return Plan(plans[0].count, batch, lambda k: 1.0, lambda k: False)


def check(loader: data.DataLoader) -> None:
    """Raises ConfigError for a loader whose share cannot be told."""

    def refuse(what: str, fix: str) -> None:
        raise ConfigError(what, where=WHERE, fix=fix)

    if not isinstance(loader, data.DataLoader):
        refuse(f"it takes a torch.utils.data.DataLoader, not a {type(loader).__name__}", "make one of your data set")
    if isinstance(getattr(loader, "share", None), Passes):
        refuse("this loader is sharded already", "call ht.shard once")
    if loader.batch_sampler is None:
        refuse(
            "the loader's batch_size is None, so its data set makes batches", "let it give samples, and a batch_size"
        )
    if any(isinstance(x, _BaseDataLoaderIter) for name, x in vars(loader).items() if name != "_iterator"):
        refuse(f"this {type(loader).__name__} keeps a pass that has begun", "shard a DataLoader that begins anew")
    inner = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if isinstance(inner, data.DistributedSampler):
        refuse("the loader has a DistributedSampler", "take it out, and give the DataLoader shuffle=True")


def check_count(passes: Passes, samples: Any) -> None:
    """Raises DataError where batches were planned of another number of samples: some would never come."""
    if isinstance(passes, Share) and passes.count is not None and passes.count != len(samples):
        what = f"the data set has {len(samples)} samples, and had {passes.count}"
        raise DataError(what, where=WHERE, fix="shard a new DataLoader of it, on all ranks", common=True)


def facts(loader: data.DataLoader) -> dict[str, str]:
    """What ranks must have in common."""
    sized = hasattr(loader.dataset, "__len__")
    return {
        "samples": str(len(loader.dataset)) if sized else type(loader.dataset).__name__,
        "batch_size": str(loader.batch_size),
        "sampler": f"{type(loader.sampler).__name__} in {type(loader.batch_sampler).__name__}",
        "drop_last": str(loader.drop_last),
        **fingerprint.content(loader.dataset),
    }
