"""Tensors, their names and shapes, and trees of arrays."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Tensor = Any
Handle = Any
Tree = dict[str, np.ndarray]  # flat: key -> array

# Words in the names of biases and normalization scales, in both frameworks.
VECTORS = frozenset({"bias", "beta", "gamma", "scale"})


def is_vector(name: str, shape: Sequence[int]) -> bool:
    """Return whether a tensor is a bias or a scale, however many axes it has.

    The bias of Keras' GRU is (2, 3 h), that of its attention (heads, size).
    """
    return len(shape) < 2 or not VECTORS.isdisjoint(re.split("[./]", name)[-1].split("_"))


@dataclass(frozen=True)
class TensorSpec:
    """A trainable tensor: canonical name, shape in the framework's axis order, NumPy dtype name.

    ``place``: the index of its device among those of the rank.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    place: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_vector(self) -> bool:
        return is_vector(self.name, self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * np.dtype(self.dtype).itemsize
