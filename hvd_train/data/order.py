# NOTE TO COLLEAGUES (helpers): the lead has written this file already and it is in use. Do not rewrite it or its interface; your job now: WRITE ITS TESTS, fix bugs you find with small edits, commit.
"""The order of samples: pure functions of (seed, epoch), the same for every world size, in O(1) memory."""

from __future__ import annotations

import numpy as np

from hvd_train.errors import DataError

ROUNDS = 6
SMALL = 1024  # up to here a whole permutation is cheap, and fairer than a cipher on so few values
U64 = np.uint64


def _hash(x: np.ndarray, key: int) -> np.ndarray:
    """splitmix64's finalizer (Steele, Lea and Flood 2014), keyed; uint64 arithmetic wraps."""
    x = (x ^ U64(key)) * U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> U64(27))) * U64(0x94D049BB133111EB)
    return x ^ (x >> U64(31))


def permute(positions: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Positions (k,) in [0, n) -> sample indices (k,) int64: a bijection on [0, n) for each (seed, epoch).

    A Feistel network (Luby and Rackoff 1988) permutes [0, a b) with a b >= n, a and b near sqrt(n): (l, r) ->
    (r, (l + hash(r)) mod a), the radices changing places each round. A result >= n walks on until it falls below n
    (Black and Rogaway 2002), which keeps it a bijection; a b < n + 2 sqrt(n) + 1, so few walk.
    """
    rng = np.random.default_rng([seed, epoch])
    if n <= SMALL:
        return rng.permutation(n)[positions]
    a = int(np.ceil(np.sqrt(n)))
    b = -(-n // a)
    keys = rng.integers(0, 2**63, ROUNDS, dtype=np.int64)
    out = np.asarray(positions).astype(U64)
    walking = np.arange(len(out))
    while len(walking):
        left, right = np.divmod(out[walking], U64(b))  # left < a, right < b
        modulus, other = U64(a), U64(b)
        for key in keys:
            left, right = right, (left + _hash(right, int(key)) % modulus) % modulus
            modulus, other = other, modulus
        # An even number of rounds brings the radices back to (a, b).
        out[walking] = left * U64(b) + right
        walking = walking[out[walking] >= U64(n)]
    return out.astype(np.int64)


def share(count: int, size: int, rank: int) -> tuple[int, int]:
    """(start, stop) of a rank's contiguous part of ``count``: parts differ by at most one, the first ones are longer."""
    each, rest = divmod(count, size)
    start = rank * each + min(rank, rest)
    return start, start + each + (rank < rest)


def steps(n: int, consumed: int, global_batch: int) -> int:
    """Steps that are left of an epoch of which ``consumed`` samples are used; the last may be short."""
    return -(-(n - consumed) // global_batch)


def check_world(n: int, size: int, what: str) -> None:
    if n < size:
        raise DataError(f"{what} has {n} samples for {size} ranks", fix="use fewer ranks or more data")
