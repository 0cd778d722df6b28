"""PyramidNet (Han et al. 2017) for small images: each block is a little wider (24.3 million weights)."""

from __future__ import annotations

import keras
from keras import layers, ops

from tf_models.mlp import cut
from tf_models.resnet import conv, need_images, neutral, norm

IMAGES = True  # takes only images

__all__ = ["blocks", "build", "neutral"]


def _block(x, out: int, stride: int, name: str) -> keras.KerasTensor:
    """(n, height, width, into) -> (n, height / stride, width / stride, out), sides rounded up.

    The shortcut has no weights: with stride 2 it is average pooled, and its new channels are zeros.
    """
    y = conv(norm(x, f"{name}.norm1"), out, 3, stride, f"{name}.conv1")
    y = layers.ReLU(name=f"{name}.relu")(norm(y, f"{name}.norm2"))
    y = norm(conv(y, out, 3, 1, f"{name}.conv2"), f"{name}.norm3")
    if stride > 1:
        x = layers.AveragePooling2D(stride, padding="same", name=f"{name}.pool")(x)
    x = ops.pad(x, [(0, 0), (0, 0), (0, 0), (0, out - x.shape[-1])])
    return layers.Add(name=f"{name}.add")([y, x])


def build(input_shape, num_classes, width: int = 16, blocks: list[int] = (17, 17, 17), alpha: int = 255) -> keras.Model:
    """(n, height, width, channels) -> logits (n, num_classes); each stage after the first halves the sides."""
    need_images(input_shape, 4, "PyramidNet")
    inputs = keras.Input(input_shape)
    x = norm(conv(inputs, width, 3, 1, "stem"), "norm")
    strides = [2 if stage and k == 0 else 1 for stage, count in enumerate(blocks) for k in range(count)]
    for i, stride in enumerate(strides):
        x = _block(x, width + alpha * (i + 1) // len(strides), stride, f"blocks.{i}")
    x = layers.ReLU(name="relu")(norm(x, "last"))
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(inputs, layers.Dense(num_classes, name="head")(x), name="pyramidnet")


def blocks(model: keras.Model) -> list[keras.Model]:
    return cut(model, ["norm", *(layer.name for layer in model.layers if layer.name.endswith(".add"))])
