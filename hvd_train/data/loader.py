"""Make padded batches from a source. Each rank prefetches its part of every global batch in threads."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from hvd_train.data.order import permute, share, steps
from hvd_train.data.wrapper import drawn
from hvd_train.errors import DataError
from hvd_train.protocol import Batch, Source

T = TypeVar("T")
AHEAD = 6  # items fetched ahead, at most
BURST = 4  # items fetched each time the thread wakes
# Positions of this rank permuted at once: a call takes about 0.2 ms, even for few.
CHUNK = 4096


@dataclass(frozen=True)
class Step:
    """The batches of one optimizer step: the micro-batches of ``rank``.

    count: samples of the global batch; consumed: samples of the epoch used after this step, over all ranks.
    """

    micro_batches: tuple[Batch, ...]
    count: int
    consumed: int
    rank: int = 0

    @property
    def local_count(self) -> int:
        """Samples of this rank."""
        return sum(batch.count for batch in self.micro_batches)


class Loader:
    """Splits the epochs of a source into steps.

    Global batch k of an epoch that resumes at ``consumed`` holds the positions
    [consumed + k B, consumed + (k+1) B), cut off at n, for every world size. Micro-batches are contiguous parts of it,
    and ranks take contiguous parts of those. So a micro-batch over all ranks is the same set for every world size,
    which synchronized batch normalization needs. Each part is padded with weight 0 to ``length`` rows, so shapes never
    change and an empty part is still a batch. Where the source makes the batches (``data.lengths.max_tokens``), they
    are the same for every world size too, and parts are padded to the rows of the largest batch of their bucket.

    ``workers`` threads fetch a step each: libraries that decode images release the GIL.
    """

    def __init__(
        self,
        source: Source,
        *,
        global_batch: int,
        accumulate: int = 1,
        rank: int = 0,
        size: int = 1,
        seed: int = 0,
        workers: int = 1,
    ) -> None:
        if min(global_batch, accumulate, size, workers) < 1 or not 0 <= rank < size:
            raise ValueError(f"no loader: batch {global_batch}, accumulate {accumulate}, rank {rank} of {size}")
        if len(source) < size:
            what = f"a data set of {len(source)} samples for {size} ranks: each needs at least one"
            raise DataError(what, fix="use fewer ranks or more data")
        self.source, self.global_batch, self.accumulate = source, global_batch, accumulate
        self.rank, self.size, self.seed, self.workers = rank, size, seed, workers
        # Samples of a micro-batch over all ranks, and on one rank. The first parts are the longest.
        self.together = share(global_batch, accumulate, 0)[1]
        self.length = share(self.together, size, 0)[1]
        self.by_tokens = getattr(source, "by_tokens", False)
        self._batches = source.batches if self.by_tokens else None  # type: ignore[attr-defined]
        self.steps_per_epoch = steps(len(source), 0, global_batch)
        if self._batches:
            self.steps_per_epoch = len(self._batches(seed, 0).ends)
        self._chunk: tuple[int, int, np.ndarray] = (-1, 0, np.zeros(0, np.int64))  # the cache of ``_permuted``

    def place(self, epoch: int, consumed: int) -> int:
        """Return which step of an epoch (from 0) comes next when ``consumed`` of its samples are used."""
        if self._batches:
            return int(np.searchsorted(self._batches(self.seed, epoch).ends, consumed, "right"))
        return consumed // self.global_batch

    def steps_done(self, epoch: int, consumed: int) -> int:
        """Return the number of steps of an epoch that took ``consumed`` samples."""
        return self.place(epoch, consumed) if self._batches else -(-consumed // self.global_batch)

    def samples(self, epoch: int, steps: int) -> int:
        """Return the number of samples in the first ``steps`` of an epoch."""
        if self._batches:
            return int(self._batches(self.seed, epoch).ends[:steps].max(initial=0))
        return min(len(self.source), steps * self.global_batch)

    def epoch(self, epoch: int, consumed: int = 0) -> Generator[Step, None, None]:
        """Yield the steps of an epoch after its first ``consumed`` samples; close the generator to leave early."""
        if not 0 <= consumed <= len(self.source):
            raise ValueError(f"{consumed} samples consumed of {len(self.source)}")
        return self._made(self._steps(epoch, consumed))

    def part(self, epoch: int, start: int, rank: int) -> Step:
        """Fetch the part of ``rank`` of the global batch that begins at ``start``; thread-safe, for any rank."""
        stop = min(start + self.global_batch, len(self.source))
        low, indices = self._permuted(epoch, start, stop)
        parts = [indices[self._micro(start, stop, k, rank) - low] for k in range(self.accumulate)]
        return self._step(parts, epoch, start, stop, rank)

    def _permuted(self, epoch: int, start: int, stop: int) -> tuple[int, np.ndarray]:
        """Return (first position, sample indices) of a chunk of the epoch that includes positions [start, stop)."""
        known, low, indices = self._chunk
        if known != epoch or start < low or stop > low + len(indices):
            together = max(1, CHUNK // self.global_batch) * self.global_batch
            low, indices = start, self._order(np.arange(start, min(start + together, len(self.source))), epoch)
            self._chunk = epoch, low, indices
        return low, indices

    def _order(self, positions: np.ndarray, epoch: int) -> np.ndarray:
        """Map positions in an epoch to indices of samples."""
        if getattr(self.source, "ordered", False):  # a stream is not shuffled
            return positions
        order = getattr(self.source, "order", None)
        n = len(self.source)
        return order(positions, self.seed, epoch) if order else permute(positions, n, self.seed, epoch)

    def evaluation(self, whole: bool = False) -> Generator[Batch, None, None]:
        """Yield every sample of the source on exactly one rank, in order, ``length`` rows a batch.

        A batch over all ranks has ``together`` samples like a training micro-batch, the same ones for every world
        size. All ranks yield the same number of batches; a part may be all padding. ``whole``: keep samples of
        variable length at max_length, so that all batches have the same shape.
        """
        return self._made(self._evaluation(whole))

    def evaluated(self, batches: int) -> int:
        """Return the number of samples in the first ``batches`` of ``evaluation``, over all ranks."""
        return min(batches * self.together, len(self.source))

    def _made(self, works: Iterator[Callable[[], T]]) -> Generator[T, None, None]:
        return _ahead(work() for work in works) if self.workers == 1 else _pooled(works, self.workers)

    def _steps(self, epoch: int, consumed: int) -> Iterator[Callable[[], Step]]:
        """Yield for each step a function that fetches it, in any thread."""
        each = max(1, CHUNK // (self.length * self.accumulate))  # steps permuted at once
        globally = self._global_batches(epoch, consumed)
        while bounds := [*itertools.islice(globally, each)]:
            local = [
                self._micro(start, stop, k, self.rank) for start, stop, _ in bounds for k in range(self.accumulate)
            ]
            ends = np.cumsum([len(positions) for positions in local])
            indices = iter(np.split(self._order(np.concatenate(local), epoch), ends))
            for start, stop, full in bounds:
                parts = [*itertools.islice(indices, self.accumulate)]
                yield partial(self._step, parts, epoch, start, stop, self.rank, full)

    def _global_batches(self, epoch: int, consumed: int) -> Iterator[tuple[int, int, int | None]]:
        """Yield a tuple (start, stop, full) for each global batch of an epoch.

        The batch has the samples from ``start`` up to ``stop`` in the epoch's order. ``full``: how many samples the
        largest batch of its bucket has; None if all batches have as many.
        """
        n, batch = len(self.source), self.global_batch
        if not self._batches:
            yield from ((start, min(start + batch, n), None) for start in range(consumed, n, batch))
            return
        batches, start = self._batches(self.seed, epoch), consumed
        first = self.place(epoch, consumed)
        for stop, full in zip(batches.ends[first:].tolist(), batches.full[first:].tolist(), strict=True):
            yield start, stop, full
            start = stop

    def _step(
        self, parts: list[np.ndarray], epoch: int, start: int, stop: int, rank: int, full: int | None = None
    ) -> Step:
        rows = self._rows(full)
        lengths: list[int | None] = [None] * len(parts)
        if cut_length := getattr(self.source, "cut_length", None):
            for k in range(len(parts)):
                a, b = self._bounds(start, stop, k)
                lengths[k] = cut_length(self._order(np.arange(a, b), epoch), self.seed, epoch)
        batches = (self._batch(part, epoch, length, rows) for part, length in zip(parts, lengths, strict=True))
        return Step(tuple(batches), stop - start, stop, rank)

    def _rows(self, batch: int | None) -> int:
        """Return how many rows a rank gets in a micro-batch, if the global batch has ``batch`` samples."""
        return self.length if batch is None else share(share(batch, self.accumulate, 0)[1], self.size, 0)[1]

    def _bounds(self, start: int, stop: int, number: int) -> tuple[int, int]:
        """Return the bounds of micro-batch ``number`` over all ranks, within the global batch [start, stop)."""
        a, b = share(stop - start, self.accumulate, number)
        return start + a, start + b

    def _micro(self, start: int, stop: int, number: int, rank: int) -> np.ndarray:
        """Return the positions of a rank in micro-batch ``number`` of the global batch [start, stop)."""
        return self._local(*self._bounds(start, stop, number), rank)

    def _evaluation(self, whole: bool = False) -> Iterator[Callable[[], Batch]]:
        n, together = len(self.source), self.together
        cut_length = None if whole else getattr(self.source, "cut_length", None)
        for start in range(0, n, together):
            stop = min(start + together, n)
            length = cut_length(np.arange(start, stop), self.seed, None) if cut_length else None
            yield partial(self._batch, self._local(start, stop, self.rank), None, length)

    def _local(self, start: int, stop: int, rank: int) -> np.ndarray:
        """Return the positions of a rank within [start, stop)."""
        a, b = share(stop - start, self.size, rank)
        return np.arange(start + a, start + b)

    def _batch(
        self, indices: np.ndarray, epoch: int | None = None, length: int | None = None, rows: int | None = None
    ) -> Batch:
        """Fetch and pad a batch; ``epoch``: the training epoch, for random transforms; None: an evaluation.

        ``length``: the length to which samples of variable length are padded; ``rows``: samples and padding (None:
        ``self.length``).
        """
        count, rows = len(indices), rows or self.length
        weights = np.zeros(rows, np.float32)
        weights[:count] = 1
        # An empty part gets its shapes from sample 0.
        asked = indices if count else np.zeros(1, np.int64)
        # {name: (count, ...)} each.
        inputs, labels = self.source.fetch(asked) if epoch is None else drawn(self.source, asked, self.seed, epoch)
        if length is not None:
            inputs, labels = self.source.shortened((inputs, labels), length)  # type: ignore[attr-defined]
        if count < rows:
            inputs, labels = ({k: _padded(x, rows) for k, x in each.items()} for each in (inputs, labels))
        return Batch(inputs, labels, weights, indices)


def _padded(x: np.ndarray, rows: int) -> np.ndarray:
    """Pad an array (samples, ...) to (rows, ...) with copies of its first sample."""
    # Zeros could become NaN in the model (log 0), and weight 0 times NaN is NaN.
    out = np.empty((rows, *x.shape[1:]), x.dtype)
    out[: len(x)], out[len(x) :] = x, x[0]
    return out


def _ahead(items: Iterator[T]) -> Generator[T, None, None]:
    """Iterate over ``items`` in a thread, at most AHEAD items ahead; raise its exception in the consumer.

    The thread starts with the first ``next``, and ends when the generator ends, is closed or is garbage collected.
    """
    # It works in bursts: woken for each item, it would take the GIL from the training step that has just begun.
    ready: deque[T] = deque()
    changed = threading.Condition()
    # [None]: no more items; [error]: the consumer raises it.
    ended: list[BaseException | None] = []
    left = False

    def work() -> None:
        error = None
        try:
            for item in items:
                with changed:
                    ready.append(item)
                    changed.notify()
                    if len(ready) >= AHEAD:
                        changed.wait_for(lambda: left or len(ready) <= AHEAD - BURST)
                    if left:
                        return
        except BaseException as caught:
            error = caught
        with changed:
            ended.append(error)
            changed.notify()

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            with changed:
                changed.wait_for(lambda: ready or ended)
                if not ready:
                    if ended[0] is not None:
                        raise ended[0]
                    return
                item = ready.popleft()
                if len(ready) == AHEAD - BURST:
                    changed.notify()
            yield item
    finally:
        with changed:
            left = True
            changed.notify()
        thread.join()


def _pooled(works: Iterator[Callable[[], T]], workers: int) -> Generator[T, None, None]:
    """Run the works in several threads and yield their results in order.

    An exception is raised when its result is due. All threads end when the generator ends, is closed or collected.
    """
    pool = ThreadPoolExecutor(workers, "prefetch")
    try:
        begun = deque(pool.submit(work) for work in itertools.islice(works, max(AHEAD, 2 * workers)))
        while begun:
            item = begun.popleft().result()
            begun.extend(pool.submit(work) for work in itertools.islice(works, 1))
            yield item
    finally:
        pool.shutdown(cancel_futures=True)
