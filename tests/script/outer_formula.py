"""Local training in scripts, on a quadratic whose gradients differ between ranks: what must come out."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

ROUND, STEPS, RATE, MOMENTUM, LR = 3, 8, 0.7, 0.9, 0.1
OUTER: dict[str, Any] = {"mode": "outer", "outer_steps": ROUND, "outer_lr": RATE, "outer_momentum": MOMENTUM}


# Two tensors, of which the one with the first name is the first part.
STREAMING: dict[str, Any] = OUTER | {
    "mode": "streaming",
    "outer_steps": 4,
    "fragments": 2,
    "stream_delay": 1,
    "mix": 0.5,
}
STREAMED = 7  # steps: the part that has left after the sixth arrives after this one


def first(entries: int) -> np.ndarray:
    return np.linspace(-1.0, 1.0, entries)


def target(entries: int, rank: int, step: int) -> np.ndarray:
    return (rank + 1) * np.sin(np.arange(entries) + step)


def gradient(w: np.ndarray, rank: int, step: int) -> np.ndarray:
    """Return the gradient of |w - target|^2 / 2, whose target differs between ranks and steps."""
    return w - target(len(w), rank, step)


def by_formula(
    ranks: int, numbers: Collection[int], joins: Collection[int], shared: np.ndarray, velocity: np.ndarray | None = None
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Return the local weights of each rank, the global ones and v, as update/outer.py says.

    ``numbers``: of the gradients of each step; ``joins``: steps, from 1, after which the ranks join.
    """
    local = [shared.copy() for _ in range(ranks)]
    velocity = np.zeros_like(shared) if velocity is None else velocity
    for step, number in enumerate(numbers, 1):
        local = [w - LR * gradient(w, rank, number) for rank, w in enumerate(local)]
        if step in joins:
            delta = sum(shared - w for w in local) / ranks
            velocity = MOMENTUM * (velocity + delta)
            shared = shared - RATE * (delta + velocity)
            local = [shared.copy() for _ in range(ranks)]
    return local, shared, velocity


def streamed_by_formula(
    ranks: int, numbers: Collection[int], ends: Collection[int], entries: int
) -> tuple[list[list[np.ndarray]], list[np.ndarray]]:
    """Return the local weights of each rank and the global ones, [part], as update/streaming.py says.

    A model of two tensors that are added: the gradient of both is that of their sum. ``ends``: steps, from 1, with
    which a pass ends.
    """
    steps, delay, mix = (STREAMING[key] for key in ("outer_steps", "stream_delay", "mix"))
    shared = [first(entries), np.zeros(entries)]
    local = [[x.copy() for x in shared] for _ in range(ranks)]
    velocity, since, place = [np.zeros(entries), np.zeros(entries)], [0, 0], 0
    under_way: list[tuple[int, np.ndarray]] = []

    def departed(part: int) -> None:
        since[part] = 0
        under_way.append((part, sum(shared[part] - w[part] for w in local) / ranks))

    def arrived() -> None:
        part, delta = under_way.pop()
        velocity[part] = MOMENTUM * (velocity[part] + delta)
        shared[part] = shared[part] - RATE * (delta + velocity[part])
        for w in local:
            w[part] = (1 - mix) * shared[part] + mix * w[part]

    for step, number in enumerate(numbers, 1):
        for rank, w in enumerate(local):
            g = gradient(w[0] + w[1], rank, number)
            w[:] = [x - LR * g for x in w]
        since, place = [k + 1 for k in since], place + 1
        turn, behind = divmod(place, steps // 2)
        if behind == 0:
            departed((turn - 1) % 2)
        if behind == delay and under_way:
            arrived()
        if step in ends:
            if under_way:
                arrived()
            for part in (0, 1):
                if since[part]:
                    departed(part)
                    arrived()
            local, place = [[x.copy() for x in shared] for _ in range(ranks)], 0
    return local, shared
