"""Trees of arrays as bytes (safetensors: nothing is ever unpickled) and as one hash."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from hvd_train.protocol import Tree


def pack(tree: Mapping[str, np.ndarray]) -> bytes:
    from safetensors.numpy import save

    return save({key: np.asarray(array, order="C") for key, array in tree.items()})


def unpack(data: bytes) -> Tree:
    """Raises safetensors.SafetensorError for bytes that ``pack`` did not make."""
    from safetensors.numpy import load

    return load(data)


def weights_sha256(tree: Mapping[str, np.ndarray]) -> str:
    """SHA-256 over name, type, shape and bytes of weights and running statistics, in name order."""
    total = hashlib.sha256()
    for key, array in sorted(tree.items()):
        if not key.startswith("slots/"):
            total.update(f"{key} {array.dtype} {array.shape} ".encode() + np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


def without_slots(tree: Mapping[str, np.ndarray]) -> Tree:
    """Weights and running statistics: what a model is, less its optimizer."""
    return {key: array for key, array in tree.items() if not key.startswith("slots/")}
