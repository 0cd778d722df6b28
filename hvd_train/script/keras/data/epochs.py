"""The steps of an epoch as a pure function of (epoch, step)."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hvd_train.data.order import permute


class Epochs(keras.utils.PyDataset):
    """Steps of an epoch as a pure function of (epoch, step); ``begin`` sets the epoch.

    ``per_epoch``: ``steps_per_epoch``, rounded to whole executions. As in Keras, a pass over the data may span several
    epochs. If the data end, so does the epoch, even if it is short, and the next epoch begins another pass.
    """

    def __init__(self, steps: int, per_epoch: int | None, seed: int | None, **workers: Any) -> None:
        super().__init__(**workers)
        self.steps, self._per_epoch, self._seed = steps, min(per_epoch or steps, steps), seed
        self.epoch, self._first = 0, -1

    def begin(self, epoch: int) -> None:
        """Begin an epoch. Passes are counted from the first epoch of this ``fit``."""
        self.epoch, self._first = epoch, epoch if self._first < 0 else self._first

    def _place(self) -> tuple[int, int]:
        """Return (the epoch in which the current pass began, the number of its steps before this epoch)."""
        # A pass lasts ceil(steps / per_epoch) epochs.
        before = (self.epoch - max(self._first, 0)) % -(-self.steps // self._per_epoch)
        return self.epoch - before, before * self._per_epoch

    def __len__(self) -> int:
        return min(self._per_epoch, self.steps - self._place()[1])

    def __getitem__(self, index: int) -> Any:
        turn, before = self._place()
        return self.part(turn, before + index)

    def part(self, turn: int, step: int) -> Any:
        """Return this rank's part of a step of the pass that began in epoch ``turn``."""
        raise NotImplementedError

    def order(self, places: np.ndarray, n: int, turn: int) -> np.ndarray:
        return places if self._seed is None else permute(places, n, self._seed, turn)
