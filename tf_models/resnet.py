"""ResNet-18 for small images (He et al. 2015): 3 x 3 stem, four stages of basic blocks (11.2 million weights)."""

import keras
from keras import layers


def _conv(x, out: int, side: int, stride: int, name: str):
    """A convolution whose padding is the same on all sides, as in PyTorch; 'same' pads a strided one otherwise."""
    if side > 1 and stride > 1:
        x = layers.ZeroPadding2D(side // 2, name=f"{name}.pad")(x)
    padding = "valid" if stride > 1 else "same"
    return layers.Conv2D(out, side, stride, padding, use_bias=False, name=name)(x)


def _norm(x, name: str):
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name=name)(x)


def _block(x, out: int, stride: int, name: str):
    """(n, height, width, into) -> (n, height / stride, width / stride, out)."""
    y = layers.ReLU(name=f"{name}.relu1")(_norm(_conv(x, out, 3, stride, f"{name}.conv1"), f"{name}.norm1"))
    y = _norm(_conv(y, out, 3, 1, f"{name}.conv2"), f"{name}.norm2")
    if stride != 1 or x.shape[-1] != out:
        x = _norm(_conv(x, out, 1, stride, f"{name}.conv3"), f"{name}.norm3")
    return layers.ReLU(name=f"{name}.relu2")(layers.Add(name=f"{name}.add")([y, x]))


def build(input_shape, num_classes, width: int = 64, blocks: list[int] = (2, 2, 2, 2)) -> keras.Model:
    """(n, height, width, channels) -> logits (n, num_classes); each stage after the first halves the sides."""
    sides = tuple(input_shape[:-1])
    if len(sides) != 2 or min(sides) < 8:
        found = " x ".join(map(str, sides)) or "vectors"
        raise ValueError(f"the ResNet needs images of at least 8 x 8, not {found}")
    inputs = keras.Input(input_shape)
    x = layers.ReLU(name="relu")(_norm(_conv(inputs, width, 3, 1, "stem"), "norm"))
    plan = [(width << stage, 2 if stage and k == 0 else 1) for stage, n in enumerate(blocks) for k in range(n)]
    for i, (out, stride) in enumerate(plan):
        x = _block(x, out, stride, f"blocks.{i}")
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(inputs, layers.Dense(num_classes, name="head")(x), name="resnet")


def neutral(model: keras.Model) -> dict[str, tuple]:
    names = {"gamma": "scale", "beta": "bias", "moving_mean": "mean", "moving_variance": "variance"}
    table = {}
    for v in model.variables:
        layer, _, own = v.path.rpartition("/")
        table[v.path] = (f"{layer}.{names.get(own, own)}", None, None, tuple(v.shape))
    return table
