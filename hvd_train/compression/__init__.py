"""Compressors by name. Each algorithm is here once, for every framework: contracts and NumPy only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvd_train.compression.table import COMPRESSORS

if TYPE_CHECKING:
    from hvd_train.protocol import Compressor


def make(name: str, size: int = 1, rank: int = 0, /, **options: Any) -> Compressor:
    """Make a compressor by name, for rank ``rank`` of ``size``, with its options."""
    row = COMPRESSORS[name]
    return row.compressor_class(*(size, rank)[: row.world], **options)
