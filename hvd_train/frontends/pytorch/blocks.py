"""Models that are lists of blocks."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from hvd_train.errors import ConfigError
from hvd_train.frontends.stages import NO_BLOCKS


def joined(model: Any) -> Any:
    """Return a list of blocks as one module that runs them in turn, anything else as it is."""
    blocks = isinstance(model, list | tuple) and model and all(isinstance(x, torch.nn.Module) for x in model)
    return torch.nn.Sequential(*model) if blocks else model


def blocks_of(model: torch.nn.Module, module: ModuleType, name: str) -> list[torch.nn.Module]:
    """Return the blocks of a model: as its file of the zoo says, or the parts of a ``Sequential``."""
    if ":" not in name and hasattr(module, "blocks"):
        return list(module.blocks(model))
    if type(model) is torch.nn.Sequential:
        return list(model)
    raise ConfigError("the model is not a list of blocks", where=f"model.name: {name}", fix=NO_BLOCKS)
