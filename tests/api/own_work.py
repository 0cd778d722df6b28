"""Work of a user's own, through ``hvd_train.fit`` in 64 bits: ``python -m tests.api.own_work FRAMEWORK FOLDER``.

A regression with its own loss and metric, and a model of two inputs and two outputs; rank 0 leaves FOLDER/found.json.
The models' first weights are the same in both frameworks, and so is the global batch of every world.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

import hvd_train

RNG = np.random.default_rng(0)
SIZE, WORDS, WIDTH = 6, 9, 5
INPUT, SECOND, TABLE, VALUE, KIND = (
    RNG.normal(size=shape) / 2 for shape in ((SIZE, WIDTH), (WIDTH, 1), (WORDS, WIDTH), (WIDTH, 1), (WIDTH, 3))
)


# ---- the same functions in both frameworks


def softened(outputs, labels):
    """A value for each sample, of outputs (n, 1)."""
    return abs(outputs[:, 0] - labels) ** 1.5


def hit(outputs, labels):
    return abs(outputs[:, 0] - labels) < 0.5


def found_above(outputs, labels):
    """Of the samples found to be above 0, the share that is: the denominator follows from the outputs."""
    return labels > 0, outputs[:, 0] > 0


class Correlation:
    """Pearson's, of sums over all samples."""

    def __init__(self, stack):
        self.stack = stack  # the framework's

    def __call__(self, outputs, labels):
        z = outputs[:, 0]
        columns = [z * 0 + 1, z, labels, z * z, labels * labels, z * labels]
        return self.stack(columns, 1)

    def result(self, sums):
        n, z, y, zz, yy, zy = sums
        return (n * zy - z * y) / np.sqrt((n * zz - z * z) * (n * yy - y * y))


def known(outputs, labels):
    """Labels below -1 tell nothing."""
    return (outputs[:, 0] - labels) ** 2, labels > -1


def regression(count):
    x = np.random.default_rng(1).normal(size=(count, SIZE))
    return x, np.sin(x[:, 0]) + x[:, 1]


def two_by_two(count):
    rng = np.random.default_rng(2)
    inputs = {"numbers": rng.normal(size=(count, SIZE)), "words": rng.integers(0, WORDS, (count, 4))}
    value = inputs["numbers"][:, 0] + (inputs["words"] == 3).sum(1)
    return inputs, {"value": value, "kind": inputs["words"][:, 0] % 3}


def parts(whole, held=29):
    """(train, val), the last ``held`` samples for validation."""

    def cut(given, rows):
        return {name: x[rows] for name, x in given.items()} if isinstance(given, dict) else given[rows]

    return tuple(tuple(cut(x, rows) for x in whole) for rows in (slice(0, -held), slice(-held, None)))


# ---- the same models in each


def pytorch_models():
    import torch
    from torch import nn, stack

    def dense(kernel):
        made = nn.Linear(*kernel.shape)
        made.weight.data, made.bias.data = torch.tensor(kernel.T.copy()), torch.zeros(kernel.shape[1])
        return made

    class TwoByTwo(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding.from_pretrained(torch.tensor(TABLE), freeze=False)
            self.first, self.value, self.kind = dense(INPUT), dense(VALUE), dense(KIND)

        def forward(self, numbers, words):
            x = torch.tanh(self.first(numbers) + self.table(words).mean(1))
            return {"value": self.value(x), "kind": self.kind(x)}

    return lambda: nn.Sequential(dense(INPUT), nn.Tanh(), dense(SECOND)).double(), lambda: TwoByTwo().double(), stack


def keras_models():
    import keras
    from keras import layers

    def dense(kernel, activation=None):
        return layers.Dense(kernel.shape[1], activation, kernel_initializer=keras.initializers.Constant(kernel))

    def one():
        return keras.Sequential([keras.Input((SIZE,)), dense(INPUT, "tanh"), dense(SECOND)])

    def two():
        inputs = {"numbers": keras.Input((SIZE,)), "words": keras.Input((4,), dtype="int64")}
        table = layers.Embedding(WORDS, WIDTH, keras.initializers.Constant(TABLE))
        words = layers.GlobalAveragePooling1D()(table(inputs["words"]))
        x = layers.Activation("tanh")(layers.Add()([dense(INPUT)(inputs["numbers"]), words]))
        return keras.Model(inputs, {"value": dense(VALUE)(x), "kind": dense(KIND)(x)})

    return one, two, keras.ops.stack


def main(framework: str, folder: Path) -> None:
    one, two, stack = {"pytorch": pytorch_models, "tensorflow": keras_models}[framework]()
    keys = {"framework": framework, "precision": 64, "global_batch_size": 13, "max_epochs": 2, "tensorboard": False}
    keys |= {"optim": {"lr": 0.1, "momentum": 0.9}}
    first = hvd_train.fit(
        keys | {"run_dir": str(folder / "regression")},
        model=one,
        data=parts(regression(120)),
        loss=softened,
        metrics=[hit, found_above, Correlation(stack), "mae"],
    )
    second = hvd_train.fit(
        keys | {"run_dir": str(folder / "two_by_two")},
        model=two,
        data=lambda: parts(two_by_two(120)),
        loss={"value": known, "kind": "cross_entropy"},
        metrics={"value": [hit], "kind": ["accuracy", "f1"]},
    )
    if hvd_train.world().rank == 0:
        (folder / "found.json").write_text(json.dumps({"regression": dict(first), "two_by_two": dict(second)}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
