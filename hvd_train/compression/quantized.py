"""Fewer bits per entry: ``fp16`` sums half-precision numbers, ``int8`` gathers bytes with one scale per bucket."""

from __future__ import annotations

import numpy as np

from hvd_train.protocol import Ops, Rounds, State, Tensor, Wire

LARGEST_FLOAT16 = 60000.0  # 65504, less room for the rounding of sums
STEPS = 127.0  # int8 levels on each side of zero


class Float16:
    """Half the bytes of 32-bit gradients; what rounding takes away stays in the residual (error feedback).

    Entries are limited so that no sum over ranks overflows; what lies beyond stays in the residual as well.
    """

    per_tensor = False

    def __init__(self, size: int) -> None:
        self.limit = LARGEST_FLOAT16 / size

    def initial(self, shape: tuple[int, ...], dtype: str) -> tuple[np.ndarray, ...]:
        return (np.zeros(shape, dtype),)

    def rounds(self, gradient: Tensor, state: State, ops: Ops) -> Rounds:
        (residual,) = state
        dtype, total = ops.dtype(gradient), gradient + residual
        sent = ops.cast(ops.clip(total, self.limit), "float16")
        own = ops.cast(sent, dtype)
        (reduced,) = yield Wire("sum", (sent,))
        return ops.cast(reduced, dtype), (total - own,)


class Int8:
    """One byte per entry: q = round(x / s) with s = max|x| / 127 of this rank's bucket, so |x - s q| <= s / 2.

    Every rank receives all ranks' bytes, (N - 1) per entry where ring allreduce moves 8 (N - 1) / N in 32 bits: for up
    to about 8 ranks. The rest stays in the residual (error feedback, Seide et al. 2014).
    """

    per_tensor = False

    def initial(self, shape: tuple[int, ...], dtype: str) -> tuple[np.ndarray, ...]:
        return (np.zeros(shape, dtype),)

    def rounds(self, gradient: Tensor, state: State, ops: Ops) -> Rounds:
        (residual,) = state
        dtype, length, total = ops.dtype(gradient), gradient.shape[0], gradient + residual
        # The smallest number keeps a bucket of zeros from dividing by zero.
        scale = ops.largest(abs(total)) / STEPS + float(np.finfo(dtype).tiny)
        levels = ops.cast(ops.round(total / scale), "int8")
        own = ops.cast(levels, dtype) * scale
        all_levels, scales = yield Wire("gather", (levels, ops.reshape(scale, (1,))))
        table = ops.cast(ops.reshape(all_levels, (-1, length)), dtype)  # (ranks, length)
        decoded = ops.matmul(ops.reshape(scales, (1, -1)), table)
        return ops.reshape(decoded, (length,)), (total - own,)
