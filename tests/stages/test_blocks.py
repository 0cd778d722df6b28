"""The blocks of the zoo: one after the other they are the model, of whose weights each belongs to a block."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest

from tests.frontends.test_contract import FRAMEWORKS
from tests.frontends.test_zoo import GPT, PYRAMID, RESNET, RESNET50, batch, opened

MODELS = {
    "resnet": (RESNET, (9, 11, 2), 3, 10),
    "resnet50": (RESNET50, (32, 37, 3), 3, 7),
    "pyramidnet": (PYRAMID, (9, 10, 2), 3, 6),
    "thin": ({"name": "thin", "depth": 6, "width": 5}, (4, 3, 2), 3, 6),
    "gpt": (GPT | {"depth": 3}, (10,), 11, 5),
    "mlp": ({"name": "mlp", "hidden": [7, 5]}, (4, 3, 2), 3, 3),
}
BERT = {"width": 8, "depth": 2, "heads": 2}


def outputs_of(framework, model, blocks, inputs):
    """Of the model and of its blocks, in evaluation."""
    if framework == "pytorch":
        import torch

        model.eval()
        with torch.no_grad():
            whole = model(*inputs.values())
            x = blocks[0](*inputs.values())
            for block in blocks[1:]:
                x = block(x)
        return whole, x
    whole = model(inputs if len(inputs) > 1 else next(iter(inputs.values())), training=False)
    x = inputs if len(inputs) > 1 else next(iter(inputs.values()))
    for block in blocks:
        x = block(x, training=False)
    return whole, x


def tensors_of(framework, layer):
    return {id(x) for x in ((*layer.parameters(), *layer.buffers()) if framework == "pytorch" else layer.variables)}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", MODELS)
def test_the_blocks_are_the_model(framework, name):
    options, shape, classes, count = MODELS[name]
    frontend = opened(framework, options, shape, classes)
    paths = [spec.name for spec in frontend.specs()]
    zoo = import_module(f"{'pt' if framework == 'pytorch' else 'tf'}_models.{name}")
    blocks = zoo.blocks(frontend.model)
    assert len(blocks) == count
    assert set().union(*(tensors_of(framework, block) for block in blocks)) == tensors_of(framework, frontend.model)
    assert [spec.name for spec in frontend.specs()] == paths  # to be cut changes no name
    inputs = frontend.to_device(batch(shape, classes))[0]
    if framework == "tensorflow":
        inputs = {key: frontend._ready(x, frontend._sample.inputs[key]) for key, x in inputs.items()}
    whole, parts = outputs_of(framework, frontend.model, blocks, inputs)
    np.testing.assert_allclose(np.asarray(parts), np.asarray(whole), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_blocks_are_bert(framework):
    tokens = np.array([[1, 5, 3, 0, 0], [4, 4, 2, 7, 0]])
    segments = np.array([[0, 0, 1, 0, 0], [0, 1, 1, 1, 0]])
    zoo = import_module(f"{'pt' if framework == 'pytorch' else 'tf'}_models.bert")
    shapes = {"tokens": (5,), "segments": (5,)}, {"words": 9, "next": 2}
    if framework == "pytorch":
        import torch

        torch.manual_seed(0)
        model = zoo.build(*shapes, **BERT).double()
        inputs = {"tokens": torch.from_numpy(tokens), "segments": torch.from_numpy(segments)}
    else:
        import keras
        import tensorflow as tf

        keras.config.set_dtype_policy("float64")
        keras.config.set_floatx("float64")
        model = zoo.build(*shapes, **BERT)
        inputs = {"tokens": tf.constant(tokens), "segments": tf.constant(segments)}
    blocks = zoo.blocks(model)
    assert len(blocks) == 4
    assert set().union(*(tensors_of(framework, block) for block in blocks)) == tensors_of(framework, model)
    whole, parts = outputs_of(framework, model, blocks, inputs)
    for key in ("words", "next"):
        np.testing.assert_allclose(np.asarray(parts[key]), np.asarray(whole[key]), rtol=1e-13, atol=1e-14)
