"""Tensors, their names and shapes, and trees of arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

Tensor = Any
Handle = Any
Tree = dict[str, np.ndarray]  # flat: key -> array


@dataclass(frozen=True)
class TensorSpec:
    """A trainable tensor: canonical name, shape in the framework's axis order, NumPy dtype name.

    ``place``: the number of the device that it lies on, among those of the rank.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    place: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * np.dtype(self.dtype).itemsize
