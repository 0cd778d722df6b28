"""ResNet-18 for small images (He et al. 2015): 3 x 3 stem, four stages of basic blocks (11.2 million weights)."""

import torch.nn as nn
from torch import Tensor

IMAGES = True  # takes only images


def need_images(input_shape: tuple[int, ...], least: int, model: str) -> None:
    """Raise ValueError for samples that are not images, or with a side below ``least``."""
    sides = tuple(input_shape[1:])
    if len(sides) != 2 or min(sides) < least:
        sizes = " x ".join(map(str, sides)) or "vectors"
        raise ValueError(f"the {model} needs images of at least {least} x {least}, not {sizes}")


class Block(nn.Module):
    """(n, into, height, width) -> (n, out, height / stride, width / stride)."""

    growth = 1  # out / the stage's width

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(into, out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.project = stride != 1 or into != out
        if self.project:
            self.conv3 = nn.Conv2d(into, out, 1, stride, bias=False)
            self.norm3 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU()

    def forward(self, x) -> Tensor:
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        return self.relu(y + (self.norm3(self.conv3(x)) if self.project else x))


class ResNet(nn.Module):
    """(n, channels, height, width) -> logits (n, num_classes); each stage after the first halves the sides.

    The stem keeps an image's sides; for ``large`` images it divides them by 4.
    """

    def __init__(
        self, channels: int, num_classes: int, width: int, blocks: list[int], block: type = Block, large: bool = False
    ) -> None:
        super().__init__()
        side, stride = (7, 2) if large else (3, 1)
        self.stem = nn.Conv2d(channels, width, side, stride, padding=side // 2, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(3, 2, padding=1) if large else nn.Identity()
        self.blocks, into = nn.Sequential(), width
        for stage, count in enumerate(blocks):
            out = block.growth * width << stage
            for k in range(count):
                self.blocks.append(block(into, out, 2 if stage and k == 0 else 1))
                into = out
        self.head = nn.Linear(into, num_classes)

    def forward(self, x) -> Tensor:
        x = self.blocks(self.pool(self.relu(self.norm(self.stem(x)))))
        return self.head(x.mean((2, 3)))


def build(input_shape, num_classes, width: int = 64, blocks: list[int] = (2, 2, 2, 2)) -> ResNet:
    need_images(input_shape, 8, "ResNet")
    return ResNet(input_shape[0], num_classes, width, list(blocks))


class Stem(nn.Module):
    """(n, channels, height, width) -> (n, width, height, width): the part of a ResNet before its blocks."""

    def __init__(self, model: ResNet) -> None:
        super().__init__()
        self.stem, self.norm, self.relu, self.pool = model.stem, model.norm, model.relu, model.pool

    def forward(self, x) -> Tensor:
        return self.pool(self.relu(self.norm(self.stem(x))))


class Head(nn.Module):
    """(n, k, height, width) -> logits (n, num_classes)."""

    def __init__(self, model: ResNet) -> None:
        super().__init__()
        self.head = model.head

    def forward(self, x) -> Tensor:
        return self.head(x.mean((2, 3)))


def blocks(model: ResNet) -> list[nn.Module]:
    return [Stem(model), *model.blocks, Head(model)]


def neutral(model: nn.Module) -> dict[str, tuple]:
    names = {"running_mean": "mean", "running_var": "variance", "bias": "bias"}
    axes = {4: (2, 3, 1, 0), 2: (1, 0), 1: (0,)}  # of convolutions, dense layers and all others
    table = {}
    for path, x in model.state_dict().items():
        if x.ndim:  # batch norm's counter is a scalar that nothing uses
            layer, _, kind = path.rpartition(".")
            name = names.get(kind, "kernel" if x.ndim > 1 else "scale")
            table[path] = (f"{layer}.{name}", None, axes[x.ndim], tuple(x.shape[axis] for axis in axes[x.ndim]))
    return table
