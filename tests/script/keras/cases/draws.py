"""Random numbers."""

from __future__ import annotations

import random
import warnings

import keras
import numpy as np

import hvd_train.keras as hk
from tests.script.keras.cases.data import Shuffled
from tests.script.keras.cases.models import BATCH, DRAWN, TENSORFLOW, Batches


class Drawing(keras.Model):
    """A step that logs what it gets and what it draws."""

    def __init__(self, eager):
        super().__init__()
        self.layer, self.user_seed, self.eager = keras.layers.Dense(1), keras.random.SeedGenerator(5), eager
        self.layer.build((None, 1))
        self.built = True

    def call(self, x):
        return self.layer(x)

    def train_step(self, data):
        ids, *noise = data if isinstance(data, tuple | list) else (data,)
        drawn = [keras.random.normal(()), keras.random.normal((), seed=self.user_seed)]
        if TENSORFLOW:
            import tensorflow as tf

            drawn += [tf.random.normal(())]
        else:
            import torch

            drawn += [torch.randn(())]
        drawn += [random.random(), np.random.random()] if self.eager else []
        drawn += [x[0, i] for x in noise if len(x.shape) == 2 for i in range(2)]
        drawn = keras.ops.stack([keras.ops.cast(x, "float64") for x in drawn])
        ids = keras.ops.concatenate([keras.ops.cast(ids, "float64"), -keras.ops.ones((BATCH,), "float64")])[:BATCH]
        return {"ids": ids, "drawn": drawn}  # of one length on all ranks, as logs are averaged


class StepRecorder(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.steps = []

    def on_train_batch_end(self, batch, logs=None):
        self.steps.append({k: np.ravel(keras.ops.convert_to_numpy(v)) for k, v in logs.items()})


def draws():
    """[what a fit's steps got, what they drew] of this rank, with seeds and without."""
    results = {}
    ids = np.arange(DRAWN, dtype="float64")
    makers = {
        "sequence": lambda: Shuffled(ids, ids, noise=run != "other seeds"),
        "arrays": lambda: ids,
        "divided": lambda: Batches(ids, ids),
    }
    if TENSORFLOW:
        import tensorflow as tf

        def shuffling():
            yield from np.random.permutation(ids)

        spec = tf.TensorSpec((), tf.float64)
        sized = tf.data.experimental.assert_cardinality(DRAWN)
        makers["dataset"] = lambda: tf.data.Dataset.from_tensor_slices(ids).shuffle(99).batch(BATCH)
        makers["generator"] = lambda: (
            tf.data.Dataset.from_generator(shuffling, output_signature=spec).apply(sized).batch(BATCH)
        )
    again = [kind for kind in ("sequence", "dataset") if kind in makers]
    for run, kinds in {"first": makers, "again": again, "other seeds": ["sequence"]}.items():
        for kind in kinds:
            keras.utils.clear_session()
            keras.utils.set_random_seed(7)
            if run == "other seeds":
                random.seed(hk.rank())
                np.random.seed(hk.rank())
            eager, recorder = kind in ("arrays", "generator"), StepRecorder()
            model = Drawing(eager)
            model.compile("sgd", run_eagerly=eager)
            hk.distribute(model, shard=kind != "divided")
            after = []
            for _ in range(2):
                with warnings.catch_warnings(record=True) as warned:
                    model.fit(makers[kind](), batch_size=BATCH, epochs=2, verbose=0, callbacks=[recorder])
                after += [random.random(), np.random.random(), float(keras.random.normal(()))]
            ids_of = np.concatenate([step["ids"] for step in recorder.steps])
            results[f"own/{run} {kind} ids"] = ids_of[ids_of >= 0]
            results[f"own/{run} {kind} drawn"] = np.concatenate([step["drawn"] for step in recorder.steps])
            results[f"own/{run} {kind} after"] = np.array(after)
            results[f"own/{run} {kind} told"] = np.array([str(w.message) for w in warned if "eager" in str(w.message)])
    return results
