"""A multi-layer perceptron on the flattened input: dense layers with ReLU between them."""

import math

import torch.nn as nn
from torch import Tensor


class MLP(nn.Module):
    """(n, *input_shape) -> logits (n, num_classes)."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, hidden: list[int], image: bool = True) -> None:
        super().__init__()
        self.input_shape, self.image = tuple(input_shape), image and len(input_shape) == 3
        sizes = [math.prod(input_shape), *hidden, num_classes]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False))
        self.relu = nn.ReLU()

    def forward(self, x) -> Tensor:
        x = x.flatten(1)
        for layer in self.layers[:-1]:
            x = self.relu(layer(x))
        return self.layers[-1](x)


def build(input_shape, num_classes, hidden: list[int] = (128,), outputs: int = 1, image: bool = True) -> MLP:
    """``outputs``: how many, if labels are not classes; ``image``: whether three axes are those of an image."""
    return MLP(input_shape, num_classes or outputs, list(hidden), image)


class Part(nn.Module):
    """A layer of an MLP and its ReLU; the first layer flattens its input, the last has no ReLU."""

    def __init__(self, model: MLP, number: int) -> None:
        super().__init__()
        self.layer, self.first = model.layers[number], number == 0
        self.end = nn.Identity() if number == len(model.layers) - 1 else model.relu

    def forward(self, x) -> Tensor:
        return self.end(self.layer(x.flatten(1) if self.first else x))


def blocks(model: MLP) -> list[nn.Module]:
    return [Part(model, number) for number in range(len(model.layers))]


def neutral(model: MLP) -> dict[str, tuple]:
    table = {}
    for i, layer in enumerate(model.layers):
        out, into = layer.weight.shape
        if i == 0 and model.image:  # (channels, height, width) -> (height, width, channels)
            table[f"layers.{i}.weight"] = (f"fc{i + 1}.kernel", (out, *model.input_shape), (2, 3, 1, 0), (into, out))
        else:
            table[f"layers.{i}.weight"] = (f"fc{i + 1}.kernel", None, (1, 0), (into, out))
        table[f"layers.{i}.bias"] = (f"fc{i + 1}.bias", None, None, (out,))
    return table
