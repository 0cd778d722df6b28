"""Files for plain Keras and, for Keras models of the user's own, for ONNX runtimes."""

from __future__ import annotations

import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from hvd_train.frameworks import TENSORFLOW
from hvd_train.frontends.base import build_model
from hvd_train.frontends.plain import ONNX_LOAD, Exported, Trained, onnx_packages, unfit_for


def _model(trained: Trained, dtype: str) -> tuple[keras.Model, set[str], tuple[int, ...]]:
    """(the trained model, the modules that loading it needs besides Keras, the shape of one sample's logits)."""
    name, shape = trained.config.model.name, trained.input_shape
    tf.config.set_visible_devices([], "GPU")
    keras.utils.clear_session()  # Keras numbers its layers: names must be those of the training
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    model, module = build_model(TENSORFLOW.zoo, name, trained.config.model.options, shape, trained.num_classes)
    if not model.built:
        model.build((None, *shape))
    logits = model(np.zeros((2, *shape), dtype), training=False)
    table = module.neutral(model) if hasattr(module, "neutral") else {}
    variables = {v.path: v for v in model.variables if not v.path.endswith("seed_generator_state")}
    for path, array in trained.own({path: tuple(v.shape) for path, v in variables.items()}, table).items():
        variables[path].assign(array)
    classes = {type(layer).__module__ for layer in model._flatten_layers()}
    modules = {m for m in classes if m.partition(".")[0] != "keras"} | ({module.__name__} if ":" in name else set())
    return model, modules, tuple(logits.shape[1:])


def to_keras(trained: Trained) -> Exported:
    """A .keras file: architecture and weights."""
    model, modules, output_shape = _model(trained, trained.dtype)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        try:
            model.save(path)
        except (NotImplementedError, TypeError, ValueError) as error:
            raise unfit_for("a .keras file", trained.config.model.name, error) from error
        content = path.read_bytes()
    load = f"import {', '.join(['keras', *sorted(modules)])}; model = keras.models.load_model({{path}})"
    return Exported(content, load, trained.input_shape, trained.dtype, output_shape)


def to_onnx(trained: Trained) -> Exported:
    """An ONNX model of 32 bits, input ``input`` and output ``logits``, for any number of samples."""
    package, converter = onnx_packages("onnx", "tf2onnx")
    model, _, output_shape = _model(trained, "float32")
    signature = [tf.TensorSpec((None, *trained.input_shape), tf.float32, name="input")]
    logits = tf.function(lambda inputs: {"logits": model(inputs, training=False)})
    try:
        proto, _ = converter.convert.from_function(logits, input_signature=signature)
    except (TypeError, ValueError, RuntimeError) as error:
        raise unfit_for("ONNX", trained.config.model.name, error) from error
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    package.helper.set_model_props(proto, trained.about)
    return Exported(proto.SerializeToString(), ONNX_LOAD, trained.input_shape, "float32", output_shape)
