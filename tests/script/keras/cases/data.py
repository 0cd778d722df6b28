"""Data sets: PyDataset, tf.data, DataLoader, texts of different lengths."""

from __future__ import annotations

import random

import keras
import numpy as np

import hvd_train.keras as hk
from tests.script.keras.cases.models import (
    BATCH,
    COUNT,
    FOLDER,
    GLOBAL,
    TENSORFLOW,
    Adam,
    Batches,
    compiled,
    digits,
    fit,
    network,
    trained,
)


class Changing(Batches):
    """Other samples, or other views of them, after each pass."""

    def on_epoch_end(self):
        self.x = self.x * 1.1


def py_dataset():
    x, y = digits()
    model = hk.distribute(compiled())
    history = fit(model, Batches(x, y), batch_size=None, validation_data=Changing(x[:99], y[:99]))
    return trained(model, history, predicted=model.predict(Batches(x, y), verbose=0))


def steps():
    """Steps of an epoch, of a validation, of ``evaluate`` and ``predict``."""
    x, y = digits()
    few = {"steps_per_epoch": 4, "epochs": 5, "validation_steps": 2, "validation_freq": 2}
    later = few | {"initial_epoch": 2, "validation_data": Batches(x[:157], y[:157])}
    loaded = few | {"batch_size": None, "validation_data": torch_loader(157)}
    ways = {
        "few": ((x, y), few | {"validation_data": (x[:157], y[:157], x[:157, 3])}),
        "later": ((x, y), later | {"class_weight": {i: 1 + i / 10 for i in range(10)}}),
        "loader": ((torch_loader(COUNT),), loaded),
    }
    if TENSORFLOW:
        import tensorflow as tf

        stream = tf.data.Dataset.from_tensor_slices((x, y)).filter(lambda *sample: True).batch(BATCH).repeat()
        ways["repeated"] = ((stream,), few | {"batch_size": None, "validation_data": stream, "epochs": 2})
    results = {}
    for name, (data, options) in ways.items():
        keras.utils.set_random_seed(3)
        model = hk.distribute(compiled())
        results |= {f"{name} {k}": v for k, v in trained(model, fit(model, *data, **options)).items()}
    for name, data in {"arrays": (x, y), "sequence": (Batches(x, y),)}.items():
        options = {"steps": 3, "verbose": 0} | ({"batch_size": BATCH} if name == "arrays" else {})
        results[f"{name} score"] = np.asarray(model.evaluate(*data, **options))
        results[f"{name} predicted"] = model.predict(data[0], **options)
    return results


class Dense2d(keras.layers.Layer):
    """A RaggedTensor's rows, padded."""

    def call(self, x):
        return x.to_tensor() if hasattr(x, "ragged_rank") else x

    def compute_output_spec(self, x):
        return keras.KerasTensor((x.shape[0], None), x.dtype)


def lengths():
    """Texts of different lengths: padded batches, with a mask and without, TensorFlow's texts, ragged rows."""
    import tensorflow as tf

    x, y = digits()
    rows = [1 + np.round(image[20 : 23 + k % 7] * 9).astype("int64") for k, image in enumerate(x)]
    tags = [row % 5 for row in rows]
    tokens, words = keras.Input((None,), dtype="int64"), keras.Input((), dtype="string")
    vectors = keras.layers.TextVectorization(vocabulary=[f"w{k}" for k in range(1, 11)])

    def padded(count, targets):
        spec = tf.TensorSpec([None], tf.int64), tf.TensorSpec([None] * targets[0].ndim, tf.int64)
        pairs = tf.data.Dataset.from_generator(lambda: zip(rows[:count], targets, strict=False), output_signature=spec)
        return pairs.apply(tf.data.experimental.assert_cardinality(count)).padded_batch(BATCH)

    def pooled(inputs, ids, **embedding):
        hidden = keras.layers.Embedding(14, 4, **embedding)(ids)
        pool = keras.layers.GlobalAveragePooling1D() if embedding else keras.layers.GlobalMaxPooling1D()
        return keras.Model(inputs, keras.layers.Dense(10)(pool(hidden)))

    masked = keras.layers.Dense(4, "tanh")(keras.layers.Embedding(12, 4, mask_zero=True)(tokens))
    ragged = keras.Input((None,), ragged=True, dtype="int64")
    models = {
        "masked": keras.Model(tokens, keras.layers.Dense(5)(masked)),
        "padded": pooled(tokens, tokens),
        "texts": pooled(words, vectors(words), mask_zero=True),  # the layer pads what it gets
        "ragged": pooled(ragged, Dense2d()(ragged), mask_zero=True),
        "stream": pooled(tokens, tokens),
    }
    texts = tf.constant([" ".join(f"w{k}" for k in row) for row in rows])
    data = {
        "masked": lambda count: (padded(count, tags),),
        "padded": lambda count: (padded(count, y),),
        "texts": lambda count: (texts[:count], y[:count]),
        "ragged": lambda count: (tf.ragged.constant(rows)[:count], y[:count]),
        "stream": lambda count: (padded(count, y).filter(lambda *batch: True),),
    }
    results = {}
    for name, model in models.items():
        keras.utils.set_random_seed(3)
        hk.distribute(compiled(model))  # Keras alone squares each word's part of a gradient in Adam, not their sum
        size = BATCH if name in ("texts", "ragged") else None
        some = data[name](157)
        validation = some[0] if len(some) == 1 else some
        history = fit(model, *data[name](COUNT), batch_size=size, validation_data=validation)
        results |= {f"{name} {k}": v for k, v in trained(model, history).items()}
        results[f"{name} score"] = np.array(model.evaluate(*data[name](101), batch_size=size, verbose=0))
        if name != "masked":
            results[f"{name} predicted"] = model.predict(data[name](101)[0], batch_size=size, verbose=0)
    return results


class Shuffled(Batches):
    """Shuffles itself, as is usual, and augments what it gives."""

    def __init__(self, x, y, rng=np.random, noise=False):
        super().__init__(x, y)
        self.rng, self.noise, self.order = rng, noise, np.arange(len(x))

    def __getitem__(self, i):
        rows = self.order[i * self.batch : (i + 1) * self.batch]
        noise = [random.random(), np.random.random()] if self.noise else []
        return self.x[rows], self.y[rows], *([np.tile(noise, (len(rows), 1))] if self.noise else [])

    def on_epoch_end(self):
        self.rng.shuffle(self.order)


def self_shuffled():
    """With seeds it is the order that one process has."""
    model = hk.distribute(compiled())
    return trained(model, fit(model, Shuffled(*digits()), batch_size=None, epochs=3))


def tf_data():
    import tensorflow as tf

    x, y = digits()
    model = hk.distribute(compiled())
    data = (
        tf.data.Dataset.from_tensor_slices((x, y))
        .shuffle(99, seed=5, reshuffle_each_iteration=False)
        .batch(GLOBAL)
        .rebatch(BATCH)
    )
    data = data.apply(tf.data.experimental.assert_cardinality(-(-COUNT // BATCH)))
    validation = tf.data.Dataset.from_tensor_slices((x[:99], y[:99])).batch(BATCH)
    first = fit(model, data, batch_size=None, epochs=1, validation_data=validation)
    again = fit(model, data.repeat(), batch_size=None, epochs=2, steps_per_epoch=4)
    ids = keras.Input((), dtype="int64")
    words = keras.Model(ids, keras.layers.StringLookup(vocabulary=["a", "\u00e9", "ccc"], invert=True)(ids))
    words.compile("sgd", "mse")
    texts = hk.distribute(words).predict(y[:9] % 4, verbose=0)
    return trained(
        model,
        first | {f"again {k}": v for k, v in again.items()},
        predicted=model.predict(validation, verbose=0),
        lengths=[len(text.decode()) for text in texts],
    )


def uneven_number():
    """Batches of a generator whose number is known, and odd on two ranks: Adam counts no step that was not made."""
    import tensorflow as tf

    x, y = digits(GLOBAL * 2 + GLOBAL // 2)
    model = hk.distribute(compiled(network(), Adam(0.01)))
    spec = (tf.TensorSpec((None, 64), tf.float64), tf.TensorSpec((None,), tf.int64))

    def batches():
        for start in range(0, len(x), BATCH):
            yield x[start : start + BATCH], y[start : start + BATCH]

    data = tf.data.Dataset.from_generator(batches, output_signature=spec)
    data = data.apply(tf.data.experimental.assert_cardinality(-(-len(x) // BATCH)))
    history = fit(model, data, batch_size=None, epochs=3)
    return trained(model, history, steps=int(model.optimizer.iterations))


def torch_loader(count):
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    x, y = digits(count)
    return DataLoader(TensorDataset(torch.tensor(x), torch.tensor(y)), batch_size=BATCH)


def loader():
    """PyTorch's DataLoader, in fit and to be scored."""
    model = hk.distribute(compiled())
    history = fit(model, torch_loader(COUNT), batch_size=None, validation_data=torch_loader(157))
    return trained(model, history, predicted=model.predict(torch_loader(101), verbose=0))


def image_folder():
    """``image_dataset_from_directory`` in both its halves, as Keras' examples read images."""
    x, y = digits(160)
    folder = FOLDER / f"images.{hk.size()}.{hk.rank()}"
    for k, (image, label) in enumerate(zip(x.reshape(-1, 8, 8, 1), y, strict=True)):
        kind = folder / f"digit {label}"
        kind.mkdir(parents=True, exist_ok=True)
        keras.utils.save_img(kind / f"{k:03}.png", image * 255, scale=False)
    options = {"color_mode": "grayscale", "image_size": (8, 8), "batch_size": BATCH, "verbose": False}
    train, val = keras.utils.image_dataset_from_directory(
        folder, validation_split=0.2, subset="both", shuffle=False, **options
    )
    layers = keras.layers
    model = keras.Sequential([keras.Input((8, 8, 1)), layers.Rescaling(1 / 255), layers.Flatten(), layers.Dense(10)])
    model = hk.distribute(compiled(model))
    history = fit(model, train.cache().prefetch(2), batch_size=None, validation_data=val)
    return trained(model, history, predicted=model.predict(val, verbose=0), classes=len(train.class_names))


def undivided():
    """Data that the user has divided."""
    x, y = digits(480)
    starts = np.arange(0, 480, GLOBAL) + hk.rank() * BATCH
    model = hk.distribute(compiled(), shard=False)
    mine = (starts[:, None] + np.arange(BATCH)).ravel()
    return trained(model, fit(model, x[mine], y[mine]))
