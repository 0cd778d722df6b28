"""Fewer bits per entry: ``fp16`` is summed in 16 bits; ``bf16``, ``int8`` and ``int4`` exchange in two phases."""

from __future__ import annotations

import numpy as np

from hvd_train.compression.feedback import ErrorFeedback
from hvd_train.compression.two_phase import TwoPhase
from hvd_train.protocol import Ops, Tensor, Wire

LARGEST_FLOAT16 = 60000.0  # 65504, less room for the rounding of sums


class Float16(ErrorFeedback):
    """Half-precision gradients; the rounding error stays in the residual.

    Entries are clipped so that no sum over ranks overflows; the excess stays in the residual as well.
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


class BFloat16(TwoPhase):
    """bfloat16 gradients: 8 bits of precision over the whole range of float32, so nothing overflows.

    Horovod cannot add bfloat16, so the numbers are sent as bytes.
    """

    entries = 1 << 20

    def encode(self, blocks: Tensor, ops: Ops) -> tuple[tuple[Tensor, ...], Tensor]:
        sent = ops.cast(blocks, "bfloat16")
        return (ops.to_bytes(ops.reshape(sent, (-1,))),), ops.cast(sent, ops.dtype(blocks))

    def decode(self, encoded: tuple[Tensor, ...], shape: tuple[int, int], dtype: str, ops: Ops) -> Tensor:
        return ops.cast(ops.reshape(ops.from_bytes(encoded[0], "bfloat16"), shape), dtype)


class _Levels(TwoPhase):
    """Rounding to q = round(x / s) with s = max|x| / ``levels`` per block, so |x - s q| <= s / 2; s is sent as well."""

    levels: float  # on each side of zero

    def pack(self, steps: Tensor, ops: Ops) -> Tensor:
        """Pack whole numbers (b, k) in [-levels, levels] to int8, (b, bytes of a block)."""
        raise NotImplementedError

    def unpack(self, packed: Tensor, shape: tuple[int, int], dtype: str, ops: Ops) -> Tensor:
        """Unpack to the whole numbers (b, k) = ``shape`` in ``dtype``."""
        raise NotImplementedError

    def encode(self, blocks: Tensor, ops: Ops) -> tuple[tuple[Tensor, ...], Tensor]:
        # The smallest number keeps a block of zeros from dividing by zero.
        tiny = float(np.finfo(ops.dtype(blocks)).tiny)
        # No division by a constant: in a graph TensorFlow turns it into a product, with other bits.
        scales = ops.max(abs(blocks), 1) * (1 / self.levels) + tiny  # (b,)
        column = ops.reshape(scales, (-1, 1))
        steps = ops.round(blocks / column)
        return (ops.reshape(self.pack(steps, ops), (-1,)), scales), steps * column

    def decode(self, encoded: tuple[Tensor, ...], shape: tuple[int, int], dtype: str, ops: Ops) -> Tensor:
        packed, scales = encoded
        return self.unpack(packed, shape, dtype, ops) * ops.reshape(scales, (-1, 1))


class Int8(_Levels):
    """One byte per entry, and a scale per block."""

    levels, entries = 127.0, 1 << 16

    def pack(self, steps: Tensor, ops: Ops) -> Tensor:
        return ops.cast(steps, "int8")

    def unpack(self, packed: Tensor, shape: tuple[int, int], dtype: str, ops: Ops) -> Tensor:
        return ops.cast(ops.reshape(packed, shape), dtype)


class Int4(_Levels):
    """Half a byte per entry. So few levels need small blocks: scales are 1/32 of the bytes."""

    levels, entries = 7.0, 256

    def pack(self, steps: Tensor, ops: Ops) -> Tensor:
        # A byte holds an entry a of the first half of a block and b of the second: 16 a + b in [-119, 119].
        half = steps.shape[1] // 2
        return ops.cast(steps[:, :half] * 16 + steps[:, half:], "int8")

    def unpack(self, packed: Tensor, shape: tuple[int, int], dtype: str, ops: Ops) -> Tensor:
        both = ops.cast(ops.reshape(packed, (shape[0], shape[1] // 2)), dtype)
        upper = ops.round(both * 0.0625)  # b / 16 is less than a half
        return ops.concat([upper, both - upper * 16], axis=1)
