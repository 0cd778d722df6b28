"""Sparse gradients: large entries are sent as (value, index) pairs, the others stay in the residual.

Every rank receives and adds the pairs of all ranks: 8 bytes per pair with 32-bit values.
"""

from __future__ import annotations

import math

from hvd_train.compression.feedback import ErrorFeedback
from hvd_train.protocol import Ops, Tensor, Wire

LARGEST = 3.4e38  # a number in 32 bits
# A threshold is estimated from one entry in SAMPLE ...
SAMPLE = 101
# ... but from all entries in buckets of fewer than this.
LEAST = 10_000


class _Sparse(ErrorFeedback):
    def chosen(self, sizes: Tensor, length: int, ops: Ops) -> Tensor:
        """Return the indices of the entries to send, given the absolute values (length,)."""
        raise NotImplementedError

    def encode(self, total: Tensor, ops: Ops) -> tuple[Wire, Tensor]:
        length = total.shape[0]
        indices = self.chosen(abs(total), length, ops)
        values = ops.take(total, indices)
        # values (k,) in the gradient's type, indices (k,) int32; k may differ between ranks.
        sent = ops.scatter(length, indices, values, same_bits=False)  # no index occurs twice
        return Wire("gather", (values, ops.cast(indices, "int32"))), sent

    def decode(self, reduced: tuple[Tensor, ...], total: Tensor, ops: Ops) -> Tensor:
        # The pairs of all ranks, concatenated. Values with the same index are added.
        values, indices = reduced
        return ops.scatter(total.shape[0], indices, values)


class Threshold(_Sparse):
    """Entries of absolute value > ``threshold`` (Strom 2015); their number depends on the data."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def chosen(self, sizes: Tensor, length: int, ops: Ops) -> Tensor:
        return ops.above(sizes, self.threshold)


class TopK(_Sparse):
    """The ``ratio`` of entries that are largest in absolute value (Aji and Heafield 2017).

    Unless ``exact``, a large bucket is not sorted: the k-th largest of a sample of it is the threshold (Lin et al.
    2018, Deep Gradient Compression), so about k entries are sent, and none of a bucket of
    zeros.
    """

    def __init__(self, ratio: float, exact: bool = False) -> None:
        self.ratio, self.exact = ratio, exact

    def chosen(self, sizes: Tensor, length: int, ops: Ops) -> Tensor:
        if self.exact or self.ratio == 1 or length < LEAST:
            # NaN and infinity are sent first: all ranks must see them.
            sizes = ops.where(sizes <= LARGEST, sizes, LARGEST)
            return ops.topk(sizes, max(1, math.ceil(self.ratio * length)))
        # A prime stride, so that the sample does not align with an axis of a tensor.
        sample = sizes[::SAMPLE]
        count = max(1, math.ceil(self.ratio * math.ceil(length / SAMPLE)))
        smallest = -ops.max(-ops.take(sample, ops.topk(sample, count)))
        # Just below this entry, so that it is chosen as well.
        return ops.above(sizes, ops.clip(smallest * (1 - 1e-6), LARGEST))
