"""The names of the compressors. The configuration reads this table, so it imports neither NumPy nor a compressor."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """A compressor.

    ``made_by``: the file in this folder, and the class in it. ``options``: its keys of ``exchange``, which the class is
    called with. ``world``: how many of the number of ranks and the number of this rank come before them.
    """

    made_by: str
    options: tuple[str, ...] = ()
    world: int = 0

    @property
    def compressor_class(self) -> Any:
        file, name = self.made_by.split(":")
        return getattr(importlib.import_module(f"hvd_train.compression.{file}"), name)


COMPRESSORS = {
    "none": Row("uncompressed:Uncompressed"),
    "fp16": Row("quantized:Float16", world=1),
    "bf16": Row("quantized:BFloat16", world=2),
    "int8": Row("quantized:Int8", world=2),
    "int4": Row("quantized:Int4", world=2),
    "topk": Row("sparse:TopK", ("ratio", "exact")),
    "threshold": Row("sparse:Threshold", ("threshold",)),
    "powersgd": Row("lowrank:PowerSGD", ("rank",)),
}
