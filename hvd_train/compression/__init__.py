"""Compressors by name. Each algorithm stands here once, for every framework: contracts and NumPy only."""

from __future__ import annotations

from typing import Any

from hvd_train.compression.lowrank import PowerSGD
from hvd_train.compression.quantized import BFloat16, Float16, Int8
from hvd_train.compression.sparse import Threshold, TopK
from hvd_train.compression.uncompressed import Uncompressed
from hvd_train.protocol import Compressor


def make(name: str, size: int = 1, **options: Any) -> Compressor:
    """The compressor ``exchange.compression`` for a world of ``size`` ranks, with the options that belong to it."""
    if name in ("fp16", "bf16"):
        return Float16(size) if name == "fp16" else BFloat16(size)
    kinds: dict[str, Any] = {
        "none": Uncompressed,
        "int8": Int8,
        "topk": TopK,
        "threshold": Threshold,
        "powersgd": PowerSGD,
    }
    return kinds[name](**options)
