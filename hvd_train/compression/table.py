"""The names of the compressors. The configuration reads this table, so it imports neither NumPy nor a compressor."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """A compressor.

    ``made_by``: the file in this folder, and the class in it. ``options``: its keys of ``exchange``, which the class is
    called with. ``needs_size``: whether it is called with the number of ranks instead.
    """

    made_by: str
    options: tuple[str, ...] = ()
    needs_size: bool = False

    @property
    def compressor_class(self) -> Any:
        file, name = self.made_by.split(":")
        return getattr(importlib.import_module(f"hvd_train.compression.{file}"), name)


COMPRESSORS = {
    "none": Row("uncompressed:Uncompressed"),
    "fp16": Row("quantized:Float16", needs_size=True),
    "bf16": Row("quantized:BFloat16", needs_size=True),
    "int8": Row("quantized:Int8"),
    "topk": Row("sparse:TopK", ("ratio", "exact")),
    "threshold": Row("sparse:Threshold", ("threshold",)),
    "powersgd": Row("lowrank:PowerSGD", ("rank",)),
}
