"""Models that are lists of blocks, and some that cannot be cut. Frameworks are loaded when a model is built."""

from __future__ import annotations

import math


def pytorch(input_shape, num_classes, sizes=(24, 20, 16), norm: bool = True, dropout: float = 0.0):
    from torch import nn

    widths = [math.prod(input_shape), *sizes]
    blocks = [
        nn.Sequential(
            *([nn.Flatten()] if k == 0 else []),
            nn.Linear(a, b),
            *([nn.BatchNorm1d(b)] if norm else []),
            nn.ReLU(),
            nn.Dropout(dropout),
        )
        for k, (a, b) in enumerate(zip(widths, widths[1:], strict=False))
    ]
    return [*blocks, nn.Linear(widths[-1], num_classes)]


def tensorflow(input_shape, num_classes, sizes=(24, 20, 16), norm: bool = True, dropout: float = 0.0):
    import keras
    from keras import layers

    blocks = [
        keras.Sequential(
            [
                *([layers.Flatten()] if k == 0 else []),
                layers.Dense(b),
                *([layers.BatchNormalization()] if norm else []),
                layers.ReLU(),
                layers.Dropout(dropout),
            ]
        )
        for k, b in enumerate(sizes)
    ]
    return [*blocks, layers.Dense(num_classes)]


def pytorch_pair(input_shape, num_classes):
    """Its second block takes two tensors."""
    import torch
    from torch import nn

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, num_classes)

        def forward(self, x, y):
            return self.linear(x + y)

    return [nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), 8)), Two(), torch.nn.Linear(num_classes, 10)]


def pytorch_tuple(input_shape, num_classes):
    """Its first block gives two tensors."""
    from torch import nn

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(math.prod(input_shape), 8)

        def forward(self, x):
            x = self.linear(x.flatten(1))
            return x, x

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, num_classes)

        def forward(self, pair):
            return self.linear(pair[0])

    return [Two(), Last()]


def keras_mask(input_shape, num_classes):
    from keras import layers

    mask = layers.Masking()
    return [
        layers.Reshape((math.prod(input_shape), 1)),
        layers.Dense(4),
        mask,
        layers.LSTM(4),
        layers.Dense(num_classes),
    ]


def keras_regular(input_shape, num_classes):
    import keras
    from keras import layers

    return [layers.Flatten(), layers.Dense(8, kernel_regularizer=keras.regularizers.L2(0.1)), layers.Dense(num_classes)]


def of_label(outputs, labels):
    """A metric over all predictions: the median of the label's own output."""
    import numpy as np

    return float(np.median(outputs[np.arange(len(labels)), labels]))
