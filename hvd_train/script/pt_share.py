"""A rank's share of a DataLoader: which samples make its batches, a pure function of (seed, epoch, rank, size)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch.utils import data

from hvd_train.data.order import mix, permute, share
from hvd_train.errors import ConfigError, DataError

WHERE = "ht.shard"


class Share(data.Sampler):
    """A batch sampler. Global batch k is the same set of samples for every number of ranks.

    Every sample comes once an epoch (with ``drop_last``: those of full global batches), and every rank has the same
    number of batches: the last global batch is divided as evenly as it can be, and fewer samples than ranks join the
    batch before. So batches of different ranks differ in length by at most one sample, at the end of an epoch.

    With ``shuffle`` each ``iter`` is the next epoch, and sets torch's generator from (seed, epoch, rank): dropout and
    augmentation differ between ranks, and are the same again in a run that resumes at this epoch.
    """

    def __init__(
        self, count: int, batch_size: int, *, shuffle: bool, drop_last: bool, seed: int, rank: int, size: int
    ) -> None:
        self.count, self.batch_size, self.shuffle, self.drop_last = count, batch_size, shuffle, drop_last
        self.seed, self.rank, self.size, self.epoch = seed, rank, size, 0
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
        if self.shuffle:
            self.epoch += 1
            torch.manual_seed(mix(mix(self.seed, epoch), self.rank))
        return (self._indices(k, epoch).tolist() for k in range(len(self)))

    def _indices(self, k: int, epoch: int) -> np.ndarray:
        whole = self.batch_size * self.size
        left = self.count - k * whole
        places = np.arange(*share(min(left, whole), self.size, self.rank)) + k * whole
        if not self.drop_last and whole < left < whole + self.size and self.rank < left - whole:
            places = np.append(places, (k + 1) * whole + self.rank)  # fewer samples are left than ranks
        return permute(places, self.count, self.seed, epoch) if self.shuffle else places

    def state_dict(self) -> dict[str, int]:
        return {"seed": self.seed, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seed, self.epoch = state["seed"], state["epoch"]


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
    kind = type(loader.sampler)
    if kind is data.DistributedSampler:
        refuse("the loader has a DistributedSampler", "take it out, and give the DataLoader shuffle=True")
    if kind not in (data.RandomSampler, data.SequentialSampler):
        refuse(f"the loader has a {kind.__name__}", "use shuffle=True or False, and a Subset for a part of the data")
    if kind is data.RandomSampler and (loader.sampler.replacement or loader.sampler.num_samples != len(loader.dataset)):
        refuse("the loader draws with replacement, or a part of the samples", "use shuffle=True")


def facts(loader: data.DataLoader) -> dict[str, str]:
    """What ranks must have in common."""
    return {
        "samples": str(len(loader.dataset)),
        "batch_size": str(loader.batch_size),
        "shuffle": str(isinstance(loader.sampler, data.RandomSampler)),
        "drop_last": str(loader.drop_last),
    }


def shared(loader: data.DataLoader, seed: int, rank: int, size: int) -> data.DataLoader:
    """The same loader over this rank's share."""
    shuffle = isinstance(loader.sampler, data.RandomSampler)
    options = dict(shuffle=shuffle, drop_last=loader.drop_last, seed=seed, rank=rank, size=size)
    return data.DataLoader(
        loader.dataset,
        batch_sampler=Share(len(loader.dataset), loader.batch_size, **options),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        in_order=loader.in_order,
    )
