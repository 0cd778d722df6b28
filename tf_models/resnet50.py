"""ResNet-50 (He et al. 2015) for images of 224 x 224: four stages of bottleneck blocks (25.6 million weights)."""

from __future__ import annotations

import keras
from keras import layers

from tf_models.resnet import blocks, conv, need_images, neutral, norm, staged

IMAGES = True  # takes only images

__all__ = ["blocks", "build", "neutral"]


def _block(x, width: int, stride: int, name: str) -> keras.KerasTensor:
    """(n, height, width, into) -> (n, height / stride, width / stride, 4 width).

    The 3 x 3 convolution has the stride (Gross and Wilber 2016, "version 1.5"): in the first it would skip pixels.
    """
    y = layers.ReLU(name=f"{name}.relu1")(norm(conv(x, width, 1, 1, f"{name}.conv1"), f"{name}.norm1"))
    y = layers.ReLU(name=f"{name}.relu2")(norm(conv(y, width, 3, stride, f"{name}.conv2"), f"{name}.norm2"))
    y = norm(conv(y, 4 * width, 1, 1, f"{name}.conv3"), f"{name}.norm3")
    if stride != 1 or x.shape[-1] != 4 * width:
        x = norm(conv(x, 4 * width, 1, stride, f"{name}.conv4"), f"{name}.norm4")
    return layers.ReLU(name=f"{name}.relu3")(layers.Add(name=f"{name}.add")([y, x]))


def build(input_shape, num_classes, width: int = 64, blocks: list[int] = (3, 4, 6, 3)) -> keras.Model:
    """(n, height, width, channels) -> logits (n, num_classes); each stage after the first halves the sides."""
    need_images(input_shape, 32, "ResNet-50")
    inputs = keras.Input(input_shape)
    x = layers.ReLU(name="relu")(norm(conv(inputs, width, 7, 2, "stem"), "norm"))
    x = layers.ZeroPadding2D(1, name="maxpool.pad")(x)  # zeros, as no value is negative
    x = layers.MaxPooling2D(3, 2, name="maxpool")(x)
    return keras.Model(inputs, staged(x, num_classes, width, blocks, _block), name="resnet50")
