"""A rank's share of a DataLoader: which samples make its batches, a pure function of (seed, epoch, rank, size)."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils import data
from torch.utils.data.dataloader import _BaseDataLoaderIter

from hvd_train.attach import pt_draws
from hvd_train.data.order import mix, permute, share
from hvd_train.errors import ConfigError, DataError

WHERE = "ht.shard"
OWN = "let each rank draw num_samples / ht.size() of its own, without ht.shard"
SPLIT = "make and split data with a seed, before ht.distribute"
PROBES = 64  # rows of a TensorDataset that are compared between ranks


_steps = 0


def steps() -> int:
    """Steps that distributed optimizers have made in this process: the same number on all ranks, at the same place of
    the script."""
    return _steps


def stepped() -> None:
    global _steps
    _steps += 1


class Share(data.Sampler):
    """A batch sampler. Global batch k is the same set of samples for every number of ranks.

    Every sample comes once an epoch (with ``drop_last``: those of full global batches), and every rank has the same
    number of batches: the last global batch is divided as evenly as it can be, and fewer samples than ranks join the
    batch before. So batches of different ranks differ in length by at most one sample, at the end of an epoch.

    With ``shuffle`` the order is a function of (seed, epoch), where the epoch's number is that of the steps which
    distributed optimizers have made since ``ht.shard`` (a step of each of two counts twice). All ranks share it, so
    whatever one of them looks at by itself shifts nothing. Each pass that begins after a step has an order of its own,
    also where the pass before was left early; without a step between them two have the same order. Passes that begin
    in another thread than this object, where steps may be made meanwhile, are counted by themselves.
    """

    def __init__(
        self, count: int, batch_size: int, *, shuffle: bool, drop_last: bool, seed: int, rank: int, size: int
    ) -> None:
        self.count, self.batch_size, self.shuffle, self.drop_last = count, batch_size, shuffle, drop_last
        self.seed, self.rank, self.size = seed, rank, size
        self._offset, self._aside, self._thread = -steps(), 0, threading.get_ident()  # _aside: passes in other threads
        self._whole = [0, 0]  # of which epoch there were how many whole passes without a step
        whole = batch_size * size
        if count < (whole if drop_last else size):
            what = f"{count} samples are too few for {size} ranks" + (f" of batches of {batch_size}" * drop_last)
            raise DataError(what, where=WHERE, fix="start fewer ranks" + ", or drop_last=False" * drop_last)
        rest = 0 if drop_last else count % whole
        self._batches = count // whole + (rest >= size)

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self.epoch
        if threading.get_ident() != self._thread:
            self._aside += 1
            epoch = -self._aside
        return (self._indices(k, epoch).tolist() for k in range(len(self)))

    @property
    def epoch(self) -> int:
        """The number of the order that a pass has which begins now."""
        return self._offset + steps()

    def set_epoch(self, epoch: int) -> None:
        """The number of the next pass' order; later passes count on from it, by steps. On all ranks."""
        self._offset = epoch - steps()

    def weight(self, k: int) -> float:
        """Samples of this rank's batch k times ranks / samples of global batch k."""
        if k + 1 < len(self):
            return 1.0
        start, stop = self._bounds(k)
        return len(self._places(k)) * self.size / (stop - start)

    def repeated(self) -> bool:
        """At the end of a whole pass without a step: whether it is the second one of this order."""
        epoch, count = self._whole
        self._whole = [self.epoch, count + 1 if epoch == self.epoch else 1]
        return self._whole[1] == 2

    def _bounds(self, k: int) -> tuple[int, int]:
        """Places of global batch k in the order of samples."""
        whole = self.batch_size * self.size
        return k * whole, self.count if k + 1 == len(self) and not self.drop_last else (k + 1) * whole

    def _places(self, k: int) -> np.ndarray:
        whole, (start, stop) = self.batch_size * self.size, self._bounds(k)
        places = np.arange(*share(min(stop - start, whole), self.size, self.rank)) + start
        if self.rank < stop - start - whole:
            places = np.append(places, start + whole + self.rank)  # fewer samples are left than ranks
        return places

    def _indices(self, k: int, epoch: int) -> np.ndarray:
        return permute(self._places(k), self.count, self.seed, epoch) if self.shuffle else self._places(k)

    def state_dict(self) -> dict[str, int]:
        draws = pt_draws.state(self.seed, steps())
        return {"seed": self.seed, "epoch": self.epoch, "aside": self._aside, "draws": draws}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Also lets this rank's generators go on from there."""
        self.seed, self._aside = state["seed"], state.get("aside", 0)
        self.set_epoch(state["epoch"])
        pt_draws.resume(state.get("draws", mix(self.seed, self.epoch)), self.rank)


def check(loader: data.DataLoader) -> None:
    """Raises ConfigError for a loader whose share cannot be told."""

    def refuse(what: str, fix: str) -> None:
        raise ConfigError(what, where=WHERE, fix=fix)

    if not isinstance(loader, data.DataLoader):
        refuse(f"it takes a torch.utils.data.DataLoader, not a {type(loader).__name__}", "make one of your data set")
    if isinstance(loader.batch_sampler, Share):
        refuse("this loader is sharded already", "call ht.shard once")
    if isinstance(loader.dataset, data.IterableDataset):
        refuse("an IterableDataset has no order to share", "let it read its own part, by ht.rank() and ht.size()")
    if loader.batch_size is None:
        refuse("the loader has a batch sampler of its own, or no batches", "give the DataLoader a batch_size")
    if type(loader.batch_sampler) is not data.BatchSampler:
        refuse(f"the loader has a {type(loader.batch_sampler).__name__}", "give the DataLoader a batch_size alone")
    if any(isinstance(x, _BaseDataLoaderIter) for name, x in vars(loader).items() if name != "_iterator"):
        refuse(f"this {type(loader).__name__} keeps a pass that has begun", "shard a DataLoader that begins anew")
    kind = type(loader.sampler)
    if kind is data.DistributedSampler:
        refuse("the loader has a DistributedSampler", "take it out, and give the DataLoader shuffle=True")
    if kind not in (data.RandomSampler, data.SequentialSampler):
        fix = "use shuffle=True or False, and a Subset for a part of the data"
        refuse(f"the loader has a {kind.__name__}", OWN if kind is data.WeightedRandomSampler else fix)
    if kind is data.RandomSampler and loader.sampler.replacement:
        refuse("the loader draws with replacement", OWN)
    if kind is data.RandomSampler and loader.sampler.num_samples != len(loader.dataset):
        refuse("the loader draws a part of the samples", "use shuffle=True")


def facts(loader: data.DataLoader) -> dict[str, str]:
    """What ranks must have in common."""
    return {
        "samples": str(len(loader.dataset)),
        "batch_size": str(loader.batch_size),
        "shuffle": str(isinstance(loader.sampler, data.RandomSampler)),
        "drop_last": str(loader.drop_last),
        **_content(loader.dataset, "data"),
    }


def _content(samples: Any, name: str) -> dict[str, str]:
    """Hashes of what can be told without a call of the user's code: data drawn or split without a seed differ."""
    if isinstance(samples, data.ConcatDataset):
        return {k: v for i, x in enumerate(samples.datasets) for k, v in _content(x, f"{name}[{i}]").items()}
    if isinstance(samples, data.Subset):
        chosen = hashlib.sha256(np.asarray(samples.indices).astype(np.int64).tobytes()).hexdigest()[:12]
        return {f"{name}: indices": f"{chosen}; {SPLIT}", **_content(samples.dataset, name)}
    if type(samples) is data.TensorDataset and len(samples):
        rows = range(0, len(samples), -(-len(samples) // PROBES))
        parts = [x[rows].detach().cpu().contiguous() for x in samples.tensors]
        total = b"".join(x.reshape(-1).view(torch.uint8).numpy().tobytes() for x in parts)
        return {f"{name}: tensors": f"{hashlib.sha256(total).hexdigest()[:12]}; {SPLIT}"}
    return {}
