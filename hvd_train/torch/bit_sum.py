"""Sums of a tensor's bits, on its device."""

from __future__ import annotations

import torch


def bits(x: torch.Tensor) -> torch.Tensor:
    """Return () int64: the sum of a tensor's memory as 64-bit words, mod 2^64. Any one changed bit changes it.

    The last bytes, of which there are fewer than eight, are added one by one. On the CPU ``frontends.base.checksum``
    adds them as a word.
    """
    x = x.detach()
    if x.layout != torch.strided:
        x = x.to_dense()
    # (bytes,) uint8
    memory = x.contiguous().reshape(-1).view(torch.uint8)
    # torch views bytes as int64 only from an offset that eight divides.
    if memory.storage_offset() % 8:
        memory = memory.clone()
    whole = len(memory) // 8 * 8
    return memory[:whole].view(torch.int64).sum() + memory[whole:].sum(dtype=torch.int64)
