"""Text for models that predict the next byte."""

from __future__ import annotations

import hashlib

import numpy as np

from hvd_train.data.column import INPUT, LABEL
from hvd_train.protocol import Field, Fields, Sample


class Text:
    """Samples ``start`` to ``stop`` of a text: sample i is bytes [i T, i T + T), and its labels are the next bytes.

    ``masked``: ``ignore_index`` is one of the bytes.
    """

    CLASSES = 256  # bytes

    def __init__(self, data: np.ndarray, length: int, start: int, stop: int, masked: bool) -> None:
        self._length = length
        label = Field((length,), "int64", classes=self.CLASSES, masked=masked)
        self.sample = Sample({INPUT: Field((length,), "uint8")}, {LABEL: label})
        self._bytes, self._start, self._n = data, start, stop - start
        picked = np.unique(np.linspace(0, self._n - 1, 64).astype(np.int64))
        digest = hashlib.sha256(f"text {length} {start} {stop}".encode() + self._sample(picked).tobytes())
        self.fingerprint = digest.hexdigest()[:16]

    def __len__(self) -> int:
        return self._n

    def _sample(self, indices: np.ndarray) -> np.ndarray:
        """Return the T bytes of each sample (k,) and the byte after them: (k, T + 1) uint8."""
        first = (np.asarray(indices, np.int64) + self._start) * self._length
        return self._bytes[first[:, None] + np.arange(self._length + 1)]

    def fetch(self, indices: np.ndarray) -> tuple[Fields, Fields]:
        numbers = self._sample(indices)
        return {INPUT: numbers[:, :-1].copy()}, {LABEL: numbers[:, 1:].astype(np.int64)}
