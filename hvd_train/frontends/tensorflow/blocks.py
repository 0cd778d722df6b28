"""Keras models that are lists of blocks."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import keras

from hvd_train.errors import ConfigError
from hvd_train.frontends.stages import NO_BLOCKS


def joined(model: Any) -> Any:
    """Return a list of blocks as one model that runs them in turn, anything else as it is."""
    blocks = isinstance(model, list | tuple) and model and all(isinstance(x, keras.layers.Layer) for x in model)
    return keras.Sequential(list(model)) if blocks else model


def blocks_of(model: keras.Model, module: ModuleType, name: str) -> list[keras.layers.Layer]:
    """Return the blocks of a model: as its file of the zoo says, or the layers of a ``Sequential``."""
    if ":" not in name and hasattr(module, "blocks"):
        return list(module.blocks(model))
    if type(model) is keras.Sequential:
        return list(model.layers)
    raise ConfigError("the model is not a list of blocks", where=f"model.name: {name}", fix=NO_BLOCKS)
