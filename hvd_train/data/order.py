"""The order of samples: a pure function of (seed, epoch) in O(1) memory, the same for every world size."""

from __future__ import annotations

import numpy as np

# Even, so that the two radices of the Feistel network end up in their original order.
ROUNDS = 6
# Up to this size, values are sorted by their hashes: more uniform than a cipher of few values, and still O(1).
SMALL = 1024
U64 = np.uint64
GOLDEN = 0x9E3779B97F4A7C15
MASK = 2**64 - 1


def scramble(x: np.ndarray) -> np.ndarray:
    """Apply splitmix64's finalizer (Steele, Lea and Flood 2014), a bijection on uint64; array arithmetic wraps."""
    x = (x ^ (x >> U64(30))) * U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> U64(27))) * U64(0x94D049BB133111EB)
    return x ^ (x >> U64(31))


def stream(key: int, counters: np.ndarray) -> np.ndarray:
    """Return outputs ``counters`` (uint64) of the splitmix64 generator with state ``key``: 64 random bits each."""
    return scramble((counters + U64(1)) * U64(GOLDEN) + U64(key & MASK))


def mix(seed: int, number: int) -> int:
    """Hash two numbers to a 64-bit key."""
    # Without NumPy's generators, which may change between versions.
    first = int(stream(seed, np.zeros(1, U64))[0])
    return int(stream(first, np.array([number & MASK], U64))[0])


def permute(positions: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Map positions (k,) in [0, n) to sample indices (k,) int64, a bijection on [0, n) for each (seed, epoch).

    A Feistel network (Luby and Rackoff 1988) permutes [0, a b) with a b >= n, a and b near sqrt(n): (l, r) ->
    (r, (l + hash(r)) mod a), where a and b swap each round. A result >= n is permuted again until it is below n (cycle
    walking, Black and Rogaway 2002), which keeps it a bijection; a b < n + sqrt(n) + 1, so few results need it.
    """
    key = mix(seed, epoch)
    if n <= SMALL:
        hashes = stream(key, np.arange(n, dtype=U64))
        return np.argsort(hashes, kind="stable")[positions]
    a = int(np.ceil(np.sqrt(n)))
    b = -(-n // a)
    keys = stream(key, np.arange(ROUNDS, dtype=U64))
    out = np.asarray(positions).astype(U64)
    # Indices into ``out`` of values that may not be below n yet.
    walking = np.arange(len(out))
    while len(walking):
        left, right = np.divmod(out[walking], U64(b))  # left < a, right < b
        modulus, other = U64(a), U64(b)
        for round_key in keys:
            # (32 hash bits x modulus) >> 32 is a value below the modulus, without a slow division.
            moved = left + (((scramble(right ^ round_key) >> U64(32)) * modulus) >> U64(32))
            # moved < 2 modulus. If moved < modulus, the difference wraps to a huge number, so the minimum is mod.
            left, right = right, np.minimum(moved, moved - modulus)
            modulus, other = other, modulus
        out[walking] = left * U64(b) + right
        walking = walking[out[walking] >= U64(n)]
    return out.astype(np.int64)


def share(count: int, size: int, rank: int) -> tuple[int, int]:
    """Return (start, stop) of the part of ``rank``; parts differ by at most one, and the longer ones come first."""
    each, rest = divmod(count, size)
    start = rank * each + min(rank, rest)
    return start, start + each + (rank < rest)


def steps(n: int, consumed: int, global_batch: int) -> int:
    """Return the number of steps left in an epoch after ``consumed`` samples; the last step may be short."""
    return -(-(n - consumed) // global_batch)
