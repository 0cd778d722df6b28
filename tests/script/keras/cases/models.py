"""Models, data and options that cases share."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from hvd_train.frameworks import FRAMEWORKS, fast_import

with fast_import(FRAMEWORKS["tensorflow"].unneeded):
    import keras

import hvd_train.keras as hk
from hvd_train.data.formats import read_digits

GLOBAL = 48
BATCH = GLOBAL // hk.size()  # a rank
DRAWN = 2 * GLOBAL + 20  # samples of the case that looks at random numbers
COUNT = 500  # 500 = 10 global batches of 48 and a rest of 20, which 3 ranks share 7, 7, 6
WIDE = 128  # a layer that is large enough to be compressed
TENSORFLOW = keras.backend.backend() == "tensorflow"
FOLDER = Path(sys.argv[1])


SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam


def digits(count: int = COUNT):
    images, labels = read_digits()
    return images[:count].reshape(-1, 64) / 16, labels[:count].astype("int64")


def network(dropout: float = 0.0, batchnorm: bool = False, hidden: int = 32):
    layers = [keras.Input((64,)), keras.layers.Dense(hidden, "tanh", kernel_regularizer=keras.regularizers.L2(1e-3))]
    layers += [keras.layers.BatchNormalization()] if batchnorm else []
    layers += [keras.layers.Dropout(dropout)] if dropout else []
    return keras.Sequential([*layers, keras.layers.Dense(10)])


def compiled(model=None, optimizer=None, loss=None, **options):
    model = model or network()
    loss = loss or cross_entropy()
    model.compile(optimizer or keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"], **options)
    return model


def fit(model, *data, epochs=2, **options):
    options = {"batch_size": BATCH, "epochs": epochs, "shuffle": False, "verbose": 0} | options
    return model.fit(*data, **options).history


def trained(model, history=None, **more):
    """What a case hands back: weights, the optimizer's variables, the logs of the epochs."""
    results = {f"weights/{i}": np.array(w) for i, w in enumerate(model.get_weights())}
    results |= {f"history/{k}": np.array(v) for k, v in (history or {}).items()}
    return results | {k: np.asarray(v) for k, v in more.items()}


def simple(optimizer, **options):
    def case():
        model = hk.distribute(compiled(network(), optimizer(), **options))
        return trained(model, fit(model, *digits()))

    return case


def cross_entropy(**options):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


class Batches(keras.utils.PyDataset):
    def __init__(self, x, y, batch=BATCH):
        super().__init__()
        self.x, self.y, self.batch = x, y, batch

    def __len__(self):
        return -(-len(self.x) // self.batch)

    def __getitem__(self, i):
        rows = slice(i * self.batch, (i + 1) * self.batch)
        return self.x[rows], self.y[rows]
