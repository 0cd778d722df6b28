"""PyramidNet (Han et al. 2017) for small images: each block is a little wider (24.3 million weights)."""

import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from pt_models.resnet import need_images, neutral

IMAGES = True  # takes only images

__all__ = ["blocks", "build", "neutral"]


class Block(nn.Module):
    """(n, into, height, width) -> (n, out, height / stride, width / stride), sides rounded up.

    The shortcut has no weights: with stride 2 it is average pooled, and its new channels are zeros.
    """

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.new = out - into
        self.norm1 = nn.BatchNorm2d(into)
        self.conv1 = nn.Conv2d(into, out, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm3 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU()
        self.pool = nn.AvgPool2d(stride, ceil_mode=True) if stride > 1 else nn.Identity()

    def forward(self, x) -> Tensor:
        y = self.norm3(self.conv2(self.relu(self.norm2(self.conv1(self.norm1(x))))))
        return y + F.pad(self.pool(x), (0, 0, 0, 0, 0, self.new))


class PyramidNet(nn.Module):
    """(n, channels, height, width) -> logits (n, num_classes); each stage after the first halves the sides."""

    def __init__(self, channels: int, num_classes: int, width: int, blocks: list[int], alpha: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.blocks, into = nn.Sequential(), width
        for stage, count in enumerate(blocks):
            for k in range(count):
                out = width + alpha * (len(self.blocks) + 1) // sum(blocks)
                self.blocks.append(Block(into, out, 2 if stage and k == 0 else 1))
                into = out
        self.last = nn.BatchNorm2d(into)
        self.relu = nn.ReLU()
        self.head = nn.Linear(into, num_classes)

    def forward(self, x) -> Tensor:
        x = self.relu(self.last(self.blocks(self.norm(self.stem(x)))))
        return self.head(x.mean((2, 3)))


def build(input_shape, num_classes, width: int = 16, blocks: list[int] = (17, 17, 17), alpha: int = 255) -> PyramidNet:
    need_images(input_shape, 4, "PyramidNet")
    return PyramidNet(input_shape[0], num_classes, width, list(blocks), alpha)


class Stem(nn.Module):
    """(n, channels, height, width) -> (n, width, height, width): the part of a PyramidNet before its blocks."""

    def __init__(self, model: PyramidNet) -> None:
        super().__init__()
        self.stem, self.norm = model.stem, model.norm

    def forward(self, x) -> Tensor:
        return self.norm(self.stem(x))


class Head(nn.Module):
    """(n, k, height, width) -> logits (n, num_classes)."""

    def __init__(self, model: PyramidNet) -> None:
        super().__init__()
        self.last, self.relu, self.head = model.last, model.relu, model.head

    def forward(self, x) -> Tensor:
        return self.head(self.relu(self.last(x)).mean((2, 3)))


def blocks(model: PyramidNet) -> list[nn.Module]:
    return [Stem(model), *model.blocks, Head(model)]
