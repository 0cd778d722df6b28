"""An autoencoder of dense layers: one multi-layer perceptron to a short code, another back to the input."""

import math

import torch.nn as nn
from torch import Tensor

from pt_models import mlp


class Autoencoder(nn.Module):
    """(n, *input_shape) -> the same shape."""

    def __init__(self, input_shape: tuple[int, ...], hidden: list[int], code: int, image: bool = True) -> None:
        super().__init__()
        self.encoder = mlp.MLP(input_shape, code, hidden, image)
        self.decoder = mlp.MLP((code,), math.prod(input_shape), hidden[::-1])
        self.shape = tuple(input_shape)

    def forward(self, x) -> Tensor:
        x = self.decoder(self.encoder(x))
        if not self.encoder.image:
            return x.view(-1, *self.shape)
        channels, height, width = self.shape
        return x.view(-1, height, width, channels).permute(0, 3, 1, 2)  # canonical axis order, like the kernels


def build(input_shape, hidden: list[int] = (128,), code: int = 32, image: bool = True) -> Autoencoder:
    """``image``: whether three axes are those of an image."""
    return Autoencoder(input_shape, list(hidden), code, image)


def neutral(model: Autoencoder) -> dict[str, tuple]:
    return {
        f"{part}.{native}": (f"{part}.{name}", *rest)
        for part in ("encoder", "decoder")
        for native, (name, *rest) in mlp.neutral(getattr(model, part)).items()
    }
