"""Models that are lists of blocks, for every framework."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from hvd_train.errors import ConfigError
from hvd_train.frontends.stages import NO_BLOCKS


def joined(model: Any, block: type, chain: Callable[[list[Any]], Any]) -> Any:
    """Turn a list of blocks into a model that runs them in order, by ``chain``. Other models are returned unchanged."""
    listed = isinstance(model, list | tuple) and model and all(isinstance(x, block) for x in model)
    return chain(list(model)) if listed else model


def blocks_of(model: Any, module: ModuleType, name: str, chained: Callable[[Any], list[Any] | None]) -> list[Any]:
    """Return the blocks of a model: from its zoo file's function, or found by ``chained``.

    ``chained``: returns the layers of the framework's ``Sequential``, None for other models. Raises ConfigError.
    """
    if ":" not in name and hasattr(module, "blocks"):
        return list(module.blocks(model))
    blocks = chained(model)
    if blocks is None:
        raise ConfigError("the model is not a list of blocks", where=f"model.name: {name}", fix=NO_BLOCKS)
    return blocks
