"""The coefficient of determination."""

from __future__ import annotations

import math

import numpy as np

from hvd_train.metrics.metric import Metric, Predictions
from hvd_train.protocol import Tensor

EPSILON = 2.0**-52  # of float64


class R2(Metric):
    """1 - sum of (z - y)^2 / sum of (y - mean of y)^2, over all numbers together (Wright 1921).

    It is nan if all labels are equal. The sums are W, and the sums of y, y^2 and (z - y)^2.
    """

    length = 4

    def sums(self, predictions: Predictions) -> Tensor:
        ops = predictions.ops
        # In 64 bits: if the mean of the labels is large (years, prices), float32 squares would cancel completely.
        z, y, w = (ops.cast(x, "float64") for x in predictions.flat())  # (positions,) each
        return ops.stack([ops.sum(w * x, 0) for x in (w * 0 + 1, y, y**2, (z - y) ** 2)])

    def result(self, sums: np.ndarray) -> float:
        count, first, second, residual = map(float, sums)
        spread = second - first**2 / count if count else 0.0
        # For equal labels the spread is the rounding error of the squares, about its standard deviation over all sums.
        least = 4 * EPSILON * math.sqrt(count) * second
        return 1 - residual / spread if spread > least else math.nan
