"""Models and data as a user brings them: ``tests.own_models:NAME``. Frameworks are loaded when a model is built."""

from __future__ import annotations

import numpy as np


def pytorch_dropout(input_shape, num_classes, rate: float = 0.5, norm: bool = True):
    import torch.nn as nn

    size = int(np.prod(input_shape))
    layers = [nn.Flatten(), nn.Linear(size, 16), nn.Dropout(rate), nn.Linear(16, num_classes)]
    return nn.Sequential(*layers[:2], *([nn.BatchNorm1d(16)] if norm else []), *layers[2:])


def keras_dropout(input_shape, num_classes, rate: float = 0.5, norm: bool = True):
    import keras
    from keras import layers

    middle = [layers.BatchNormalization()] if norm else []
    own = [layers.Flatten(), layers.Dense(16), *middle, layers.Dropout(rate), layers.Dense(num_classes)]
    return keras.Sequential([keras.Input(input_shape), *own])


def frozen(input_shape, num_classes):
    import torch.nn as nn

    model = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(input_shape)), num_classes))
    return model.requires_grad_(False)


def broken(input_shape, num_classes):
    raise ValueError("hidden must be even")


def bad_labels():
    inputs = np.zeros((8, 2), np.float32)
    return (inputs, np.arange(8)), (inputs, np.arange(8) + 5)
