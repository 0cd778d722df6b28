"""PyTorch models that are lists of blocks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from hvd_train.frontends.stages import blocks

joined = partial(blocks.joined, block=torch.nn.Module, chain=lambda listed: torch.nn.Sequential(*listed))


def _chained(model: Any) -> list[torch.nn.Module] | None:
    return list(model) if type(model) is torch.nn.Sequential else None


blocks_of = partial(blocks.blocks_of, chained=_chained)
