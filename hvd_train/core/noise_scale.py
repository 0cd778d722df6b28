"""The gradient noise scale: the batch size at which the noise of a gradient is as large as the gradient.

McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", appendix A. The squared norm of the mean gradient
of b samples is |G|^2 + S / b on average. G is the true gradient, and S the variance of a sample's gradient, summed over
its entries. So norms at two batch sizes give both, and the noise scale S / |G|^2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

LEVEL = 0.9  # of the interval
LEAST_GROUPS = 3  # with fewer there is no interval
_NORMAL = 1.6448536269514722  # quantile 0.95 of the normal distribution


@dataclass(frozen=True)
class NoiseScale:
    """An estimate. ``scale``, ``signal`` |G|^2 and ``noise`` S; ``low``, ``high``: the 90 % interval of ``scale``.

    ``scale`` is None if the gradient is lost in the noise, ``high`` is None if nothing bounds the scale from above, and
    ``low`` is None as well without an interval.
    """

    signal: float
    noise: float
    scale: float | None
    low: float | None
    high: float | None
    steps: int


def estimate(groups: np.ndarray) -> NoiseScale:
    """Estimate the noise scale from groups of steps, (groups, 5): sums over the steps of a group.

    The columns are the squared norm of a small batch's gradient, that of the whole batch, the reciprocals of both
    sizes, and the number of steps. Means are taken before the ratio, because a mean of noisy ratios is biased. The
    interval is Fieller's, with the jackknife's covariance over groups.
    """
    total = groups.sum(axis=0)
    both = np.array(_signal_and_noise(total))
    signal, noise = map(float, both)
    scale = max(noise, 0.0) / signal if signal > 0 else None
    low = high = None
    count = len(groups)
    if count >= LEAST_GROUPS:
        without = np.array([_signal_and_noise(total - group) for group in groups])  # (groups, 2)
        pseudo = count * both - (count - 1) * without
        covariance = np.cov(pseudo, rowvar=False) / count
        low, high = _ratio_interval(both, covariance, t_quantile(count - 1))
    return NoiseScale(signal, noise, scale, low, high, round(float(total[4])))


def _signal_and_noise(sums: np.ndarray) -> tuple[float, float]:
    small, large, per_small, per_large, steps = map(float, sums)
    if per_small <= per_large:  # in each step one rank had all samples
        return math.nan, math.nan
    noise = (small - large) / (per_small - per_large)
    return (large - noise * per_large) / steps, noise


def _ratio_interval(both: np.ndarray, covariance: np.ndarray, quantile: float) -> tuple[float, float | None]:
    """Return the interval of noise / signal (Fieller 1954): the ratios r for which noise - r signal may be 0."""
    (signal, noise), q = map(float, both), quantile**2
    # a r^2 - 2 b r + c <= 0
    a = signal**2 - q * float(covariance[0, 0])
    b = signal * noise - q * float(covariance[0, 1])
    c = noise**2 - q * float(covariance[1, 1])
    root = math.sqrt(max(b * b - a * c, 0.0))
    if a > 0 and signal > 0:
        return max((b - root) / a, 0.0), max((b + root) / a, 0.0)
    # The signal may be 0: nothing bounds the ratio from above.
    if a < 0 and c > 0 and noise > 0:
        return (b - root) / a, None
    return 0.0, None


def t_quantile(freedom: int) -> float:
    """Return the quantile 0.95 of Student's distribution, whose 90 % interval is within plus and minus it.

    Exact for 1 and 2 degrees of freedom, 1 % off for 3, then less (Abramowitz and Stegun 26.7.5).
    """
    if freedom <= 2:
        return math.tan(0.45 * math.pi) if freedom == 1 else 0.9 * math.sqrt(2 / 0.19)
    z, n = _NORMAL, freedom
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )


def small_batch(part: float, whole: float, parts: float, samples: int) -> tuple[float, float]:
    """Return what one of the small batches adds to means over them: the factor of its squared gradient, and 1 / size.

    It has ``part`` of the ``whole`` batch's labels or samples, and all small batches together ``parts``; each counts by
    its share of these. ``samples``: its size. Its gradient is a sum divided by ``whole``, and not by ``part``.
    """
    return (whole**2 / (part * parts), part / (parts * samples)) if part else (0.0, 0.0)
