"""Laws of scaling, fitted to samples/s on several numbers of ranks.

The universal scalability law (Gunther 1993) says that N ranks are C(N) = N / (1 + sigma (N-1) + kappa N (N-1)) times as
fast as one. ``sigma`` is the share of the work that only one rank at a time can do, ``kappa`` what each pair of ranks
costs. With kappa = 0 it is Amdahl's law.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

AMDAHL, UNIVERSAL = "Amdahl", "universal"
PARAMETERS = {AMDAHL: 2, UNIVERSAL: 3}
LEVEL = 0.9  # of all intervals
DRAWS = 2000  # of the bootstrap

# Samples/s of each repeat, for each number of ranks.
Points = Mapping[int, Sequence[float]]
Interval = tuple[float, float]


@dataclass(frozen=True)
class Law:
    """A scaling law. ``unit``: samples/s of one rank."""

    unit: float
    sigma: float = 0.0
    kappa: float = 0.0

    def speedup(self, ranks: Any) -> Any:
        """Return how many times as fast as one rank these are; ``ranks`` may be an array."""
        n = np.asarray(ranks, dtype=float)
        return n / (1 + self.sigma * (n - 1) + self.kappa * n * (n - 1))

    def rate(self, ranks: Any) -> Any:
        """Return samples/s; ``ranks`` may be an array."""
        return self.unit * self.speedup(ranks)

    @property
    def best(self) -> float:
        """Return the number of ranks with the most samples/s, at least 1; infinity if more are always faster."""
        return max(1.0, math.sqrt(max(1 - self.sigma, 0.0) / self.kappa)) if self.kappa > 0 else math.inf


@dataclass(frozen=True)
class Fit:
    """A law fitted to points, and the laws fitted to each draw of the bootstrap (none without repeats).

    ``spare``: by how many the points outnumber the law's parameters. With 0 the law goes through all points, and
    nothing is left that could contradict it. ``error``: the largest relative deviation of a point from the law.
    """

    name: str
    law: Law
    draws: Sequence[Law]
    spare: int
    error: float

    def interval(self, quantity: str) -> Interval | None:
        """Return the interval of ``sigma``, ``kappa`` or ``best``; None without repeats."""
        return _interval([getattr(one, quantity) for one in self.draws]) if self.draws else None

    def band(self, ranks: Any) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the lower and the upper end of the samples/s that the law gives at each of these numbers of ranks.

        None if no number of ranks was measured twice.
        """
        if not self.draws:
            return None
        rates = np.array([one.rate(ranks) for one in self.draws])
        low, high = np.quantile(rates, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
        return low, high


def fit(points: Points, name: str = UNIVERSAL, seed: int = 0) -> Fit | None:
    """Fit a law to the medians over repeats; None if there are too few numbers of ranks.

    For the intervals it draws the repeats' relative deviations from the mean of their point, of all points together.
    """
    points = {n: [x for x in rates if x > 0] for n, rates in sorted(points.items())}
    points = {n: rates for n, rates in points.items() if rates}
    if len(points) < PARAMETERS[name]:
        return None
    ranks, middles = [*points], np.array([median(rates) for rates in points.values()])
    law = _solve(ranks, middles, name)
    error = float(np.max(np.abs(law.rate(ranks) / middles - 1)))
    draws = [_solve(ranks, drawn, name) for drawn in _redrawn(points, middles, np.random.default_rng(seed))]
    return Fit(name, law, draws, len(points) - PARAMETERS[name], error)


def too_few(name: str, count: int) -> str:
    """Return why there is no fit, or what a fit to ``count`` numbers of ranks cannot tell; "" if nothing."""
    needed = PARAMETERS[name]
    if count < needed:
        return f"{name} law: {count} numbers of ranks are too few, it needs {needed}, and {needed + 1} to be checked"
    if count == needed:
        return f"{name} law: {count} numbers of ranks determine it but cannot contradict it; measure one more"
    return ""


def _solve(ranks: Sequence[int], rates: np.ndarray, name: str) -> Law:
    """Minimize the sum of squared relative errors of N / samples/s, with 0 <= sigma <= 1 and 0 <= kappa.

    N / rate = a + b (N-1) + c N (N-1) is linear in a = 1/unit, b = sigma a and c = kappa a. So the problem is convex.
    Its minimum is the best of the solutions with some constraints as equations that violate no other one.
    """
    n = np.asarray(ranks, dtype=float)
    seconds = n / rates
    columns = np.stack([np.ones_like(n), n - 1, n * (n - 1)], axis=1) / seconds[:, None]  # (points, 3)
    # The columns of a solution give [a, b, c]: a; b free, 0 or a; c free or 0.
    free_b, zero_b, b_is_a = [[1, 0], [0, 1], [0, 0]], [[1], [0], [0]], [[1], [1], [0]]
    bases = [np.array(one, dtype=float) for one in (zero_b, free_b, b_is_a)]
    if name == UNIVERSAL:
        bases += [np.column_stack([one, [0, 0, 1]]) for one in bases]
    best, least = np.array([1 / rates[0], 0.0, 0.0]), math.inf
    for basis in bases:
        design = columns @ basis
        solution = basis @ np.linalg.lstsq(design, np.ones(len(n)), rcond=None)[0]
        a, b, c = solution
        slack = 1e-12 * abs(a)
        if a > 0 and -slack <= b <= a + slack and c >= -slack:
            loss = float(np.sum((columns @ solution - 1) ** 2))
            if loss < least:
                best, least = solution, loss
    a, b, c = best
    return Law(1 / a, min(max(b / a, 0.0), 1.0), max(c / a, 0.0))


def _redrawn(points: Points, middles: np.ndarray, random: np.random.Generator) -> list[np.ndarray]:
    """Return samples/s as other repeats could have given them, ``DRAWS`` times; none if nothing was repeated.

    A few repeats spread less than all possible ones: deviations are scaled by sqrt(n / (n-1)), and each draw by
    Student's factor for the deviations that are known.
    """
    deviations: list[float] = []
    for rates in points.values():
        n, mean = len(rates), float(np.mean(rates))
        deviations += [(x / mean - 1) * math.sqrt(n / (n - 1)) for x in rates if n > 1]
    known = len(deviations) - sum(len(rates) > 1 for rates in points.values())
    if not known:
        return []
    wider = np.sqrt(known / random.chisquare(known, DRAWS))
    shifts = [np.median(random.choice(deviations, (DRAWS, len(rates))), axis=1) for rates in points.values()]
    return [*(middles * np.maximum(1 + wider[:, None] * np.stack(shifts, axis=1), 0.01))]


def _interval(values: Sequence[float]) -> Interval:
    # Neighbours in order, not means of them: a mean of infinity and a number is neither.
    ordered = sorted(values)
    last = len(ordered) - 1
    low, high = (1 - LEVEL) / 2, (1 + LEVEL) / 2
    return ordered[math.floor(low * last)], ordered[math.ceil(high * last)]
