"""A PyDataset, divided among ranks: N of its batches per step, one for each rank."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hvd_train.data.order import share
from hvd_train.errors import ConfigError
from hvd_train.script.keras.data.epochs import Epochs
from hvd_train.script.keras.data.leaves import concatenated, digest, length, take
from hvd_train.script.keras.rng import Draws


class SharedHooks:
    """Calls the epoch hooks of the user's PyDataset ``_data``. They draw the same random numbers on all ranks."""

    _data: Any
    _draws: Draws

    def on_epoch_begin(self) -> None:
        with self._draws.common():
            self._data.on_epoch_begin()

    def on_epoch_end(self) -> None:
        with self._draws.common():
            self._data.on_epoch_end()


class SameOrder(SharedHooks):
    """Hooks of a PyDataset that we divide: its batches must be the same on all ranks."""

    def on_epoch_end(self) -> None:
        """Let the data set shuffle itself; Keras calls this before the first epoch, too.

        Raises ConfigError on all ranks if their orders differ afterwards: the data set has a generator of its own that
        we cannot seed.
        """
        super().on_epoch_end()
        # The comparison reads batches, which may draw random numbers: restore the generators.
        with self._draws.common(keep=True):
            batches = digest([self._data[i] for i in sorted({0, self._data.num_batches - 1})])
        if len(set(self._draws.world.allgather_bytes(batches.encode()))) > 1:
            what = f"{type(self._data).__name__} differs between ranks: it shuffles with a generator of its own"
            fix = "draw from random or numpy.random, equal on all ranks in on_epoch_end, or seed your generator"
            raise ConfigError(what, where="model.fit, on_epoch_end", fix=fix, common=True)


class SequenceParts(SameOrder, Epochs):
    """A PyDataset of which each step takes N batches, one for each rank.

    The remainder is divided by samples. The PyDataset's last batch, which may be short, remains the last.
    """

    def __init__(self, data: Any, draws: Draws, per_epoch: int | None, seed: int | None, together: int = 1) -> None:
        self._data, self._draws, self._world, self._n = data, draws, draws.world, data.num_batches
        self._size = self._world.size * together
        self._ranks = range(together) if together > 1 else [self._world.rank]
        # Batches after the last full step. Count their samples: the last batch may be short.
        tail = self._n % self._size
        left = sum(length(data[i]) for i in range(self._n - tail, self._n)) if tail else 0
        workers = {
            "workers": data.workers,
            "use_multiprocessing": data.use_multiprocessing,
            "max_queue_size": data.max_queue_size,
        }
        super().__init__(self._n // self._size + (left >= self._size), per_epoch, seed, **workers)

    def part(self, turn: int, step: int) -> Any:
        parts = [self._part(rank, turn, step) for rank in self._ranks]
        return parts[0] if len(parts) == 1 else keras.tree.map_structure(concatenated, *parts)

    def _part(self, rank: int, turn: int, step: int) -> Any:
        low = step * self._size
        places = np.arange(low, min(low + self._size, self._n))
        # The last batch keeps its position: elsewhere, a short one would shorten a full step.
        inner = places[places < self._n - 1]
        places[: len(inner)] = self.order(inner, self._n - 1, turn) if len(inner) else inner
        if len(places) == self._size:
            return self._data[int(places[rank])]
        batches = [self._data[int(i)] for i in places]
        rest = keras.tree.map_structure(concatenated, *batches)
        start, stop = share(length(rest), self._size, rank)
        return take(rest, slice(start, stop))


class LocalSequence(SharedHooks, keras.utils.PyDataset):
    """A PyDataset that the user has divided. If it shuffles before it takes its part, all ranks have one order."""

    def __init__(self, data: Any, draws: Draws) -> None:
        super().__init__(data.workers, data.use_multiprocessing, data.max_queue_size)
        self._data, self._draws = data, draws

    @property
    def num_batches(self) -> int | None:
        return self._data.num_batches

    def __getitem__(self, index: int) -> Any:
        return self._data[index]


class SequenceRange(SameOrder, keras.utils.PyDataset):
    """Batches [start, stop) of another PyDataset, which may choose others after each evaluation."""

    def __init__(self, data: Any, draws: Draws, start: int, stop: int) -> None:
        super().__init__(data.workers, data.use_multiprocessing, data.max_queue_size)
        self._data, self._draws, self._start, self._stop = data, draws, start, stop

    def on_epoch_end(self) -> None:
        # Comparing orders reads batches, and few data sets change after an evaluation.
        if type(self._data).on_epoch_end is not keras.utils.PyDataset.on_epoch_end:
            super().on_epoch_end()

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, index: int) -> Any:
        return self._data[self._start + index]
