"""States of layers that are not variables."""

from __future__ import annotations

import warnings

import keras
import numpy as np

import hvd_train.keras as hk
from tests.keras.cases.models import BATCH, COUNT, SGD, TENSORFLOW, compiled, digits, fit, trained


class Scaled(keras.layers.Layer):
    """Holds a number that no configuration tells."""

    factor = None

    def call(self, x):
        return x if self.factor is None else x * self.factor


def states():
    """Layers that ``adapt`` gave a rank's part of the data, vocabularies in each rank's own order: rank 0's holds."""
    x, y = digits()
    part = slice(40 * hk.rank(), 300)
    found, told = {}, []
    inputs = {"image": keras.Input((64,), name="image")}
    normalization, bins = keras.layers.Normalization(), keras.layers.Discretization(num_bins=4)
    noisy = x + 0.3 * np.sin(np.arange(64 * COUNT)).reshape(COUNT, 64)
    normalization.adapt(noisy[part])
    bins.adapt(x[part, 20:28])
    given = {"image": x}
    layers = [normalization(inputs["image"]), keras.ops.cast(bins(inputs["image"]), "float64")]
    if TENSORFLOW:  # Keras on PyTorch takes no texts
        words = [f"w{k}" for k in range(17)]
        words = words[hk.rank() :] + words[: hk.rank()]
        given["text"] = np.array([f"w{a} w{b} w{c}" for a, b, c in (x[:, 20:23] * 16).astype(int)], object)
        given["word"] = np.array([f"w{k}" for k in (x[:, 30] * 16).astype(int)], object)
        inputs |= {name: keras.Input((), dtype="string", name=name) for name in ("text", "word")}
        texts = keras.layers.TextVectorization(output_sequence_length=3, vocabulary=words)
        weighed = keras.layers.TextVectorization(20, output_mode="tf_idf", pad_to_max_tokens=True)
        weighed.adapt(given["text"][part])
        embedded = keras.layers.Embedding(20, 3)(texts(inputs["text"]))
        layers += [keras.layers.Flatten()(embedded), keras.ops.cast(weighed(inputs["text"]), "float64")]
        layers += [keras.layers.StringLookup(vocabulary=words, output_mode="one_hot")(inputs["word"])]
        layers[-1] = keras.ops.cast(layers[-1], "float64")
    model = keras.Model(inputs, keras.layers.Dense(10)(keras.layers.Concatenate()(layers)))
    compiled(model).predict({k: v[:9] for k, v in given.items()}, verbose=0)  # traced with this rank's own state
    for run in ("first", "again"):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            hk.distribute(compiled(model, SGD(0.05)))
        told += [str(w.message) for w in warned if "rank 0's state" in str(w.message)]
        found[f"{run} score"] = np.array(model.evaluate(given, y, batch_size=BATCH, verbose=0))
        found |= {f"{run} {k}": v for k, v in trained(model, fit(model, given, y, epochs=1)).items()}
        found[f"{run} predicted"] = model.predict(given, verbose=0)
        normalization.adapt(noisy[: 99 - hk.rank()])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model.predict(given, verbose=0)  # adapted since
        scaled = Scaled()
        scaled.factor = np.full(64, 1.0 + hk.rank())
        hk.distribute(compiled(keras.Sequential([keras.Input((64,)), scaled, keras.layers.Dense(10)])))
    told += [str(w.message) for w in warned if "rank" in str(w.message)]
    return found | {"own/told": np.array(told)}
