"""SINGA's CNN for 28 x 28 images: two convolutions with pooling, two dense layers (0.43 million weights)."""

import torch.nn as nn
from torch import Tensor

IMAGES = True  # takes only images


class CNN(nn.Module):
    """(n, channels, height, width) -> logits (n, num_classes)."""

    def __init__(self, input_shape: tuple[int, int, int], num_classes: int, hidden: int = 500) -> None:
        super().__init__()
        channels, height, width = input_shape
        # Each 5 x 5 convolution takes 4 from a side, each pooling halves it.
        self.flat = (50, ((height - 4) // 2 - 4) // 2, ((width - 4) // 2 - 4) // 2)
        if min(self.flat) < 1:
            raise ValueError(
                f"the CNN needs images of at least 16 x 16, not {height} x {width}; set data.image_size or resize yours"
            )
        self.conv1 = nn.Conv2d(channels, 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.fc1 = nn.Linear(self.flat[0] * self.flat[1] * self.flat[2], hidden)
        self.fc2 = nn.Linear(hidden, num_classes)
        self.pool = nn.MaxPool2d(2)
        self.relu = nn.ReLU()

    def forward(self, x) -> Tensor:
        x = self.pool(self.relu(self.conv1(x)))
        x = self.pool(self.relu(self.conv2(x)))
        return self.fc2(self.relu(self.fc1(x.flatten(1))))


def build(input_shape, num_classes, hidden: int = 500) -> CNN:
    return CNN(input_shape, num_classes, hidden)


def neutral(model: CNN) -> dict[str, tuple]:
    table = {}
    for layer in ("conv1", "conv2"):
        out, into, height, width = getattr(model, layer).weight.shape
        table[f"{layer}.weight"] = (f"{layer}.kernel", None, (2, 3, 1, 0), (height, width, into, out))
    for layer, view in (("fc1", model.flat), ("fc2", None)):
        out, into = getattr(model, layer).weight.shape
        # PyTorch flattens (channels, height, width); the canonical order is (height, width, channels).
        if view:
            table[f"{layer}.weight"] = (f"{layer}.kernel", (out, *view), (2, 3, 1, 0), (into, out))
        else:
            table[f"{layer}.weight"] = (f"{layer}.kernel", None, (1, 0), (into, out))
    for layer in ("conv1", "conv2", "fc1", "fc2"):
        shape = tuple(getattr(model, layer).bias.shape)
        table[f"{layer}.bias"] = (f"{layer}.bias", None, None, shape)
    return table
