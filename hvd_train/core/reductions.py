"""Sums and means over ranks of NumPy arrays, with the same bits on every rank.

``differing`` and ``mean`` average running statistics and the weights of local training. Values that are equal on all
ranks keep their bits: equal arrays are not sent, and in arrays that differ, equal entries keep their bits (except the
last bit of numbers below 1e-37 in 32 bits, 1e-307 in 64). Values are divided before they are added, so large numbers do
not overflow.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from hvd_train.checkpoint.serialize import PIECE_BYTES
from hvd_train.errors import CommunicationError, ConfigError
from hvd_train.protocol import Communicator, Ops, Tree

DIGEST = 16  # bytes of an array's hash; a collision has a chance of 1 in 10^38


def differing(arrays: Iterable[tuple[str, np.ndarray]], communicator: Communicator) -> list[str]:
    """Return the names of float arrays whose bits differ between ranks, reading one array at a time.

    All ranks pass the same names, shapes and dtypes in the same order. Each rank sends 16 bytes per array.
    """
    names, digests = [], []
    for name, x in arrays:
        if is_float(x):
            names.append(name)
            memory = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
            digests.append(hashlib.blake2b(memory, digest_size=DIGEST).digest())  # type: ignore[arg-type]
    if communicator.size == 1 or not names:
        return []
    everyone = communicator.allgather_bytes(b"".join(digests), "digests")
    places = [slice(k * DIGEST, (k + 1) * DIGEST) for k in range(len(names))]
    return [name for name, at in zip(names, places, strict=True) if len({part[at] for part in everyone}) > 1]


def mean(arrays: Mapping[str, np.ndarray], communicator: Communicator, ops: Ops) -> Tree:
    """Return the mean over ranks of each float array, in its dtype. All ranks pass the same names in the same order."""
    means: Tree = {}
    for kind, names in _pieces(arrays):
        flat = np.concatenate([arrays[name].ravel() for name in names])
        shares = _shares(flat, communicator.size)  # (n,), or (2 n,): upper halves, then lower ones
        handle = communicator.allreduce_async(ops.from_numpy(shares), "mean")
        # N equal shares x / 2^k add up to x * N / 2^k without rounding, and dividing by N / 2^k gives x again.
        total = ops.to_numpy(communicator.synchronize(handle)) / _part(communicator.size)
        # Restore the sign of zeros: the sum starts at 0.0, and 0.0 + -0.0 is 0.0.
        flat = sum(np.split(total, len(shares) // len(flat)), np.copysign(0.0, total[: len(flat)])).astype(kind)
        ends = np.cumsum([arrays[name].size for name in names])[:-1]
        for name, x in zip(names, np.split(flat, ends), strict=True):
            means[name] = x.reshape(arrays[name].shape)
    return means


def ordered_sum(local: np.ndarray, communicator: Communicator, name: str = "sums") -> np.ndarray:
    """Return the sum over ranks in float64 and rank order, with the same bits on all ranks. Shapes must be equal."""
    # Gathered and added here, because the order of sums in an allreduce is not fixed.
    parts = communicator.allgather_bytes(np.asarray(local, np.float64).tobytes(), name)
    counts = [len(part) // 8 for part in parts]
    if len(set(counts)) > 1:
        what = f"the ranks diverged: {name} got {', '.join(map(str, counts))} numbers on rank 0, 1, ..."
        raise CommunicationError(what, fix="call the same on all ranks", common=True)
    return functools.reduce(np.add, [np.frombuffer(part) for part in parts]).reshape(local.shape)


# By the dtype's kind. Only uint64 stays unsigned.
WIDE = {"b": np.int64, "i": np.int64, "u": np.int64, "f": np.float64, "c": np.complex128}
NUMBERS = ("int64", "float64")
FLOATS = "give floats, which are rounded"


def sums(arrays: Sequence[np.ndarray], communicator: Communicator, name: str) -> list[np.ndarray]:
    """Return the sum over ranks of each array, in rank order and 64 bits, so that integers are exact.

    Sums are int64 (also of booleans), float64 or complex128, with the same bits on every rank. All arrays are sent
    together.

    Raises on all ranks CommunicationError if shapes or dtypes differ, ConfigError if a sum of integers needs more than
    64 bits.
    """
    types = [x.dtype if x.dtype == np.uint64 else WIDE[x.dtype.kind] for x in arrays]
    wide = [np.ascontiguousarray(x, kind).reshape(x.shape) for x, kind in zip(arrays, types, strict=True)]
    head = json.dumps([[x.dtype.name, x.shape] for x in wide]).encode()
    # [length of the head: 8 bytes, the head: JSON of dtypes and shapes, the arrays one after the other]
    packed = len(head).to_bytes(8, "little") + head + b"".join(x.tobytes() for x in wide)
    everyone = communicator.allgather_bytes(packed, name)
    ends = [8 + int.from_bytes(part[:8], "little") for part in everyone]
    heads = [json.loads(part[8:end]) for part, end in zip(everyone, ends, strict=True)]
    # A scalar may be int on one rank and float on another, as a total that starts at 0. Then it is float on all.
    kinds = [[["number" if not shape and kind in NUMBERS else kind, shape] for kind, shape in each] for each in heads]
    if any(other != kinds[0] for other in kinds):
        if all(not shape for head in heads for _, shape in head):
            what = f"{', '.join(str(len(head)) for head in heads)} numbers on rank 0, 1, ..."
        else:
            listed = [" and ".join(f"{kind} {tuple(shape)}" for kind, shape in head) for head in heads]
            what = ", ".join(f"{text} on rank {rank}" for rank, text in enumerate(listed))
        fix = "call the same on all ranks"
        raise CommunicationError(f"the ranks diverged: {name} got {what}", fix=fix, common=True)
    totals, at = [], 0
    for k, x in enumerate(wide):
        sources = zip(everyone, ends, heads, strict=True)
        parts = [np.frombuffer(part, head[k][0], x.size, end + at) for part, end, head in sources]
        if len({part.dtype for part in parts}) > 1:
            parts = [part.astype(np.float64) for part in parts]
        total = functools.reduce(np.add, parts[1:], parts[0].copy())
        if total.dtype.kind in "iu":
            # A sum that does not fit is wrong by 2^64, much more than the rounding of a sum of floats.
            rounded = functools.reduce(np.add, [part.astype(np.float64) for part in parts])
            if (np.abs(total.astype(np.float64) - rounded) > 2.0**62).any():
                largest = rounded[np.abs(rounded).argmax()]
                what = f"a sum of integers over the ranks does not fit into 64 bits: {largest:.4g}"
                raise ConfigError(what, where=name, fix=FLOATS, common=True)
        totals.append(total.reshape(x.shape))
        at += x.nbytes
    return totals


def _part(size: int) -> float:
    """Return N / 2^k, with 2^k the next power of two from N on."""
    return size / 2 ** math.ceil(math.log2(size))


def _shares(x: np.ndarray, size: int) -> np.ndarray:
    """Return x divided by a power of two so that N equal ones add up exactly: in 32 bits if N is a power of two, else
    in 64. 64-bit numbers become two halves, one after the other."""
    share = _part(size) / size
    if _part(size) == 1:
        return x.astype(np.promote_types(x.dtype, np.float32)) * share
    if x.dtype != np.float64:
        return x.astype(np.float64) * share
    # Halves of 26 and 27 bits: up to 2^26 equal ones add up within 53 bits.
    finite = np.where(np.isfinite(x), x, 0.0)
    high = np.where(np.isfinite(x), (x.view(np.uint64) & ~np.uint64((1 << 27) - 1)).view(np.float64), x)
    low = np.where(np.isfinite(x) & (x != high), finite - high, np.copysign(0.0, x))
    return np.concatenate([high, low]) * share


def is_float(x: np.ndarray) -> bool:
    """Return whether the dtype is real floating point. bfloat16 is not one of NumPy's own dtypes."""
    return x.dtype.kind == "f" or x.dtype.name == "bfloat16"


def _pieces(arrays: Mapping[str, np.ndarray]) -> Iterator[tuple[np.dtype, list[str]]]:
    """Group arrays of one dtype to send together: up to ``PIECE_BYTES``, or one array."""
    kinds: dict[np.dtype, list[str]] = {}
    for name, x in arrays.items():
        if is_float(x):
            kinds.setdefault(x.dtype, []).append(name)
    for kind, names in kinds.items():
        piece: list[str] = []
        for name in names:
            if piece and sum(arrays[n].nbytes for n in piece) + arrays[name].nbytes > PIECE_BYTES:
                yield kind, piece
                piece = []
            piece.append(name)
        yield kind, piece
