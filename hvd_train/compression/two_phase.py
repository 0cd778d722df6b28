"""A quantized allreduce in two phases: each rank sums its part of a bucket, then all ranks gather the sums.

Part j of a bucket belongs to rank j. Q rounds to few bits, and the rounding error stays in a residual e:

    1. q_i = Q(g_i + e_i), of which part j goes to rank j, for every j; e_i <- g_i + e_i - q_i.
    2. s_j = the sum of part j of q_i over the ranks i; c_j = Q(s_j) goes to all; part j of e_j += s_j - c_j.

A rank sends 2 (N - 1) / N encoded buckets for N ranks. An allgather of encoded buckets would take N - 1. (As
in ZeRO++, Wang et al. 2023, and 1-bit Adam, Tang et al. 2021.)
"""

from __future__ import annotations

import numpy as np

from hvd_train.protocol import Ops, Rounds, State, Tensor, Wire


class TwoPhase:
    """The base of two-phase compressors, on rank ``rank`` of ``size``; a subclass defines Q for blocks of entries.

    The error of a sum is added to its owner's residual, and so to its next gradient. A separate residual for the sums
    would be equally exact within 2 % (4 bits, 2 ranks), and a state of another shape.
    """

    per_tensor = False
    entries: int  # of a block, at most

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank

    def init_state(self, shape: tuple[int, ...], dtype: str) -> tuple[np.ndarray, ...]:
        return (np.zeros(shape, dtype),)

    def encode(self, blocks: Tensor, ops: Ops) -> tuple[tuple[Tensor, ...], Tensor]:
        """Encode blocks (b, k); return (flat tensors to send, each of b equal pieces in block order; Q (b, k))."""
        raise NotImplementedError

    def decode(self, encoded: tuple[Tensor, ...], shape: tuple[int, int], dtype: str, ops: Ops) -> Tensor:
        """Decode the tensors of ``encode`` to Q of the blocks, (b, k) = ``shape``."""
        raise NotImplementedError

    def blocks(self, length: int) -> tuple[int, int]:
        """Return (number of blocks, entries per block, which is even) of a part of a bucket of ``length`` entries."""
        part = -(-length // self.size)
        count = -(-part // self.entries)
        return count, 2 * -(-part // (2 * count))

    def fills_parts(self, length: int) -> bool:
        """Return whether a bucket of ``length`` entries divides into equal parts without padding."""
        count, entries = self.blocks(length)
        return self.size * count * entries == length

    def part_rounds(self, gradient: Tensor, state: State, ops: Ops) -> Rounds:
        """Run the first phase alone; return (this rank's part of the sum as blocks, new state)."""
        (residual,) = state
        dtype, (length,) = ops.dtype(gradient), gradient.shape
        # 16-bit gradients are summed in 32 bits.
        wide = "float64" if dtype == "float64" else "float32"
        total = ops.cast(gradient, wide) + ops.cast(residual, wide)
        count, entries = self.blocks(length)
        missing = self.size * count * entries - length
        padded = ops.concat([total, ops.from_numpy(np.zeros(missing, wide))]) if missing else total
        encoded, sent = self.encode(ops.reshape(padded, (-1, entries)), ops)
        received = yield Wire("alltoall", encoded)
        # The parts that come from the other ranks have the lengths of those sent.
        parts = [ops.split(x, [y.shape[0] // self.size] * self.size) for x, y in zip(received, encoded, strict=True)]
        # In rank order, so that the sum does not depend on the transport. (TensorFlow's graph optimizer may choose
        # another order, on the one rank that sums a part.)
        sums = self.decode(tuple(x[0] for x in parts), (count, entries), wide, ops)
        for rank in range(1, self.size):
            sums = sums + self.decode(tuple(x[rank] for x in parts), (count, entries), wide, ops)
        return sums, (ops.cast(total - self._joined(sent, length, ops), dtype),)

    def rounds(self, gradient: Tensor, state: State, ops: Ops) -> Rounds:
        dtype, (length,) = ops.dtype(gradient), gradient.shape
        sums, (residual,) = yield from self.part_rounds(gradient, state, ops)
        if self.size == 1:  # no other rank needs the sums
            return ops.cast(self._joined(sums, length, ops), dtype), (residual,)
        encoded, sent = self.encode(sums, ops)
        gathered = yield Wire("gather", encoded)
        count, entries = self.blocks(length)
        start = min(self.rank * count * entries, length)
        stop = min(start + count * entries, length)
        rest = ops.cast(self._joined(sums - sent, stop - start, ops), dtype)
        decoded = self.decode(gathered, (self.size * count, entries), ops.dtype(sums), ops)
        return ops.cast(self._joined(decoded, length, ops), dtype), (ops.add_at(residual, start, rest),)

    def _joined(self, blocks: Tensor, length: int, ops: Ops) -> Tensor:
        """Flatten blocks to their first ``length`` entries."""
        flat = ops.reshape(blocks, (-1,))
        return flat if flat.shape[0] == length else flat[:length]
