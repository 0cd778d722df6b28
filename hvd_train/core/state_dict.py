"""State dicts (name: array) as bytes (safetensors: nothing is ever unpickled) and as one hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping

import numpy as np

from hvd_train.protocol import Communicator, Tree

PIECE_BYTES = 32 << 20


def pack(tree: Mapping[str, np.ndarray]) -> bytes:
    from safetensors.numpy import save

    return save({key: np.asarray(array, order="C") for key, array in tree.items()})


def unpack(data: bytes) -> Tree:
    """Raises safetensors.SafetensorError for bytes that ``pack`` did not make."""
    from safetensors.numpy import load

    return load(data)


def broadcast(communicator: Communicator, tree: Mapping[str, np.ndarray]) -> Iterator[Tree]:
    """Rank 0's tree on all ranks, in pieces of ``PIECE_BYTES`` or one array: what a rank must hold beside its own."""
    pieces: list[list[str]] = []
    room = 0
    for key, array in tree.items() if communicator.rank == 0 else ():
        if not pieces or array.nbytes > room:
            pieces.append([])
            room = PIECE_BYTES
        pieces[-1].append(key)
        room -= array.nbytes
    count = json.loads(communicator.broadcast_bytes(json.dumps(len(pieces)).encode()))
    for k in range(count):
        own = pack({key: tree[key] for key in pieces[k]}) if communicator.rank == 0 else b""
        yield unpack(communicator.broadcast_bytes(own))


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
