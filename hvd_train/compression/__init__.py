"""Compressors by name. Each algorithm stands here once, for every framework: contracts and NumPy only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvd_train.compression.table import COMPRESSORS

if TYPE_CHECKING:
    from hvd_train.protocol import Compressor


def make(name: str, size: int = 1, **options: Any) -> Compressor:
    """Make a compressor by its name, for a world of ``size`` ranks, with the options that belong to it."""
    row = COMPRESSORS[name]
    return row.compressor_class(size) if row.needs_size else row.compressor_class(**options)
