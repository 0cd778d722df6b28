"""The table of compressors. The configuration reads it, so it imports neither NumPy nor a compressor."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

# Entries. Smaller tensors take more time to compress than to send, and biases should stay exact.
SMALL = 4096


@dataclass(frozen=True)
class CompressorSpec:
    """A compressor in the table.

    ``made_by``: file in this folder and class. ``options``: keys of ``exchange`` that the class is called with.
    ``world``: whether (size, rank) come before them: 0 none, 1 size, 2 both. ``auto``: whether ``compression: auto``
    may choose it. ``compared``: whether ``hvd-train modes`` tries it by default.
    """

    made_by: str
    options: tuple[str, ...] = ()
    world: int = 0
    auto: bool = False
    compared: bool = False

    @property
    def compressor_class(self) -> Any:
        file, name = self.made_by.split(":")
        return getattr(importlib.import_module(f"hvd_train.compression.{file}"), name)


# Candidates of ``auto`` are ordered from the least lossy to the most.
COMPRESSORS = {
    "none": CompressorSpec("uncompressed:Uncompressed", auto=True),
    "fp16": CompressorSpec("quantized:Float16", world=1, auto=True),
    "bf16": CompressorSpec("quantized:BFloat16", world=2, compared=True),
    "int8": CompressorSpec("quantized:Int8", world=2, auto=True, compared=True),
    "int4": CompressorSpec("quantized:Int4", world=2, compared=True),
    "powersgd": CompressorSpec("lowrank:PowerSGD", ("rank",), auto=True),
    "topk": CompressorSpec("sparse:TopK", ("ratio", "exact"), auto=True),
    "threshold": CompressorSpec("sparse:Threshold", ("threshold",)),
}
