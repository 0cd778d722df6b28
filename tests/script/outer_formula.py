"""Scripts whose ranks train apart, on a quadratic whose gradients differ between ranks: what must come out."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

ROUND, STEPS, RATE, MOMENTUM, LR = 3, 8, 0.7, 0.9, 0.1
OUTER: dict[str, Any] = {"mode": "outer", "outer_steps": ROUND, "outer_lr": RATE, "outer_momentum": MOMENTUM}


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
