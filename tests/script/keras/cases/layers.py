"""States of layers that are not variables."""

from __future__ import annotations

import warnings

import keras
import numpy as np

import hvd_train.keras as hk
from tests.script.keras.cases.models import BATCH, COUNT, SGD, TENSORFLOW, compiled, digits, fit, trained


class Scaled(keras.layers.Layer):
    """Holds a number that no configuration tells."""

    factor = None

    def call(self, x):
        return x if self.factor is None else x * self.factor


def states():
    """Layers that ``adapt`` gave a rank's part of the data, vocabularies in each rank's own order: rank 0's holds."""
    x, y = digits()
    part = slice(40 * hk.rank(), 300)
    results, messages = {}, []
    inputs = {"image": keras.Input((64,), name="image")}
    normalization, bins = keras.layers.Normalization(), keras.layers.Discretization(num_bins=4)
    noisy = x + 0.3 * np.sin(np.arange(64 * COUNT)).reshape(COUNT, 64)
    normalization.adapt(noisy[part])
    bins.adapt(x[part, 20:28])
    inputs_by_name = {"image": x}
    layers = [normalization(inputs["image"]), keras.ops.cast(bins(inputs["image"]), "float64")]
    if TENSORFLOW:  # Keras on PyTorch takes no texts
        words = [f"w{k}" for k in range(17)]
        words = words[hk.rank() :] + words[: hk.rank()]
        inputs_by_name["text"] = np.array([f"w{a} w{b} w{c}" for a, b, c in (x[:, 20:23] * 16).astype(int)], object)
        inputs_by_name["word"] = np.array([f"w{k}" for k in (x[:, 30] * 16).astype(int)], object)
        inputs |= {name: keras.Input((), dtype="string", name=name) for name in ("text", "word")}
        texts = keras.layers.TextVectorization(output_sequence_length=3, vocabulary=words)
        weighed = keras.layers.TextVectorization(20, output_mode="tf_idf", pad_to_max_tokens=True)
        weighed.adapt(inputs_by_name["text"][part])
        embedded = keras.layers.Embedding(20, 3)(texts(inputs["text"]))
        layers += [keras.layers.Flatten()(embedded), keras.ops.cast(weighed(inputs["text"]), "float64")]
        layers += [keras.layers.StringLookup(vocabulary=words, output_mode="one_hot")(inputs["word"])]
        layers[-1] = keras.ops.cast(layers[-1], "float64")
    model = keras.Model(inputs, keras.layers.Dense(10)(keras.layers.Concatenate()(layers)))
    # Traced with this rank's state.
    compiled(model).predict({k: v[:9] for k, v in inputs_by_name.items()}, verbose=0)
    for run in ("first", "again"):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            hk.distribute(compiled(model, SGD(0.05)))
        messages += [str(w.message) for w in warned if "rank 0's state" in str(w.message)]
        results[f"{run} score"] = np.array(model.evaluate(inputs_by_name, y, batch_size=BATCH, verbose=0))
        results |= {f"{run} {k}": v for k, v in trained(model, fit(model, inputs_by_name, y, epochs=1)).items()}
        results[f"{run} predicted"] = model.predict(inputs_by_name, verbose=0)
        normalization.adapt(noisy[: 99 - hk.rank()])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model.predict(inputs_by_name, verbose=0)  # adapted since
        scaled = Scaled()
        scaled.factor = np.full(64, 1.0 + hk.rank())
        hk.distribute(compiled(keras.Sequential([keras.Input((64,)), scaled, keras.layers.Dense(10)])))
    messages += [str(w.message) for w in warned if "rank" in str(w.message)]
    return results | {"own/told": np.array(messages)}
