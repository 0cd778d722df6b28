"""A rank's share of an ``IterableDataset``: every rank reads the whole stream and takes its part of each global batch.

So a global batch is the same set of samples for every number of ranks, and all ranks reach the end together. With
workers this holds for each worker's stream.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice, repeat
from typing import Any

import numpy as np
import torch
from torch.utils import data

from hvd_train.data.order import mix
from hvd_train.errors import DataError
from hvd_train.script.shared.dataloader import rng
from hvd_train.script.shared.dataloader.last_batch import EvenBatches, counts_of, places_of
from hvd_train.script.shared.dataloader.shares import WHERE, Passes

Part = tuple[tuple[int, ...], int, list]


class Stream(Passes):
    """Passes over a stream. ``ended(batches)`` is called at the end of a pass with steps."""

    def __init__(self, seed: int, rank: int, size: int, ended: Callable[[int], None]) -> None:
        super().__init__(seed, rank, size)
        self.ended = ended
        self.kinds: dict[tuple[int, ...], None] = {}  # the ranks' numbers of samples in the batches of this pass


class WorkerSeeds(data.Sampler):
    """A sampler that sends only the seed of a pass to workers; the stream itself determines the samples."""

    def __init__(self, share: Stream) -> None:
        self._share = share

    def __iter__(self) -> Iterator[list]:
        key = mix(self._share.seed, self._share.epoch)
        return repeat(rng.SeededBatch([], key) if self._share.seeds_workers else [])


class StreamShare(data.IterableDataset):
    """A stream of batches, each (samples per rank, digest of the stream so far, this rank's samples); see shares.Plan.

    A rest of fewer samples than ranks joins the batch before. ``key``: the seed of a pass without workers, the same on
    all ranks (workers get it with their batches).
    """

    OWN = ("key", "_stream", "_drop_last", "_rank", "_size", "_batch_size", "_whole")
    key = 0

    def __init__(self, stream: data.IterableDataset, batch_size: int, drop_last: bool, rank: int, size: int) -> None:
        self._stream, self._drop_last, self._rank, self._size = stream, drop_last, rank, size
        self._batch_size, self._whole = batch_size, batch_size * size

    def batches(self) -> int:
        """Return the number of batches of a pass without workers. Raises TypeError for a stream without a length."""
        return len(EvenBatches(len(self._stream), self._batch_size, self._drop_last, self._rank, self._size, WHERE))

    def __getattr__(self, name: str) -> Any:
        if name == "_stream":
            raise AttributeError(name)
        return getattr(self._stream, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # The script and its ``worker_init_fn`` take this for the stream: they set its epoch, or a worker's part of it.
        if name in self.OWN:
            super().__setattr__(name, value)
        else:
            setattr(self._stream, name, value)

    def __len__(self) -> int:
        return len(self._stream)  # TypeError if it has none

    def __iter__(self) -> Iterator[Part]:
        least, digest = self._whole if self._drop_last else self._size, 0
        # One block is held back: a rest of fewer samples than ranks joins it.
        held: list = []  # it may be the last one
        for block in self._blocks():
            if len(block) < least and (held or self._drop_last):  # the end
                held += [] if self._drop_last else block
                break
            if held:
                yield self._share_of(held, digest)
            # Hash only each block's first sample: all would take as long as reading them.
            held, digest = block, _crc(block[0], digest)
        if 0 < len(held) < least:
            what = f"a stream of {len(held)} samples is too short for {self._size} ranks"
            raise DataError(what, where=WHERE, fix="start fewer ranks or workers", common=True)
        if held:
            yield self._share_of(held, digest)

    def _blocks(self) -> Iterator[list]:
        drawing: Any = rng.CommonDraws(self.key).drawing
        if worker := data.get_worker_info():
            # A worker has its own generators, which are seeded once, not for each block.
            drawing = nullcontext
            rng.start_stream(worker.id)
        with drawing():
            stream = iter(self._stream)
        while True:
            with drawing():
                block = list(islice(stream, self._whole))
            if not block:
                return
            yield block

    def _share_of(self, block: list, digest: int) -> Part:
        places = places_of(len(block), self._whole, self._rank, self._size)
        return counts_of(len(block), self._whole, self._size), digest, [block[i] for i in places]


class Collate:
    """The user's collate function, applied to the samples of a part."""

    def __init__(self, collate: Callable) -> None:
        self._collate = collate

    def __call__(self, batch: Part) -> tuple[tuple[int, ...], int, Any]:
        counts, digest, samples = batch
        return counts, digest, self._collate(samples)


class Batches:
    """A DataLoader's iterator over a ``StreamShare``; ``counts`` and ``digest`` belong to the last batch.

    ``kinds`` gets the counts of all batches.
    """

    def __init__(self, batches: Iterator, kinds: dict[tuple[int, ...], None]) -> None:
        self._batches, self.counts, self.digest, self._kinds = batches, (1,), 0, kinds

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> Any:
        self.counts, self.digest, batch = next(self._batches)
        self._kinds[self.counts] = None
        return batch

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":
            raise AttributeError(name)
        return getattr(self._batches, name)


def _crc(sample: Any, before: int) -> int:
    """Return a CRC of the numbers and texts in a sample, the same in every process."""
    if isinstance(sample, torch.Tensor):
        sample = sample.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    if isinstance(sample, np.ndarray) and sample.dtype != object:
        return zlib.crc32(np.ascontiguousarray(sample).tobytes(), before)
    if isinstance(sample, dict):
        sample = list(sample.items())
    if isinstance(sample, list | tuple):
        for x in sample:
            before = _crc(x, before)
        return before
    return zlib.crc32(repr(sample).encode(), before) if isinstance(sample, str | bytes | int | float) else before
