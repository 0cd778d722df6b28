"""Initial weights of the built-in models: one NumPy rule, so that every framework starts from the same values."""

from __future__ import annotations

import hashlib
import math

import numpy as np


def first_weight(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return the initial values of a weight, float64 in canonical axis order, for its canonical name and shape.

    Kernels are normal with variance 2 / fan-in (He et al. 2015, "Delving Deep into Rectifiers"), with the output axis
    last; biases are 0; scales are 1; embeddings are normal with deviation 0.02. Each tensor has its own generator,
    seeded by (seed, name), so that adding a layer changes no other.
    """
    kind = name.rpartition(".")[2]
    if kind == "bias":
        return np.zeros(shape)
    if kind == "scale":
        return np.ones(shape)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    normal = np.random.default_rng(np.frombuffer(digest, np.uint32)).standard_normal(shape)
    normal *= 0.02 if kind == "embedding" else math.sqrt(2.0 / math.prod(shape[:-1]))
    return normal
