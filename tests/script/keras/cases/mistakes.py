"""Mistakes that are refused, and ranks that come to differ."""

from __future__ import annotations

import keras
import numpy as np

import hvd_train.keras as hk
from hvd_train.errors import TrainError
from hvd_train.script.shared import weight_check
from tests.script.keras.cases.data import Shuffled
from tests.script.keras.cases.models import BATCH, COUNT, Batches, compiled, cross_entropy, digits, fit, network


class Look(keras.callbacks.Callback):
    """Looks at a data set on one rank alone, after the first epoch."""

    def __init__(self, data):
        super().__init__()
        self.data = data

    def on_epoch_end(self, epoch, logs=None):
        if hk.rank() == 1 and epoch == 0:
            next(iter(self.data))


class Lengths(keras.utils.PyDataset):
    """Rows of 4 places, then of 8."""

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return np.ones((6, 4 if i < 2 else 8, 3))


def refused():
    """What each misuse is answered with, on this rank; the world goes on afterwards."""
    x, y = digits()
    shared = keras.optimizers.SGD(0.1)
    hk.distribute(compiled(optimizer=shared))
    two = hk.distribute(compiled())
    anew, again = hk.distribute(compiled()), hk.distribute(compiled())
    compiled(anew, anew.optimizer)
    compiled(again)
    divided = hk.distribute(compiled(), shard=False)
    unbuilt_alone = hk.distribute(compiled(keras.Sequential([keras.layers.Dense(10)])))
    frozen = network()
    frozen.layers[0].trainable = False
    frozen = hk.distribute(compiled(frozen))
    frozen.layers[0].trainable = True
    any_length = keras.Input((None, 3))
    long = hk.distribute(compiled(keras.Model(any_length, keras.layers.Dense(2)(any_length))))
    went_on = compiled()
    went_on.train_on_batch(x[:BATCH], y[:BATCH])
    pairs = keras.Input((4, 16), batch_size=10)
    keeps = keras.Model(pairs, keras.layers.Dense(10)(keras.layers.LSTM(4, stateful=True)(pairs)))
    hk.distribute(compiled(keeps))
    untaught = keras.layers.StringLookup()
    if hk.rank():
        untaught.adapt(np.array(["a", "b"]))
    scheduled = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9))

    def look(validates):
        import tensorflow as tf

        data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(COUNT, seed=5).batch(BATCH)
        train = (x, y) if validates else (data,)
        size = {"batch_size": BATCH if validates else None, "validation_data": data if validates else None}
        fit(hk.distribute(compiled()), *train, epochs=3, callbacks=[Look(data)], **size)

    misuses = {
        "twice": lambda: hk.distribute(two),
        "not compiled": lambda: hk.distribute(network()),
        "not built": lambda: unbuilt_alone.optimizer.apply([], []),
        "compiled again": lambda: fit(anew, x, y),
        "compiled again, then a batch": lambda: again.train_on_batch(x[:BATCH], y[:BATCH]),
        "other lengths predicted": lambda: long.predict(Lengths(), verbose=0),
        "other calls": lambda: fit(two, x, y) if hk.rank() else two.evaluate(x, y, verbose=0),
        "shared optimizer": lambda: hk.distribute(compiled(optimizer=shared)),
        "unseen variable": lambda: fit(frozen, x, y),
        "no reduction": lambda: hk.distribute(compiled(loss=cross_entropy(reduction=None))),
        "schedule": lambda: hk.distribute(compiled(optimizer=scheduled), lr_scaling="linear"),
        "trained before": lambda: hk.distribute(went_on, lr_scaling="linear"),
        "stateful": lambda: keeps.predict(x.reshape(-1, 4, 16), batch_size=10, verbose=0),
        "no such compression": lambda: hk.distribute(compiled(), compression="zip"),
        "ratio beyond 1": lambda: hk.distribute(compiled(), compression="topk", ratio=2.0),
        "few samples": lambda: fit(two, x[: hk.size() - 1], y[: hk.size() - 1]),
        "other data on a rank": lambda: fit(two, x + hk.rank(), y),
        "unseeded data": lambda: fit(two, np.random.default_rng().permuted(x, axis=0), y),
        "unseeded batches": lambda: fit(two, Batches(np.random.default_rng().permuted(x, axis=0), y), batch_size=None),
        "unseeded data to score": lambda: two.evaluate(np.random.default_rng().permuted(x, axis=0), y, verbose=0),
        "own unseeded order": lambda: fit(two, Shuffled(x, y, np.random.default_rng()), batch_size=None),
        "other batch_size on a rank": lambda: fit(two, x, y, batch_size=BATCH + hk.rank()),
        "other batches on a rank": lambda: fit(two, Batches(x, y, BATCH + hk.rank()), batch_size=None),
        "other network on a rank": lambda: hk.distribute(
            compiled(keras.Sequential([keras.Input((64,)), keras.layers.Dense(10 + hk.rank())]))
        ),
        "other settings of a layer": lambda: hk.distribute(
            compiled(keras.Sequential([keras.Input((64,)), keras.layers.Rescaling(hk.rank()), keras.layers.Dense(10)]))
        ),
        "a vocabulary on rank 1 alone": lambda: hk.distribute(
            compiled(keras.Sequential([keras.Input((7,), dtype="string"), untaught, keras.layers.Embedding(9, 2)]))
        ),
        "unequal steps": lambda: fit(divided, x[: 200 + 99 * hk.rank()], y[: 200 + 99 * hk.rank()]),
        "a look at shuffled data": lambda: look(False),
        "a look at shuffled data to score": lambda: look(True),
        "generator": lambda: fit(two, ((x[:9], y[:9]) for _ in range(5)), batch_size=None),
    }
    messages = {}
    for name, misuse in misuses.items():
        try:
            misuse()
        except TrainError as error:
            messages[name] = f"{error.exit_code} {error}"
    return {f"own/{name}": np.array(text) for name, text in messages.items()}


class LocalPlateau(keras.callbacks.Callback):
    """A user's own: goes by what this rank alone has seen."""

    def on_epoch_end(self, epoch, logs=None):
        if hk.rank() == 1 and epoch == 1:
            self.model.optimizer.learning_rate = 0.025


def apart():
    """What ranks are told whose weights or learning rates are not the same."""
    x, y = digits()
    weight_check._followed.clear()
    models = [hk.distribute(compiled()) for _ in range(7)]

    def on_one(model):
        if hk.rank() == 1:
            model.layers[-1].kernel.assign_add(np.full((32, 10), 1e-7))

    def batches(model, count, **options):
        for _ in range(count):
            model.train_on_batch(x[:BATCH], y[:BATCH])

    def loop(model):
        on_one(model)
        batches(model, 10)

    def rate(model):
        model.optimizer.learning_rate = 0.1 + 0.1 * hk.rank()
        batches(model, 2)

    def predicting(model):
        on_one(model)
        model.predict(x, verbose=0)

    def by_hand(model):
        """As by gradients of a tape that no optimizer has seen."""
        for part in hk.shard(x, batch_size=BATCH):
            model.layers[-1].kernel.assign_add(np.full((32, 10), float(keras.ops.mean(part))))

    def summed(model):
        weight_check._sums = 0
        on_one(model)
        hk.reduce(1.0)

    def within(model):
        """A train_step that uses the optimizer of a model within the model."""

        class Outer(keras.Model):
            def __init__(self):
                super().__init__()
                self.inner = compiled(keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)], name="inner"))

            def call(self, x):
                return self.inner(x)

            def train_step(self, data):
                scale = keras.ops.mean(data[0])  # differs between ranks, as gradients do
                weights = self.inner.trainable_variables
                self.inner.optimizer.apply([keras.ops.ones_like(w) * scale for w in weights], weights)
                return {}

        outer = Outer()
        outer.build((None, 64))
        outer.compile(keras.optimizers.SGD(0.1), run_eagerly=True)
        hk.distribute(outer)
        part = x[hk.rank() :: hk.size()]
        for _ in range(2):
            outer.train_on_batch(part, part)

    messages = {}

    def callback(model):
        fit(model, x, y, epochs=9, callbacks=[LocalPlateau()])

    cases = {"summed": summed, "by hand": by_hand, "within": within, "callback": callback, "loop": loop, "rate": rate}
    for name, misuse in (cases | {"scored": predicting}).items():
        try:
            misuse(models.pop())
        except TrainError as error:
            messages[name] = f"{error.exit_code} {error}"
    weight_check._followed.clear()  # or this process would not end well
    return {f"own/{name}": np.array(text) for name, text in messages.items()}
