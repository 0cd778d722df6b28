"""Losses that are no plain mean over samples."""

from __future__ import annotations

import warnings

import keras
import numpy as np

import hvd_train.keras as hk
from tests.script.keras.cases.models import BATCH, COUNT, GLOBAL, SGD, cross_entropy, digits, fit, network, trained


def summed():
    """A summed loss of 2 outputs, one of which counts more, beside a mean."""
    x, y = digits()
    inputs = keras.Input((64,))
    hidden = keras.layers.Dense(16, "tanh", kernel_regularizer=keras.regularizers.L2(1e-2))(inputs)
    model = keras.Model(inputs, [keras.layers.Dense(10, name="a")(hidden), keras.layers.Dense(1, name="b")(hidden)])
    losses = [cross_entropy(reduction="sum"), keras.losses.MeanSquaredError()]
    model.compile(SGD(0.001), loss=losses, loss_weights=[0.5, 2.0])
    targets = [y, x[:, :1]] if hk.size() == 1 else (y, x[:, :1])
    history = fit(hk.distribute(model), x, targets, validation_data=(x[:96], [t[:96] for t in targets]))
    return trained(model, {key: history[key] for key in ("loss", "val_loss")})


def sequences():
    """(COUNT, 7) whole numbers from 0, which is masked, to 9: samples differ in how many of them count."""
    x = np.round(digits()[0][:, 20:27] * 9).astype("int64")
    return x, (x + np.arange(7)) % 5


def reader(kind=keras.Model):
    inputs = keras.Input((7,), dtype="int64")
    embedded = keras.layers.Embedding(10, 4, mask_zero=True)(inputs)  # layers hand its mask on to the loss
    regularized = keras.layers.Dense(5, kernel_regularizer=keras.regularizers.L2(1e-2))
    return kind(inputs, regularized(keras.layers.Dense(4, "tanh")(embedded)))


def reading(kind=keras.Model, weights=False):
    """A loss over masked places; ``weights``: of samples, which differ much from rank to rank."""
    model = reader(kind)
    model.compile(SGD(0.1), loss=cross_entropy())
    weight = np.linspace(0.01, 3, COUNT)[:, None] ** 2 if weights else None
    return trained(model, fit(hk.distribute(model), *sequences(), sample_weight=weight))


def weighted_mean():
    model = network()
    model.compile(SGD(0.05), cross_entropy(reduction="mean_with_sample_weight"))
    return trained(model, fit(hk.distribute(model), *digits(), sample_weight=np.linspace(0.01, 3, COUNT) ** 2))


def own_mean(y, predicted):
    return keras.ops.mean(cross_entropy(reduction=None)(y, predicted))


def own_sum(y, predicted):
    return keras.ops.sum(cross_entropy(reduction=None)(y, predicted)) / 10


def own_root(y, predicted):
    return keras.ops.sqrt(own_mean(y, predicted))


def own_pairs(y, predicted):
    return keras.ops.logsumexp(predicted @ keras.ops.transpose(predicted), -1) / 100


def own_known(y, predicted):
    """The mean over labels other than 9, which a few samples may not show."""
    known = keras.ops.cast(keras.ops.reshape(y, (-1,)) < 9, "float64")
    return keras.ops.sum(known * cross_entropy(reduction=None)(y, predicted)) / keras.ops.maximum(
        keras.ops.sum(known), 1
    )


def own_ones(y, predicted):
    """The mean over labels of 1, of which a part of a batch may have none: not a number."""
    one = keras.ops.cast(keras.ops.reshape(y, (-1,)) == 1, "float64")
    return keras.ops.sum(one * cross_entropy(reduction=None)(y, predicted)) / keras.ops.sum(one)


class Counting(keras.layers.Layer):
    """Counts its calls, on which its loss depends."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.calls.assign_add(1)
        self.add_loss(keras.ops.mean(x**2) * keras.ops.cast(self.calls, x.dtype) / 100)
        return x


def recall_of_classes(y, predicted):
    """(classes,), each with its own count of samples."""
    labels = keras.ops.one_hot(keras.ops.cast(keras.ops.reshape(y, (-1,)), "int32"), 10)
    hits = keras.ops.sum(labels * keras.ops.one_hot(keras.ops.argmax(predicted, -1), 10), 0)
    return hits / keras.ops.maximum(keras.ops.sum(labels, 0), 1)


class Largest(keras.metrics.Metric):
    """The largest output: a maximum, which cannot be added over ranks."""

    def __init__(self):
        super().__init__(name="largest")
        self.largest = self.add_weight(name="largest", initializer="zeros")

    def update_state(self, y, predicted, sample_weight=None):
        self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(keras.ops.abs(predicted))))

    def result(self):
        return self.largest


class Share(keras.metrics.Mean):
    """The mean share of labels above 4."""

    def update_state(self, y, predicted, sample_weight=None):
        return super().update_state(keras.ops.cast(y > 4, "float64"), sample_weight)


class BatchError(keras.metrics.Metric):
    """The mean over batches of what ``of`` makes of a batch's errors (classes,)."""

    def __init__(self, of=lambda errors: errors, dtype=None, name="batch_error"):
        super().__init__(name=name)
        self.of, self.errors = of, self.add_weight(shape=(10,), name="errors", initializer="zeros")
        self.batches = self.add_weight(name="batches", initializer="zeros", dtype=dtype)

    def update_state(self, y, predicted, sample_weight=None):
        labels = keras.ops.one_hot(keras.ops.cast(keras.ops.reshape(y, (-1,)), "int32"), 10)
        self.errors.assign_add(self.of(keras.ops.mean((predicted - labels) ** 2, 0)))
        self.batches.assign_add(1)

    def result(self):
        return keras.ops.mean(self.errors) / keras.ops.cast(self.batches, self.errors.dtype)


class BatchShare(keras.metrics.Mean):
    """The mean over batches of their share of labels above 4."""

    def update_state(self, y, predicted, sample_weight=None):
        return super().update_state(keras.ops.mean(keras.ops.cast(y > 4, "float64")))


def own_losses():
    """Functions that give one number for a batch: a mean, a sum, and what is neither, which is told, as are losses that
    compare the samples of a batch."""
    results = {}
    for loss in (own_mean, own_sum, own_root, own_pairs, own_known, own_ones, keras.losses.Circle(name="circle")):
        keras.utils.set_random_seed(3)
        model = network()
        model.add(Counting())
        model.compile(SGD(0.02), loss)
        hk.distribute(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            history = fit(model, *digits(), epochs=1)
        messages = [str(w.message) for w in caught if "over samples" in str(w.message)]
        results[f"own/{getattr(loss, '__name__', 'circle')}"] = np.array(messages)
        if loss in (own_mean, own_sum):
            results |= {f"{loss.__name__}/{k}": v for k, v in trained(model, history).items()}
    results["own/correlation"] = np.array(told_correlation())
    results["own/metrics"] = np.array(told_metrics())
    results |= one_a_rank() | own_states()
    results["own/weighted_metric"] = np.array(weighted_metric())
    return results | {f"batches/{k}": v for k, v in own_batches().items()}


def weighted_metric():
    """A metric with a mask and weights of samples, in ``fit`` and in ``evaluate``, and what it is by hand."""
    x, y = sequences()
    weights = np.repeat(np.linspace(0.1, 3, COUNT)[:, None], 7, 1)
    model = reader()
    model.compile(SGD(0.0), cross_entropy(), weighted_metrics=[keras.metrics.SparseCategoricalAccuracy(name="hits")])
    hk.distribute(model)
    history = model.fit(x, y, batch_size=BATCH, sample_weight=weights, shuffle=False, verbose=0).history
    scored = model.evaluate(x, y, batch_size=BATCH, sample_weight=weights, verbose=0)[1]
    counted = weights * (x > 0)
    hits = model.predict(x, batch_size=BATCH, verbose=0).argmax(-1) == y
    return [history["hits"][0], scored, (hits * counted).sum() / counted.sum()]


class Annealed(keras.losses.Loss):
    """Its second part grows with the number of calls."""

    def __init__(self):
        super().__init__(name="annealed")
        self.calls = keras.Variable(0.0, trainable=False, dtype="float64")

    def call(self, y, predicted):
        self.calls.assign_add(1.0)
        share = keras.ops.minimum(1.0, keras.ops.convert_to_tensor(self.calls) / 20)
        return cross_entropy(reduction=None)(y, predicted) + share * keras.ops.mean(predicted**2, -1)


class Listed(keras.metrics.Metric):
    """The largest label: it keeps them in a list, which no rank sees of another."""

    def __init__(self):
        super().__init__(name="listed")
        self.labels = []

    def update_state(self, y, predicted, sample_weight=None):
        self.labels.append(float(keras.ops.max(y)))

    def reset_state(self):
        self.labels = []

    def result(self):
        return max(self.labels, default=0.0)


def share_of_large(y, predicted):
    return float(np.mean(keras.ops.convert_to_numpy(y) > 4))


def own_states():
    """A loss that counts its calls, metrics of Python's numbers and of a list, weights for a loss of one number."""
    results = {}
    for name, loss, options in (
        ("annealed", Annealed(), {}),
        ("listed", cross_entropy(), {"metrics": [Listed(), share_of_large], "run_eagerly": True}),
        ("weighed", own_mean, {"class_weight": {k: 1 + k for k in range(10)}}),
    ):
        keras.utils.set_random_seed(3)
        model = network()
        weights = options.pop("class_weight", None)
        model.compile(SGD(0.02), loss, **options)
        hk.distribute(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            history = fit(model, *digits(), epochs=1, class_weight=weights)
        words = [str(w.message) for w in caught]
        results[f"own/{name}"] = np.array([x for x in words if x.startswith(("the loss", "the metric"))])
        if name != "weighed":
            kept = {k: v for k, v in trained(model, history).items() if "listed" not in k}
            results |= {f"{name}/{k}": v for k, v in kept.items()}
    return results


def summed_squares(y, predicted):
    return keras.ops.sum(predicted**2) / 100


def one_a_rank():
    """A sum with one sample a rank, after evaluations of one sample, and of one for which it is 0."""
    x, y = digits(12)
    results = {}
    for name, first in {"sample": x[:1], "zero": 0 * x[:1]}.items():
        keras.utils.set_random_seed(3)
        model = network()
        model.compile(SGD(0.02), summed_squares)
        hk.distribute(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.evaluate(first, y[:1], verbose=0)
            history = fit(model, x, y, batch_size=2 // hk.size(), epochs=1, validation_data=(x, y))
        results |= {f"{name}/{k}": v for k, v in trained(model, history).items()}
        results[f"own/{name}"] = np.array([str(w.message) for w in caught if "the loss" in str(w.message)])
    return results


def told_correlation():
    """The warnings of a metric and of a loss of Keras over the samples of a batch."""
    model = network()
    model.compile(SGD(0.02), "mse", metrics=["accuracy", keras.metrics.PearsonCorrelation(axis=0), keras.losses.Dice()])
    hk.distribute(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        x, y = digits()
        fit(model, x, keras.utils.to_categorical(y, 10), epochs=1)
    return [str(w.message) for w in caught if "the metric" in str(w.message)]


def told_metrics():
    """The warnings of functions as metrics that give several numbers (one a class, or one a sample), and of classes."""

    def error(y, predicted):
        return cross_entropy(reduction=None)(y, predicted)

    model = network()
    batches = [
        BatchError(),
        BatchError(keras.ops.log, name="log"),
        BatchError(dtype="int32", name="whole"),
        BatchShare(),
    ]
    model.compile(SGD(0.02), cross_entropy(), metrics=[recall_of_classes, error, Largest(), Share(), *batches])
    hk.distribute(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(model, *digits(), epochs=1)
    return [str(w.message) for w in caught if "the metric" in str(w.message)]


def own_batches():
    """The sum in ``train_on_batch``, and scored after it, with ``test_on_batch`` as the first to see it."""
    x, y = digits()
    keras.utils.set_random_seed(3)
    model = network()
    model.compile(SGD(0.02), own_sum)
    hk.distribute(model)
    model.test_on_batch(x[:9], y[:9])
    for start in range(hk.rank() * BATCH, 3 * GLOBAL, GLOBAL):
        model.train_on_batch(x[start : start + BATCH], y[start : start + BATCH])
    return trained(model, score=model.evaluate(x, y, batch_size=BATCH, verbose=0))


def squares_of_columns(y, predicted):
    """A sum over samples, of each column."""
    return keras.ops.sum((y - predicted) ** 2, axis=0) / 100


def error_of_columns(y, predicted):
    return keras.ops.mean(keras.ops.abs(y - predicted), axis=0, keepdims=True)


def over_samples():
    """Losses and metrics that reduce over the samples, but not to one number; outputs (samples,), as of a score."""
    x, y = digits()
    results = {}
    for name, columns, loss, metrics in (
        ("columns", [keras.layers.Dense(3)], squares_of_columns, [error_of_columns]),
        ("scores", [keras.layers.Dense(1), keras.layers.Reshape(())], "mse", ["mae", "mean_squared_error"]),
    ):
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(8, "tanh"), *columns])
        model.compile(SGD(0.02), loss, metrics=metrics)
        hk.distribute(model)
        labels = np.stack([y, y**2, -y], 1) / 10 if name == "columns" else y / 10
        history = fit(model, x, labels, validation_data=(x[:130], labels[:130]))
        score = model.evaluate(x[:77], labels[:77], batch_size=BATCH, verbose=0)
        results |= {f"{name}/{k}": v for k, v in trained(model, history, score=score).items()}
    return results
