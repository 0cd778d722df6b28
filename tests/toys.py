"""Small compressors that prove the border: a gather of data-dependent length, two rounds per tensor, weights apart."""

from __future__ import annotations

import numpy as np

from hvd_train.core.exchange import plan
from hvd_train.protocol import Wire


class Threshold:
    """Sends the entries above a bound and keeps the rest as residual (Strom 2015)."""

    per_tensor = False

    def __init__(self, bound: float) -> None:
        self.bound = bound

    def initial(self, shape, dtype):
        return (np.zeros(shape, dtype),)

    def rounds(self, gradient, state, ops):
        (residual,) = state
        total, length = gradient + residual, gradient.shape[0]
        indices = ops.above(abs(total), self.bound)
        values = ops.take(total, indices)
        all_values, all_indices = yield Wire("gather", (values, indices))
        own = ops.scatter(length, indices, values)
        return ops.scatter(length, all_indices, all_values), (total - own,)


class PowerSGD:
    """Rank-r approximation by one power iteration (Vogels et al. 2019); vectors travel plain."""

    per_tensor = True

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def initial(self, shape, dtype):
        if len(shape) < 2:
            return ()
        columns = shape[-1]
        basis = np.random.default_rng(columns).standard_normal((columns, min(self.rank, columns)))
        return np.zeros(shape, dtype), basis.astype(dtype)

    def rounds(self, gradient, state, ops):
        if not state:
            (reduced,) = yield Wire("sum", (gradient,))
            return reduced, state
        residual, basis = state
        matrix = ops.reshape(gradient + residual, (-1, gradient.shape[-1]))
        (left,) = yield Wire("sum", (ops.matmul(matrix, basis),))
        left = ops.orthonormal(left)
        own_right = ops.matmul(matrix, left, transpose_a=True)
        (right,) = yield Wire("sum", (own_right * 1.0,))
        own = ops.matmul(left, own_right, transpose_b=True)
        decoded = ops.matmul(left, right, transpose_b=True)
        return ops.reshape(decoded, gradient.shape), (ops.reshape(matrix - own, gradient.shape), right)


class Apart:
    """An exchange that leaves gradients alone: each rank applies its own; weights are averaged at other times."""

    def __init__(self, specs, packing) -> None:
        self.buckets = plan(specs, packing)

    def initial(self):
        return [() for _ in self.buckets]

    def start(self, bucket, gradient, state):
        return gradient, state

    def finish(self, started):
        return [gradient for gradient, _ in started], [state for _, state in started]
