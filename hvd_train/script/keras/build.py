"""Models that have no weights yet at ``hk.distribute``: subclassed ones and Sequentials without an Input."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras
from keras.src.backend import compute_output_spec

from hvd_train.core.agreement import agree, collectively
from hvd_train.errors import ConfigError, whole_reason
from hvd_train.protocol import Communicator
from hvd_train.script.keras.data.leaves import BATCH, columns, first_batch, kind_of, packed, take
from hvd_train.script.keras.patches import Patches, optimizers_of

FIRST = ("fit", "evaluate", "predict", "train_on_batch")
FIX = "call it once on a batch, or model.build(input_shape), before hk.distribute"


def is_built(model: Any) -> bool:
    """Return whether the model has its weights.

    A model without its own ``call``, as in many GANs, is built if its parts are. So is a Sequential, which stays half
    built if a layer is a PyTorch module.
    """
    parts = all(layer.built for layer in model._flatten_layers() if layer is not model)
    if isinstance(model, keras.Sequential):
        return bool(model.variables) and model.built and parts
    return bool(model.variables) and (model.built or type(model).call is keras.Model.call and parts)


def build_at_first(model: Any, world: Communicator, patches: Patches, begin: Callable[[], None]) -> None:
    """Build the model from the first batch that one of its methods gets, call ``begin``, and continue."""

    def first(name: str, *args: Any, **kwargs: Any) -> Any:
        agree(world, {"call": f"model.{name}"})
        call = inspect.signature(getattr(type(model), name)).bind(model, *args, **kwargs).arguments
        # If the batch fails on one rank, the others must not wait in ``begin``.
        collectively(world, lambda: _build(model, call, f"model.{name}"))
        # Before ``begin``, which patches the same methods.
        stubs.undo()
        begin()
        return getattr(model, name)(*args, **kwargs)

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise ConfigError("the model was not built, so this rank would train alone", where="optimizer.apply", fix=FIX)

    stubs = Patches(None)
    patches.on_undo(stubs.undo)
    for name in FIRST:
        stubs.put(model, name, functools.partial(first, name))
    for optimizer in optimizers_of(model):
        stubs.put(optimizer, "apply", refused)


def _build(model: Any, call: dict[str, Any], where: str) -> None:
    x: Any = call.get("x")
    kind = kind_of(x)
    if kind == "other":
        raise ConfigError(f"the model is not built, and {type(x).__name__} shows no batch", where=where, fix=FIX)
    if kind == "arrays":
        batch = take(packed(columns(x, None, None)), slice(0, call.get("batch_size") or BATCH))
    else:
        batch = x[0] if kind == "sequence" else first_batch(x)
    inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    if keras.backend.backend() == "tensorflow":
        # The structure that tf.data passes to train_step.
        inputs = keras.tree.lists_to_tuples(inputs)

    def symbolic(leaf: Any) -> Any:
        text = leaf.dtype.kind in "OSU"
        return keras.KerasTensor(leaf.shape, "string" if text else keras.backend.standardize_dtype(leaf.dtype))

    try:
        compute_output_spec(model, keras.tree.map_structure(symbolic, inputs), training=False)
    except Exception as error:
        what = f"the model cannot be built from a batch: {whole_reason(error)}"
        raise ConfigError(what, where=where, fix=FIX) from error
