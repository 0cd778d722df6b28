"""Many thin dense layers in a row, 200 by default: a step is all latency, with hardly any arithmetic."""

import math

import torch
import torch.nn as nn


class Thin(nn.Module):
    """(n, *input_shape) -> logits (n, num_classes).

    The layers between the first and the last are x + dense(relu(x)) / sqrt(depth). Each adds 1 / depth of the variance,
    so that any depth trains without normalization. (With the ReLU outside the dense layer, the means would add up.)
    """

    def __init__(
        self, input_shape: tuple[int, ...], num_classes: int, depth: int, width: int, image: bool = True
    ) -> None:
        super().__init__()
        if depth < 2:
            raise ValueError(f"depth counts the first and the last layer, so it is at least 2, not {depth}")
        self.factor = 1 / math.sqrt(depth)
        self.image = image and len(input_shape) == 3
        sizes = [math.prod(input_shape), *[width] * (depth - 1), num_classes]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False))

    def forward(self, x) -> torch.Tensor:
        if self.image:  # canonical axis order, so that no kernel needs another
            x = x.permute(0, 2, 3, 1)
        first, *middle, last = self.layers
        x = first(x.flatten(1))
        for layer in middle:
            x = torch.add(x, layer(torch.relu(x)), alpha=self.factor)
        return last(torch.relu(x))


def build(input_shape, num_classes, depth: int = 200, width: int = 32, image: bool = True) -> Thin:
    """``image``: whether three axes are those of an image."""
    return Thin(input_shape, num_classes, depth, width, image)


class Part(nn.Module):
    """One layer of a Thin, with the operations on its input."""

    def __init__(self, model: Thin, number: int) -> None:
        super().__init__()
        self.layer, self.factor, self.image = model.layers[number], model.factor, model.image
        self.first, self.last = number == 0, number == len(model.layers) - 1

    def forward(self, x) -> torch.Tensor:
        if self.first:
            return self.layer((x.permute(0, 2, 3, 1) if self.image else x).flatten(1))
        y = self.layer(torch.relu(x))
        return y if self.last else torch.add(x, y, alpha=self.factor)


def blocks(model: Thin) -> list[nn.Module]:
    return [Part(model, number) for number in range(len(model.layers))]


def neutral(model: Thin) -> dict[str, tuple]:
    table = {}
    for i, layer in enumerate(model.layers):
        out, into = layer.weight.shape
        table[f"layers.{i}.weight"] = (f"layers.{i}.kernel", None, (1, 0), (into, out))
        table[f"layers.{i}.bias"] = (f"layers.{i}.bias", None, None, (out,))
    return table
