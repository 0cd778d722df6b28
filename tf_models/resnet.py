"""ResNet-18 for small images (He et al. 2015): 3 x 3 stem, four stages of basic blocks (11.2 million weights)."""

from __future__ import annotations

import keras
from keras import layers

from tf_models.mlp import cut

IMAGES = True  # takes only images


def need_images(input_shape: tuple[int, ...], least: int, model: str) -> None:
    """Raise ValueError for samples that are not images, or with a side below ``least``."""
    sides = tuple(input_shape[:-1])
    if len(sides) != 2 or min(sides) < least:
        sizes = " x ".join(map(str, sides)) or "vectors"
        raise ValueError(f"the {model} needs images of at least {least} x {least}, not {sizes}")


def conv(x, out: int, side: int, stride: int, name: str) -> keras.KerasTensor:
    """A convolution with equal padding on all sides, as in PyTorch; Keras' 'same' with a stride pads unequally."""
    if side > 1 and stride > 1:
        x = layers.ZeroPadding2D(side // 2, name=f"{name}.pad")(x)
    padding = "valid" if stride > 1 else "same"
    return layers.Conv2D(out, side, stride, padding, use_bias=False, name=name)(x)


def norm(x, name: str) -> keras.KerasTensor:
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name=name)(x)


def _block(x, width: int, stride: int, name: str) -> keras.KerasTensor:
    """(n, height, width, into) -> (n, height / stride, width / stride, width)."""
    y = layers.ReLU(name=f"{name}.relu1")(norm(conv(x, width, 3, stride, f"{name}.conv1"), f"{name}.norm1"))
    y = norm(conv(y, width, 3, 1, f"{name}.conv2"), f"{name}.norm2")
    if stride != 1 or x.shape[-1] != width:
        x = norm(conv(x, width, 1, stride, f"{name}.conv3"), f"{name}.norm3")
    return layers.ReLU(name=f"{name}.relu2")(layers.Add(name=f"{name}.add")([y, x]))


def staged(x, num_classes: int, width: int, blocks: list[int], block) -> keras.KerasTensor:
    """The layers after the stem: (n, height, width, channels) -> logits (n, num_classes)."""
    plan = [(width << stage, 2 if stage and k == 0 else 1) for stage, n in enumerate(blocks) for k in range(n)]
    for i, (out, stride) in enumerate(plan):
        x = block(x, out, stride, f"blocks.{i}")
    return layers.Dense(num_classes, name="head")(layers.GlobalAveragePooling2D(name="pool")(x))


def build(input_shape, num_classes, width: int = 64, blocks: list[int] = (2, 2, 2, 2)) -> keras.Model:
    """(n, height, width, channels) -> logits (n, num_classes); each stage after the first halves the sides."""
    need_images(input_shape, 8, "ResNet")
    inputs = keras.Input(input_shape)
    x = layers.ReLU(name="relu")(norm(conv(inputs, width, 3, 1, "stem"), "norm"))
    return keras.Model(inputs, staged(x, num_classes, width, blocks, _block), name="resnet")


def blocks(model: keras.Model) -> list[keras.Model]:
    names = [layer.name for layer in model.layers]
    stem = "maxpool" if "maxpool" in names else "relu"
    last = {name.rpartition(".")[0]: name for name in names if name.startswith("blocks.")}  # the last in each block
    return cut(model, [stem, *(name for block, name in last.items() if block.count(".") == 1)])


def neutral(model: keras.Model) -> dict[str, tuple]:
    names = {"gamma": "scale", "beta": "bias", "moving_mean": "mean", "moving_variance": "variance"}
    table = {}
    for v in model.variables:
        layer, _, kind = v.path.rpartition("/")
        table[v.path] = (f"{layer}.{names.get(kind, kind)}", None, None, tuple(v.shape))
    return table
