"""ResNet-50 (He et al. 2015) for images of 224 x 224: four stages of bottleneck blocks (25.6 million weights)."""

import torch.nn as nn
from torch import Tensor

from pt_models.resnet import ResNet, blocks, need_images, neutral

IMAGES = True  # takes only images

__all__ = ["blocks", "build", "neutral"]


class Block(nn.Module):
    """(n, into, height, width) -> (n, out, height / stride, width / stride); out / 4 channels in between.

    The 3 x 3 convolution has the stride (Gross and Wilber 2016, "version 1.5"): in the first it would skip pixels.
    """

    growth = 4  # out / the stage's width

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        inner = out // self.growth
        self.conv1 = nn.Conv2d(into, inner, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, out, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(out)
        self.project = stride != 1 or into != out
        if self.project:
            self.conv4 = nn.Conv2d(into, out, 1, stride, bias=False)
            self.norm4 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU()

    def forward(self, x) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm3(self.conv3(self.relu(self.norm2(self.conv2(y)))))
        return self.relu(y + (self.norm4(self.conv4(x)) if self.project else x))


def build(input_shape, num_classes, width: int = 64, blocks: list[int] = (3, 4, 6, 3)) -> ResNet:
    need_images(input_shape, 32, "ResNet-50")
    return ResNet(input_shape[0], num_classes, width, list(blocks), Block, large=True)
