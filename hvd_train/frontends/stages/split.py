"""Divide blocks among stages as evenly as possible by measured time and memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Cost(NamedTuple):
    """The cost of a block: ``seconds`` forward and backward of a micro-batch, and bytes.

    ``weights``: bytes of its trainable weights; ``activations``: bytes of its output for one micro-batch.
    """

    name: str
    seconds: float
    weights: int
    activations: int


def balanced(costs: Sequence[tuple[float, ...]], stages: int) -> list[int]:
    """Return how many consecutive blocks each stage takes, such that the largest stage is as small as possible.

    The size of a stage is the largest of its shares of each column (time, memory). Each stage takes at least one block,
    and a nonzero share of the last column. Among equally good splits, the first stages take the fewest blocks. Exact,
    by dynamic programming.
    """
    totals = [sum(column) or 1.0 for column in zip(*costs, strict=True)]
    sums = [[0.0] * len(totals)]
    for cost in costs:
        sums.append([before + x / total for before, x, total in zip(sums[-1], cost, totals, strict=True)])

    def size(first: int, last: int) -> float:
        shares = [b - a for a, b in zip(sums[first], sums[last], strict=True)]
        return max(shares) if shares[-1] or not sums[-1][-1] else math.inf

    count = len(costs)
    # best[s][k]: for blocks k and later in s stages, the size of the largest stage and the length of the first.
    best = [{count: (0.0, 0)}]
    for left in range(1, stages + 1):
        rows = {}
        for k in range(count - left, -1, -1):
            ends = [end for end in range(k + 1, count + 1) if end in best[-1]]
            if ends:
                rows[k] = min((max(size(k, end), best[-1][end][0]), end - k) for end in ends)
        best.append(rows)
    sizes, at = [], 0
    for left in range(stages, 0, -1):
        sizes.append(best[left][at][1])
        at += sizes[-1]
    return sizes


def stage_of(split: Sequence[int]) -> list[int]:
    """Return the stage of each block."""
    return [stage for stage, count in enumerate(split) for _ in range(count)]
