"""Changes that ``hvd-train verify`` makes in a Keras script, and what it records."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hvd_train.protocol import Tree
from hvd_train.script.keras.patches import SAVING
from hvd_train.script.shared.record import SEED, Recording

RATES = ("rate", "dropout", "recurrent_dropout", "stddev")  # of dropout, recurrent layers, noise
_models = 0


def prepare() -> None:
    """Set 64 bits and a seed, before the script creates anything."""
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(SEED)


def add(model: Any, recording: Recording) -> None:
    """Record a model of the script, which has just been distributed."""
    recording.norm_fix = "keras.layers.GroupNormalization in its place does not depend on the ranks"
    global _models
    prefix = f"model{_models}/" * (_models > 0)
    _models += 1
    for layer in model._flatten_layers():
        for name in RATES:
            if isinstance(getattr(layer, name, None), float):
                setattr(layer, name, 0.0)
    for name in SAVING:
        # Bypass Keras' __setattr__, which would track it as a part of the model.
        object.__setattr__(model, name, lambda *args, **kwargs: None)
    recording.note("dropout and noise layers are off: what they draw depends on the rank")
    if keras.backend.backend() == "torch":
        recording.note("Keras on PyTorch computes some losses in 32 bits, whatever floatx is: they may differ by 1e-7")

    def tree() -> Tree:
        arrays: Tree = {}
        for v in model.variables:
            value = np.array(keras.ops.convert_to_numpy(v))
            if value.dtype.kind == "f" or v.trainable:
                kind = "weights" if v.trainable else "statistics"
                key = f"{kind}/{prefix}{v.path}"
                # Two layers may have the same name.
                arrays[f"{key} {len(arrays)}" if key in arrays else key] = value
        return arrays

    recording.model(tree)
