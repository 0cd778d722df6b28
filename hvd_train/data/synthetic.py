"""Random samples, computed on access, for timing."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np

from hvd_train.data.column import INPUT, LABEL
from hvd_train.data.order import U64, mix, stream
from hvd_train.protocol import Field, Fields, Sample

NOISE = 0x5EED  # key of the synthetic noise


class Synthetic:
    """Samples that are a pure function of their index: the mean of a class pattern and noise.

    ``start``: the index of the first sample in the endless sequence, so that training and validation do not overlap.
    ``masked``: one of the classes is ``ignore_index``.
    """

    def __init__(self, n: int, shape: Sequence[int], num_classes: int, start: int = 0, masked: bool = False) -> None:
        self._shape, self._classes, self._n, self._start = tuple(shape), num_classes, n, start
        label = Field((), "int64", classes=num_classes, masked=masked)
        self.sample = Sample({INPUT: Field(self._shape, "float32")}, {LABEL: label})
        self._size = math.prod(self._shape)
        self._patterns = 0.5 * _noise(mix(NOISE, 1), np.arange(num_classes, dtype=U64), self._size)
        text = f"synthetic {n} {self._shape} {num_classes} {start}"
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return self._n

    def fetch(self, indices: np.ndarray) -> tuple[Fields, Fields]:
        numbers = np.asarray(indices, np.int64) + self._start
        labels = numbers % self._classes
        inputs = _noise(mix(NOISE, 2), numbers.astype(U64), self._size)
        inputs *= np.float32(0.5)
        inputs += self._patterns[labels]
        return {INPUT: inputs.reshape(-1, *self._shape)}, {LABEL: labels}


def _noise(key: int, numbers: np.ndarray, size: int) -> np.ndarray:
    """Make noise (k, size) float32 in [0, 1] for sample numbers (k,). Each byte of a 64-bit hash is one value."""
    words = -(-size // 8)  # hashes of a sample
    bits = stream(key, numbers[:, None] * U64(words) + np.arange(words, dtype=U64)).astype("<u8")
    return np.divide(bits.view(np.uint8)[:, :size], np.float32(255), dtype=np.float32)
