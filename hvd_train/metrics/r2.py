"""The coefficient of determination."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from hvd_train.metrics.metric import Metric, Predictions
from hvd_train.protocol import Tensor

SPLIT = 2.0**27 + 1  # splits a float64 into two halves (Dekker 1971, "A Floating-Point Technique", section 4)
ROUNDING = 2.0**-77  # of sums of the lower halves, relative to the upper ones


class R2(Metric):
    """1 - sum of (z - y)^2 / sum of (y - mean of y)^2, over all numbers together (Wright 1921).

    It is nan if all labels are equal. The sums are W, those of y and of y^2, each in two halves, and of (z - y)^2.
    """

    length = 6

    def sums(self, predictions: Predictions) -> Tensor:
        ops = predictions.ops
        # If the mean of the labels is large (years, prices), the two sums of the spread are nearly equal. Sums of upper
        # halves are exact up to 2^26 labels of one size, and those of lower halves are small.
        z, y, w = (ops.cast(x, "float64") for x in predictions.flat())  # (positions,) each
        high, low = _halves(y)
        square = y * y
        rest = high * high - square + 2 * high * low + low * low  # what the product rounds away
        upper, lower = _halves(square)
        return ops.stack([ops.sum(w * x, 0) for x in (w * 0 + 1, high, low, upper, lower + rest, (z - y) ** 2)])

    def result(self, sums: np.ndarray) -> float:
        if not np.isfinite(sums).all():
            return math.nan
        count, high, low, upper, lower, residual = (Fraction(float(x)) for x in sums)
        spread = upper + lower - (high + low) ** 2 / count if count else Fraction(0)
        return 1 - float(residual / spread) if spread > ROUNDING * upper * math.sqrt(count) else math.nan


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Divide numbers into two of 26 bits each, which add up to them exactly."""
    large = x * SPLIT
    high = large - (large - x)
    return high, x - high
