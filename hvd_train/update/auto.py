"""``exchange.compression: auto``: time each candidate on random gradients of the model's shapes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from hvd_train.compression.table import COMPRESSORS
from hvd_train.protocol import Communicator, Compressor, Ops, Packing, Tensor, TensorSpec, allgather_json
from hvd_train.update.exchange import Exchange

CANDIDATES = tuple(name for name, one in COMPRESSORS.items() if one.auto)  # the least lossy first
# A lossier candidate is chosen if it takes less than this share of the time.
WORTH = 0.9
# An exchange longer than LONG_SECONDS is timed once, others TURNS times.
LONG_SECONDS, TURNS = 0.5, 5


def choose(
    specs: Sequence[TensorSpec],
    packing: Packing,
    make: Callable[[str], Compressor],
    communicator: Communicator,
    ops: Ops,
) -> tuple[str, dict[str, float]]:
    """Return the choice and {candidate: seconds of one exchange on the slowest rank}, equal on all ranks."""
    if communicator.size == 1:
        return "none", {}
    seconds = {name: fastest(Exchange(specs, packing, make(name), communicator, ops), specs) for name in CANDIDATES}
    choice = CANDIDATES[0]
    for name in CANDIDATES[1:]:
        if seconds[name] < WORTH * seconds[choice]:
            choice = name
    return choice, seconds


def random_gradients(exchange: Exchange, specs: Sequence[TensorSpec]) -> list[Tensor]:
    """Return random gradients for the buckets of an exchange, equal on all ranks."""
    rng = np.random.default_rng(0)
    gradients = []
    for members in exchange.buckets:
        drawn = rng.standard_normal(sum(specs[i].size for i in members), np.float32)
        gradients.append(exchange.ops.from_numpy(drawn.astype(specs[members[0]].dtype)))
    return gradients


def fastest(exchange: Exchange, specs: Sequence[TensorSpec]) -> float:
    """Time the exchange several times; return the seconds of the fastest turn on the slowest rank."""
    # The fastest, because noise can only make an exchange longer.
    communicator, ops = exchange.communicator, exchange.ops
    gradients = random_gradients(exchange, specs)
    states = [tuple(map(ops.from_numpy, arrays)) for arrays in exchange.init_state()]
    best = math.inf
    for turn in range(TURNS):
        # An exchange may reduce in place, and the next turn needs the gradients again.
        copies = [g + 0 for g in gradients]
        # Else the wait for the last rank would be timed as well.
        communicator.barrier()
        began = time.perf_counter()
        reduced, states = exchange.reduce(copies, states)
        for flat in reduced:
            # Copied to the host, because a GPU works asynchronously.
            ops.to_numpy(flat[:1])
        seconds = time.perf_counter() - began
        best = min(best, max(allgather_json(communicator, seconds)))
        if turn == 0 and best > LONG_SECONDS:
            break
    return best
