"""Fewer bits per entry: ``fp16`` sums half-precision numbers; ``bf16`` gathers bfloat16 numbers, ``int8`` bytes."""

from __future__ import annotations

import numpy as np

from hvd_train.compression.feedback import ErrorFeedback
from hvd_train.protocol import Ops, Tensor, Wire

LARGEST_FLOAT16 = 60000.0  # 65504, less room for the rounding of sums
STEPS = 127.0  # int8 levels on each side of zero


class Float16(ErrorFeedback):
    """Half the bytes of 32-bit gradients; what rounding takes away stays in the residual.

    Entries are limited so that no sum over ranks overflows; what lies beyond stays in the residual as well.
    """

    elementwise = True

    def __init__(self, size: int) -> None:
        self.limit = LARGEST_FLOAT16 / size

    def encode(self, total: Tensor, ops: Ops) -> tuple[Wire, Tensor]:
        sent = ops.cast(ops.clip(total, self.limit), "float16")
        return Wire("sum", (sent,)), ops.cast(sent, ops.dtype(total))  # a copy: the sum may happen in place

    def decode(self, reduced: tuple[Tensor, ...], total: Tensor, ops: Ops) -> Tensor:
        # The sum over ranks, added in 16 bits by Horovod.
        return ops.cast(reduced[0], ops.dtype(total))


class BFloat16(ErrorFeedback):
    """The upper half of 32 bits: 8 bits of precision over the whole range of float32, so that nothing overflows.

    Horovod cannot add bfloat16: the numbers travel as bytes, every rank receives all ranks' and adds them in 32 bits,
    2 (N - 1) bytes per entry where ring allreduce moves 8 (N - 1) / N. For up to about 4 ranks, and for gradients that
    fp16 cannot hold.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def encode(self, total: Tensor, ops: Ops) -> tuple[Wire, Tensor]:
        sent = ops.cast(total, "bfloat16")
        return Wire("gather", (ops.to_bytes(sent),)), ops.cast(sent, ops.dtype(total))

    def decode(self, reduced: tuple[Tensor, ...], total: Tensor, ops: Ops) -> Tensor:
        table = ops.cast(ops.from_bytes(reduced[0], "bfloat16"), ops.dtype(total))
        table = ops.reshape(table, (-1, total.shape[0]))  # (ranks, n)
        # Added in rank order, so that all ranks get the same bits.
        parts = [table[rank] for rank in range(self.size)]
        return sum(parts[1:], start=parts[0])


class Int8(ErrorFeedback):
    """One byte per entry: q = round(x / s) with s = max|x| / 127 of this rank's bucket, so |x - s q| <= s / 2.

    Every rank receives all ranks' bytes, (N - 1) per entry where ring allreduce moves 8 (N - 1) / N in 32 bits: for up
    to about 8 ranks. The rest stays in the residual.
    """

    def encode(self, total: Tensor, ops: Ops) -> tuple[Wire, Tensor]:
        dtype = ops.dtype(total)
        # The smallest number keeps a bucket of zeros from dividing by zero.
        scale = ops.max(abs(total)) / STEPS + float(np.finfo(dtype).tiny)
        # (n,) in [-127, 127].
        levels = ops.cast(ops.round(total / scale), "int8")
        return Wire("gather", (levels, ops.reshape(scale, (1,)))), ops.cast(levels, dtype) * scale

    def decode(self, reduced: tuple[Tensor, ...], total: Tensor, ops: Ops) -> Tensor:
        # levels (ranks n,), scales (ranks,).
        levels, scales = reduced
        table = ops.cast(ops.reshape(levels, (-1, total.shape[0])), ops.dtype(total))  # (ranks, n)
        return ops.reshape(ops.matmul(ops.reshape(scales, (1, -1)), table), (-1,))
