"""``powersgd``: a matrix is sent as two thin factors (Vogels, Karimireddy and Jaggi 2019)."""

from __future__ import annotations

import math

import numpy as np

from hvd_train.protocol import Ops, Rounds, State, Tensor, Wire


class PowerSGD:
    """One step of power iteration per exchange, with warm start and error feedback.

    M = gradient + residual as (n, m); P = sum of M Q, made orthonormal; Q = sum of M^T P; decoded = P Q^T. This rank's
    part is P (M^T P)^T. The two sums carry r (n + m) entries instead of n m. Tensors that this does not shrink, such as
    vectors, are sent uncompressed.
    """

    per_tensor = True

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def matrix(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Return the shape (n, m) that splits off the first or last axis, whichever sends less; None: uncompressed."""
        if len(shape) < 2:
            return None
        size = math.prod(shape)
        n, m = min(((shape[0], size // shape[0]), (size // shape[-1], shape[-1])), key=sum)
        return (n, m) if self.rank * (n + m) < n * m else None

    def init_state(self, shape: tuple[int, ...], dtype: str) -> tuple[np.ndarray, ...]:
        matrix = self.matrix(shape)
        if matrix is None:
            return ()
        # The same on every rank: the sum of M Q needs equal Q.
        basis = np.random.default_rng(shape).standard_normal((matrix[1], self.rank))
        return np.zeros(shape, dtype), basis.astype(dtype)

    def rounds(self, gradient: Tensor, state: State, ops: Ops) -> Rounds:
        if not state:
            (reduced,) = yield Wire("sum", (gradient,))
            return reduced, state
        # residual: the gradient's shape; basis Q: (m, r), the last step's right factor (a warm start).
        residual, basis = state
        shape = tuple(int(n) for n in gradient.shape)
        # M (n, m).
        matrix = ops.reshape(gradient + residual, self.matrix(shape) or shape)
        # P = sum of M Q: (n, r).
        (left,) = yield Wire("sum", (ops.matmul(matrix, basis),))
        left = ops.orthonormal(left)
        # This rank's M^T P: (m, r).
        right = ops.matmul(matrix, left, transpose_a=True)
        residual = ops.minus_product(matrix, left, right)  # before the sum, which may happen in place
        (right,) = yield Wire("sum", (right,))
        decoded = ops.matmul(left, right, transpose_b=True)
        return ops.reshape(decoded, shape), (ops.reshape(residual, shape), right)
