"""Export to plain Keras and, for users' own Keras models, to ONNX."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_train.frameworks import TENSORFLOW
from hvd_train.frontends.exporting import Exported, Trained, onnx_load, onnx_packages, shapes, unfit_for
from hvd_train.frontends.tensorflow.blocks import joined
from hvd_train.frontends.user_model import build_model, canonical_table, finalizes
from hvd_train.protocol import one_or_all


def _model(trained: Trained, dtype: str) -> tuple[keras.Model, set[str], dict[str, tuple[int, ...]]]:
    """Return the trained model, the modules needed to load it besides Keras, and the shapes of its outputs."""
    name, sample, kinds = trained.config.model.name, trained.sample, trained.inputs(dtype)
    tf.config.set_visible_devices([], "GPU")
    # Keras numbers layers globally; restart, so that names are those of the training.
    keras.utils.clear_session()
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    model, module, _ = build_model(TENSORFLOW.zoo, trained.config, sample)
    model = joined(model)
    zeros = {k: np.zeros((2, *field.shape), kinds[k]) for k, field in sample.inputs.items()}
    if not model.built and list(kinds.values()) == [dtype]:
        model.build((None, *sample.input_shape))
    logits = model(one_or_all(zeros), training=False)
    table = canonical_table(module, model)
    variables = {v.path: v for v in model.variables if not v.path.endswith("seed_generator_state")}
    for path, array in trained.native_arrays({path: tuple(v.shape) for path, v in variables.items()}, table).items():
        variables[path].assign(array)
    for layer in filter(finalizes, model._flatten_layers()):
        layer.finalize_state()
    classes = {type(layer).__module__ for layer in model._flatten_layers()}
    modules = {m for m in classes if m.partition(".")[0] != "keras"} | ({module.__name__} if ":" in name else set())
    return model, modules, shapes(logits)


def _input_types(trained: Trained, dtype: str) -> dict[str, tuple[tuple[int, ...], str]]:
    kinds = trained.inputs(dtype)
    return {k: (field.shape, kinds[k]) for k, field in trained.sample.inputs.items()}


def to_keras(trained: Trained) -> Exported:
    """Export a .keras file: architecture and weights."""
    model, modules, outputs = _model(trained, trained.dtype)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        try:
            model.save(path)
        except (NotImplementedError, TypeError, ValueError) as error:
            raise unfit_for("a .keras file", trained.config.model.name, error) from error
        content = path.read_bytes()
    load = f"import {', '.join(['keras', *sorted(modules)])}; model = keras.models.load_model({{path}})"
    return Exported(content, load, _input_types(trained, trained.dtype), outputs)


def to_onnx(trained: Trained) -> Exported:
    """Export a 32-bit ONNX model with input ``input`` and output ``logits``, for any batch size."""
    package, converter = onnx_packages("onnx", "tf2onnx")
    model, _, outputs = _model(trained, "float32")
    inputs = _input_types(trained, "float32")
    names = ["input"] if len(inputs) == 1 else list(inputs)
    signature = [tf.TensorSpec((None, *s), k, name=n) for n, (s, k) in zip(names, inputs.values(), strict=True)]

    @tf.function
    def logits(*arguments) -> Any:
        outputs = model(one_or_all(dict(zip(inputs, arguments, strict=True))), training=False)
        return outputs if isinstance(outputs, dict) else {"logits": outputs}

    try:
        proto, _ = converter.convert.from_function(logits, input_signature=signature)
    except (TypeError, ValueError, RuntimeError) as error:
        raise unfit_for("ONNX", trained.config.model.name, error) from error
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    package.helper.set_model_props(proto, trained.about)
    return Exported(proto.SerializeToString(), onnx_load(inputs, outputs), inputs, outputs)
