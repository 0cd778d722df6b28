"""The names of the compressors. The configuration reads this table, so it imports neither NumPy nor a compressor."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CompressorSpec:
    """A compressor.

    ``made_by``: the file in this folder, and the class in it. ``options``: its keys of ``exchange``, which the class is
    called with. ``world``: how many of the number of ranks and the number of this rank come before them. ``auto``:
    whether ``compression: auto`` may choose it. ``compared``: whether ``hvd-train modes`` tries it unasked.
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


# Those of ``auto`` stand in the order of what they leave out, the least first.
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
