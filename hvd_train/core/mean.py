"""The mean over the ranks of arrays that each rank keeps for itself: running statistics, weights that went apart.

Law: what all ranks hold bit for bit stays bit for bit. An array that is the same everywhere does not travel; of one
that differs, entries that are equal keep their bits (but the last of numbers below 1e-37 in 32 bits, 1e-307 in 64).
Shares are added, not values: the mean of the largest numbers is no infinity. All ranks end with the same bits.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from hvd_train.checkpoint.arrays import PIECE_BYTES
from hvd_train.errors import CommunicationError
from hvd_train.protocol import Communicator, Ops, Tree

DIGEST = 16  # bytes of an array's hash: two arrays that differ have the same one in 10^38


def differing(arrays: Iterable[tuple[str, np.ndarray]], communicator: Communicator) -> list[str]:
    """Return the names of the float arrays whose bits are not the same on all ranks; one array is read at a time.

    All ranks give the same names, shapes and types in the same order. Sixteen bytes of a rank and array travel.
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
    """Return the mean over the ranks of each float array, in its type; the same names in the same order everywhere."""
    means: Tree = {}
    for kind, names in _pieces(arrays):
        flat = np.concatenate([arrays[name].ravel() for name in names])
        shares = _shares(flat, communicator.size)  # (n,), or (2 n,): upper halves, then lower ones
        handle = communicator.allreduce_async(ops.from_numpy(shares), "mean")
        # N equal shares of x add up to x * N / 2^k without rounding, and that divided by N / 2^k is x again.
        total = ops.to_numpy(communicator.synchronize(handle)) / _part(communicator.size)
        # The sum starts with a zero of the total's sign: 0.0 + -0.0 is 0.0, and a bit of what was equal would change.
        flat = sum(np.split(total, len(shares) // len(flat)), np.copysign(0.0, total[: len(flat)])).astype(kind)
        ends = np.cumsum([arrays[name].size for name in names])[:-1]
        for name, x in zip(names, np.split(flat, ends), strict=True):
            means[name] = x.reshape(arrays[name].shape)
    return means


def ordered_sum(local: np.ndarray, communicator: Communicator, name: str = "sums") -> np.ndarray:
    """Return the sum over ranks of equally shaped arrays, in float64 and in rank order: the same bits everywhere."""
    # Gathered and added here: an allreduce adds in an order of its own.
    parts = communicator.allgather_bytes(np.asarray(local, np.float64).tobytes(), name)
    counts = [len(part) // 8 for part in parts]
    if len(set(counts)) > 1:
        what = f"the ranks diverged: {name} got {', '.join(map(str, counts))} numbers on rank 0, 1, ..."
        raise CommunicationError(what, fix="call the same on all ranks", common=True)
    return functools.reduce(np.add, [np.frombuffer(part) for part in parts]).reshape(local.shape)


# By the kind of a type; only numbers of 64 bits without a sign stay without one.
WIDE = {"b": np.int64, "i": np.int64, "u": np.int64, "f": np.float64, "c": np.complex128}
NUMBERS = ("int64", "float64")


def sums(arrays: Sequence[np.ndarray], communicator: Communicator, name: str) -> list[np.ndarray]:
    """Return the sum over the ranks of each array, in rank order and 64 bits, so that whole numbers are exact.

    It is int64 (also of truth values), float64 or complex128, the same bits on every rank. All arrays travel together.

    Raises CommunicationError on all ranks where shapes or types differ.
    """
    types = [x.dtype if x.dtype == np.uint64 else WIDE[x.dtype.kind] for x in arrays]
    wide = [np.ascontiguousarray(x, kind).reshape(x.shape) for x, kind in zip(arrays, types, strict=True)]
    head = json.dumps([[x.dtype.name, x.shape] for x in wide]).encode()
    # [length of the head: 8 bytes, the head: JSON of types and shapes, the arrays one after the other]
    packed = len(head).to_bytes(8, "little") + head + b"".join(x.tobytes() for x in wide)
    everyone = communicator.allgather_bytes(packed, name)
    ends = [8 + int.from_bytes(part[:8], "little") for part in everyone]
    heads = [json.loads(part[8:end]) for part, end in zip(everyone, ends, strict=True)]
    # One number may be whole on a rank and not on another, as a total that begins with 0: it is none on all of them.
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
        totals.append(functools.reduce(np.add, parts[1:], parts[0].copy()).reshape(x.shape))
        at += x.nbytes
    return totals


def _part(size: int) -> float:
    """Ranks in the next power of two: division by that rounds nothing."""
    return size / 2 ** math.ceil(math.log2(size))


def _shares(x: np.ndarray, size: int) -> np.ndarray:
    """x over a power of two, such that N equal ones add up without rounding: in 32 bits where N is a power of two, else
    in 64; a number of 64 bits as two halves, one after the other."""
    share = _part(size) / size
    if _part(size) == 1:
        return x.astype(np.promote_types(x.dtype, np.float32)) * share
    if x.dtype != np.float64:
        return x.astype(np.float64) * share
    # Two halves of 26 and 27 bits: up to 2^26 equal ones add up within the 53 bits of a number.
    finite = np.where(np.isfinite(x), x, 0.0)
    high = np.where(np.isfinite(x), (x.view(np.uint64) & ~np.uint64((1 << 27) - 1)).view(np.float64), x)
    low = np.where(np.isfinite(x) & (x != high), finite - high, np.copysign(0.0, x))
    return np.concatenate([high, low]) * share


def is_float(x: np.ndarray) -> bool:
    """Return whether it holds real numbers. bfloat16 is not a type of NumPy itself."""
    return x.dtype.kind == "f" or x.dtype.name == "bfloat16"


def _pieces(arrays: Mapping[str, np.ndarray]) -> Iterator[tuple[np.dtype, list[str]]]:
    """Arrays of one type that travel together: of ``PIECE_BYTES``, or one array."""
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
