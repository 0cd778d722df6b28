"""Sharded loaders that several tests use."""

from __future__ import annotations

from torch.utils import data

from hvd_train.script.shared.dataloader import passes

SEVEN_TO_SIX = 7 * 2 / 13  # weight of a rank that has 7 of the last 13 samples


class Doubled(data.DataLoader):
    """A class of the user's own."""

    def __init__(self, *args, factor=2, **options):
        super().__init__(*args, **options)
        self.factor = factor

    def __iter__(self):
        for batch in super().__iter__():
            yield batch * self.factor


def uneven(**options) -> data.DataLoader:
    """Rank 0's batches of two ranks: 10 10 7."""
    return passes.shared(data.DataLoader(range(53), batch_size=10, **options), 0, 0, 2)


def world_of(make, size: int) -> list[data.DataLoader]:
    return [passes.shared(make(), 5, rank, size) for rank in range(size)]
