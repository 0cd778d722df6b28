"""The order in which a pipeline stage runs forward and backward passes of its micro-batches.

``gpipe``: all forward, then all backward (Huang et al. 2018, "GPipe"). ``1f1b``: one forward, one backward, as soon as
possible (Narayanan et al. 2019, "PipeDream", with a flush after each step). It is as fast, and a stage keeps at most
as many micro-batches as there are stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Turn(NamedTuple):
    """The forward or backward pass of one micro-batch through one stage."""

    forward: bool
    micro: int

    def __str__(self) -> str:
        return f"{'F' if self.forward else 'B'}{self.micro}"


def turns(name: str, stages: int, micro_batches: int, stage: int) -> list[Turn]:
    """Return the passes of a stage in one step.

    Backward passes are always in the order of the micro-batches, and so are the sums of gradients: the schedule does
    not affect the numbers.
    """
    ahead = micro_batches if name == "gpipe" else min(stages - stage, micro_batches)
    forward = [Turn(True, k) for k in range(micro_batches)]
    backward = [Turn(False, k) for k in range(micro_batches)]
    order = forward[:ahead]
    for k, turn in enumerate(backward):
        order += [turn, *forward[ahead + k : ahead + k + 1]]
    return order


def live(order: Sequence[Turn]) -> int:
    """Return how many micro-batches a stage keeps at most between forward and backward."""
    most = count = 0
    for turn in order:
        count += 1 if turn.forward else -1
        most = max(most, count)
    return most


def bubble(stages: int, micro_batches: int) -> float:
    """Return the fraction of time in which a stage is idle, if all passes take equally long."""
    return (stages - 1) / (micro_batches + stages - 1)
