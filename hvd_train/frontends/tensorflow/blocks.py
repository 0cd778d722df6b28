"""Keras models that are lists of blocks."""

from __future__ import annotations

from functools import partial
from typing import Any

import keras

from hvd_train.frontends.stages import blocks

joined = partial(blocks.joined, block=keras.layers.Layer, chain=keras.Sequential)


def _chained(model: Any) -> list[keras.layers.Layer] | None:
    return list(model.layers) if type(model) is keras.Sequential else None


blocks_of = partial(blocks.blocks_of, chained=_chained)
