"""Checksums of tensors on their devices."""

from __future__ import annotations

import torch


def bits(x: torch.Tensor) -> torch.Tensor:
    """Sum a tensor's memory as 64-bit words, mod 2^64; return () int64. Any single changed bit changes the sum.

    The last bytes, fewer than eight, are added one by one. ``frontends.base.checksum`` on the CPU adds them as a word.
    """
    x = x.detach()
    if x.layout != torch.strided:
        x = x.to_dense()
    # (bytes,) uint8
    memory = x.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    # torch views bytes as int64 only at offsets that are multiples of eight.
    if memory.storage_offset() % 8:
        memory = memory.clone()
    whole = len(memory) // 8 * 8
    return memory[:whole].view(torch.int64).sum() + memory[whole:].sum(dtype=torch.int64)
