"""Evaluations and metrics of several outputs."""

from __future__ import annotations

import keras
import numpy as np

import hvd_train.keras as hk
from tests.script.keras.cases.losses import BatchError, BatchShare, reader, sequences
from tests.script.keras.cases.models import (
    BATCH,
    COUNT,
    SGD,
    TENSORFLOW,
    Batches,
    compiled,
    cross_entropy,
    digits,
    fit,
    network,
    trained,
)


class Tracked(keras.Model):
    """A loss of its own, whose mean alone are the metrics, as in the docstring of ``keras.Model.compute_loss``."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.tracker = keras.metrics.Mean(name="loss")

    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        loss = keras.ops.mean(keras.ops.square(y_pred - keras.ops.cast(keras.ops.one_hot(y, 10), y_pred.dtype)))
        self.tracker.update_state(loss)
        return loss

    @property
    def metrics(self):
        return [self.tracker]


def masked_scores():
    """Losses whose value depends on where batches are cut, in evaluation: masked and weighted means, sums."""
    x, y = sequences()
    weight = np.repeat(np.linspace(0.01, 3, COUNT)[:, None] ** 2, 7, 1)
    losses = {
        "mean": cross_entropy,
        "sum": lambda: cross_entropy(reduction="sum"),
        "weighted": lambda: cross_entropy(reduction="mean_with_sample_weight"),
        "own": lambda: lambda y, predicted: keras.ops.sum(cross_entropy(reduction=None)(y, predicted)) / 10,
    }
    kinds = {
        "mean": ["arrays", "few", "fewer", "sequence", "dataset", "stream"],
        "sum": ["arrays", "few", "stream"],
        "weighted": ["arrays"],
        "own": ["arrays", "sequence"],
    }
    results = {}
    for name, loss in losses.items():
        keras.utils.set_random_seed(3)
        model = reader()
        model.compile(SGD(0.01), loss=loss(), metrics=["accuracy"])
        hk.distribute(model)
        weighted = name in ("mean", "weighted")
        data_of = {
            "arrays": (x, y, *([weight] if weighted else [])),
            "few": (x[:60], y[:60]),
            "fewer": (x[:5], y[:5]),
            "sequence": (Batches(x[:157], y[:157]),),
        }
        if TENSORFLOW:
            import tensorflow as tf

            slices = tf.data.Dataset.from_tensor_slices((x[:157], y[:157]))
            data_of["dataset"] = (slices.batch(BATCH),)
            data_of["stream"] = (slices.filter(lambda *sample: True).batch(BATCH),)
        for kind in kinds[name]:
            if kind not in data_of:  # Keras on PyTorch
                continue
            data = data_of[kind]
            options = {"batch_size": BATCH, "sample_weight": data[2] if len(data) > 2 else None}
            options = options if kind in ("arrays", "few", "fewer") else {}
            results[f"{name} {kind}"] = np.asarray(model.evaluate(*data[:2], verbose=0, **options))
        history = fit(model, x, y, epochs=2, validation_data=data_of["arrays"], validation_freq=[2])
        results |= {f"{name} {k}": np.asarray(v) for k, v in history.items()}
    # A loss that leaves out labels itself; nothing in the model makes a mask.
    x, y = digits()
    model = hk.distribute(compiled(loss=cross_entropy(ignore_class=3)))
    results["ignored"] = np.asarray(model.evaluate(x, y, batch_size=BATCH, verbose=0))
    history = fit(model, x, y, validation_data=(x[:157], y[:157]))
    return results | {f"ignored {k}": np.asarray(v) for k, v in history.items()}


def own_error(y, predicted):
    """A number for a whole batch, as many scripts have it."""
    return keras.ops.mean(keras.ops.abs(keras.ops.cast(y, predicted.dtype) - keras.ops.mean(predicted, -1)))


def outputs():
    """All that ``history`` and ``evaluate`` say of several outputs: their losses, metrics and weighted metrics."""
    x, y = digits()
    results = {}
    weight = np.linspace(0.1, 2, COUNT) ** 2

    def heads(structure, kind=keras.Model):
        inputs = keras.Input((64,))
        hidden = keras.layers.Dense(16, "tanh", kernel_regularizer=keras.regularizers.L2(1e-2))(inputs)
        a, b = keras.layers.Dense(10, name="a")(hidden), keras.layers.Dense(1, name="b")(hidden)
        return kind(inputs, structure(a=a, b=b))

    def texts(structure):
        inputs = keras.Input((7,), dtype="int64")
        hidden = keras.layers.Dense(4, "tanh")(keras.layers.Embedding(10, 4, mask_zero=True)(inputs))
        return keras.Model(inputs, structure(a=keras.layers.Dense(5, name="a")(hidden), b=hidden[:, -1]))

    def pair(a, b):
        return [a, b]

    both = {"a": y, "b": x[:, 30:31]}
    by_name = {
        "loss": {"a": cross_entropy(), "b": "mse"},
        "loss_weights": {"a": 0.5, "b": 2.0},
        "metrics": {"a": ["accuracy", own_error], "b": "mae"},
        "weighted_metrics": {"a": "accuracy", "b": "mse"},
    }
    in_order = {"loss": [cross_entropy(reduction="sum"), keras.losses.Huber()], "metrics": [["accuracy"], ["mae"]]}
    one_loss = {"loss": "mse", "weighted_metrics": [["mae"], ["mae"]]}
    one_loss |= {"steps_per_execution": 3} if TENSORFLOW else {}
    words, tags = sequences()
    masked = {"loss": [cross_entropy(), "mae"], "metrics": [["accuracy"], ["mse"]], "loss_weights": [1.0, 0.3]}
    wrapper = type("Wrapper", (keras.metrics.MeanMetricWrapper,), {})
    of_batches = [own_error, cross_entropy(name="loss_object"), BatchError(), BatchShare(), wrapper(own_error)]
    plain = network()
    ways = {
        "dict": (heads(dict), by_name, x, both, {"a": weight, "b": weight[::-1]}),
        "list": (heads(pair), in_order, x, [y, x[:, 30:31]], None),
        "one": (heads(pair), one_loss, x, [x[:, :10], x[:, 30:31]], weight),
        "masked": (texts(pair), masked, words, [tags, x[:, :4]], None),
        "eager": (heads(dict), by_name | {"run_eagerly": True}, x, both, None),
        "tracked": (Tracked(plain.inputs, plain.outputs), {}, x, y, None),
        "single": (network(), {"loss": cross_entropy(), "metrics": [*of_batches, "accuracy"]}, x, y, None),
    }
    for name, (model, options, inputs, targets, weights) in ways.items():
        keras.utils.set_random_seed(3)
        model.compile(SGD(0.01), **options)
        hk.distribute(model)

        def some(rows, inputs=inputs, targets=targets, weights=weights):
            parts = (inputs, targets) if weights is None else (inputs, targets, weights)
            return keras.tree.map_structure(lambda a: a[rows], parts)

        chosen = {"validation_data": some(slice(0, 157)), "class_weight": None}
        if name == "single":
            chosen["class_weight"] = {k: 1 + k / 10 for k in range(10)}
        if name == "list" and TENSORFLOW:
            import tensorflow as tf

            def stream(count):
                rows, labels = some(slice(0, count))
                return tf.data.Dataset.from_tensor_slices((rows, tuple(labels))).batch(BATCH)

            history = fit(model, stream(COUNT), batch_size=None, validation_data=stream(157))
        else:
            history = fit(model, *some(slice(None))[:2], sample_weight=weights, **chosen)
        results |= {f"{name} {k}": np.asarray(v) for k, v in history.items()}
        x_y_weight = (*some(slice(0, 101)), None)[:3]
        score = model.evaluate(*x_y_weight[:2], BATCH, 0, x_y_weight[2], return_dict=True)
        results |= {f"{name} score {k}": np.asarray(v) for k, v in score.items()}
        results |= {f"{name} {k}": v for k, v in trained(model).items()}
    # A metric object of two models: each evaluation is weighted by the model that runs.
    shared = keras.metrics.MeanMetricWrapper(own_error, name="shared")
    models = [network(), network()]
    for model in models:
        model.compile(SGD(0.01), loss=cross_entropy(), metrics=[shared])
        hk.distribute(model)
    for number, model in enumerate(models):
        fit(model, x, y, epochs=1)
        score = models[0].evaluate(x[:101], y[:101], BATCH, 0, return_dict=True)
        results |= {f"shared {number} score {k}": np.asarray(v) for k, v in score.items()}
    return results
