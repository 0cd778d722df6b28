"""Check that a Keras optimizer is elementwise: each entry's update depends on that entry alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import keras
import numpy as np

from hvd_train.errors import ConfigError, whole_reason
from hvd_train.script.keras.model_state import to_numpy
from hvd_train.script.shared.elementwise import SCALES, SHAPES, STEPS

KNOWN = ("SGD", "Adam", "AdamW", "Nadam", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Ftrl", "Lion")
TOLERANCE = 1e-5  # of weights in 32 bits; a formula that is not elementwise changes the leading digits
FIX = f"leave sharded=True out, or take one of {', '.join(KNOWN)}"
# Options that combine tensors; sharded optimizers apply them to whole tensors before the update.
BEFORE = {"clipnorm": None, "global_clipnorm": None, "use_ema": False, "gradient_accumulation_steps": None}


def check_elementwise(optimizers: Sequence[Any], where: str) -> None:
    """Raise ConfigError if an optimizer's step on parts of tensors differs from that on the whole."""
    for outer in optimizers:
        optimizer = getattr(outer, "inner_optimizer", outer)
        kind = type(optimizer).__name__
        # On PyTorch Keras' classes derive from others with the same name.
        if kind in KNOWN and type(optimizer).__module__.startswith("keras."):
            continue
        try:
            same = _same(optimizer)
        except Exception as error:
            what = f"{kind} cannot be divided: a step on parts of tensors fails ({whole_reason(error)})"
            raise ConfigError(what, where=where, fix=FIX) from error
        if not same:
            what = f"{kind} cannot be divided: a step on parts of tensors differs from the whole"
            raise ConfigError(f"{what}, so its formula is not elementwise", where=where, fix=FIX)


def _same(optimizer: Any) -> bool:
    sizes = [int(np.prod(shape)) for shape in SHAPES]
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    whole = _trained(optimizer, [(k, 0, size, SHAPES[k]) for k, size in enumerate(sizes)])
    # Each tensor is cut in its middle: a rank has the end of one and the beginning of the next.
    edges = [0, *(start + size // 2 for start, size in zip(starts, sizes, strict=True)), sum(sizes)]
    parts = []
    for first, last in itertools.pairwise(edges):
        bounds = [(max(first - start, 0), min(last - start, size)) for start, size in zip(starts, sizes, strict=True)]
        parts.append(_trained(optimizer, [(k, a, b, (b - a,)) for k, (a, b) in enumerate(bounds) if b > a]))
    return np.allclose(np.concatenate(parts), whole, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


def _trained(optimizer: Any, cuts: Sequence[tuple[int, int, int, tuple[int, ...]]]) -> np.ndarray:
    """Return (n,): weights after a few steps of a copy. ``cuts``: tensors as (number, first entry, end, shape)."""
    config = optimizer.get_config()
    config |= {name: value for name, value in BEFORE.items() if name in config}
    if "learning_rate" in config:  # a warm-up may begin with 0, with which all formulas are equal
        config["learning_rate"] = 0.01
    copy = type(optimizer).from_config(config)
    # What the class sets beside its configuration, such as a switch that get_config leaves out.
    known = vars(keras.optimizers.SGD()).keys() | config.keys()
    for name, value in vars(optimizer).items():
        if name not in known and not _holds_variables(value):
            setattr(copy, name, deepcopy(value))
    variables = [keras.Variable(_numbers(k, k)[a:b].reshape(shape), name=f"w{k}") for k, a, b, shape in cuts]
    for step in range(STEPS):
        scale = SCALES[step % len(SCALES)]
        gradients = [scale * _numbers(k, 7 * step + k + 3)[a:b].reshape(shape) for k, a, b, shape in cuts]
        copy.apply(
            [keras.ops.convert_to_tensor(g, v.dtype) for g, v in zip(gradients, variables, strict=True)], variables
        )
    return np.concatenate([to_numpy(v).reshape(-1) for v in variables])


def _holds_variables(value: Any) -> bool:
    """Return whether these are slots or the like, which the copy makes for itself."""
    if isinstance(value, list | tuple | dict):
        return any(map(_holds_variables, value.values() if isinstance(value, dict) else value))
    return isinstance(value, keras.Variable)


def _numbers(k: int, seed: int) -> np.ndarray:
    return np.sin(np.arange(1.0, np.prod(SHAPES[k]) + 1) * (seed + 1.5))
