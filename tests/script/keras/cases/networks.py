"""Autoencoders, GANs, models that are unbuilt, frozen or normalized."""

from __future__ import annotations

import keras
import numpy as np

import hvd_train.keras as hk
from tests.script.keras.cases.models import (
    BATCH,
    SGD,
    TENSORFLOW,
    WIDE,
    Adam,
    Batches,
    compiled,
    cross_entropy,
    digits,
    fit,
    network,
    trained,
)


class Autoencoder(keras.Model):
    """As in Keras' guide: no call, a step of its own for x alone, several losses and trackers; without noise, so that
    worlds can be compared."""

    def __init__(self):
        super().__init__()
        inputs, code = keras.Input((64,)), keras.Input((4,))
        self.encoder = keras.Model(inputs, [keras.layers.Dense(4)(inputs), keras.layers.Dense(4)(inputs)])
        self.decoder = keras.Model(code, keras.layers.Dense(64, "sigmoid")(code))
        self.built = not TENSORFLOW  # Keras on PyTorch asks for it, as its guide does
        self.trackers = [keras.metrics.Mean(name=name) for name in ("total", "kl")]

    @property
    def metrics(self):
        return self.trackers

    def losses_of(self, x):
        mean, log_variance = self.encoder(x)
        decoded = self.decoder(mean + keras.ops.exp(log_variance / 2) * keras.ops.sin(mean * 9))
        kl = keras.ops.mean(keras.ops.square(mean) + keras.ops.exp(log_variance) - log_variance - 1)
        return keras.ops.mean(
            keras.ops.sum(keras.losses.binary_crossentropy(x[..., None], decoded[..., None]), 1)
        ) + kl, kl

    def train_step(self, data):
        assert not isinstance(data, tuple | list), data
        loss, kl = descent(self.optimizer, self.trainable_weights, lambda: self.losses_of(data))
        for tracker, value in zip(self.trackers, (loss, kl), strict=True):
            tracker.update_state(value, sample_weight=keras.ops.shape(data)[0])
        return {tracker.name: tracker.result() for tracker in self.trackers}


def descent(optimizer, weights, losses):
    """A step down the first of ``losses()``; gives all of them."""
    if TENSORFLOW:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            values = losses()
        optimizer.apply(tape.gradient(values[0], weights), weights)
        return values
    import torch

    values = losses()
    gradients = torch.autograd.grad(values[0], [w.value for w in weights])
    with torch.no_grad():
        optimizer.apply(gradients, weights)
    return [x.detach() for x in values]


def vae():
    model = Autoencoder()
    model.compile(keras.optimizers.Adam(0.01))
    return trained(hk.distribute(model), fit(model, digits()[0]))


class Gan(keras.Model):
    """As in Keras' guide: two optimizers, given to a compile of its own; the noise is made from the images."""

    def __init__(self):
        super().__init__()
        self.discriminator = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(WIDE, "tanh"), keras.layers.Dense(1)]
        )
        self.generator = keras.Sequential([keras.Input((4,)), keras.layers.Dense(64, "sigmoid")])
        self.built = not TENSORFLOW

    def compile(self, d_optimizer, g_optimizer, loss):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_of = d_optimizer, g_optimizer, loss

    def train_step(self, real):
        noise = keras.ops.sin(real[:, 20:24] * 50)
        fake, count = self.generator(noise), keras.ops.shape(real)[0]
        labels = keras.ops.concatenate([keras.ops.ones((count, 1)), keras.ops.zeros((count, 1))])
        both = keras.ops.stop_gradient(keras.ops.concatenate([fake, real]))
        d = descent(
            self.d_optimizer,
            self.discriminator.trainable_weights,
            lambda: [self.loss_of(labels, self.discriminator(both))],
        )
        g = descent(
            self.g_optimizer,
            self.generator.trainable_weights,
            lambda: [self.loss_of(labels[count:], self.discriminator(self.generator(noise)))],
        )
        return {"d_loss": d[0], "g_loss": g[0]}


def gan(**exchange):
    def case():
        model = Gan()
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1, momentum=0.9), loss)
        hk.distribute(model, **exchange)
        fit(model, digits()[0])
        return trained(model)

    return case


class Endpoint(keras.layers.Layer):
    """Takes the targets as an input and adds the loss."""

    def call(self, targets, logits):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.add_loss(loss(targets, logits))
        return keras.ops.softmax(logits)


class Late(keras.Model):
    """Has no weights before it has seen a batch: inputs in a dictionary, two outputs."""

    def __init__(self):
        super().__init__()
        self.first, self.hidden = keras.layers.Dense(8, "tanh"), keras.layers.Dense(10)

    def call(self, inputs, training=None):
        hidden = self.first(inputs["image"])
        return [self.hidden(keras.ops.concatenate([hidden, inputs["more"][0]], -1)), hidden]


def unbuilt():
    """Models without weights, x alone, lists of inputs and of targets, in and out of ``fit``."""
    x, y = digits()
    results = {}
    late = Late()
    losses = [keras.losses.SparseCategoricalCrossentropy(from_logits=True), keras.losses.MeanSquaredError()]
    late.compile(SGD(0.1), losses)
    hk.distribute(late)
    inputs, targets = {"image": x, "more": [x[:, :3]]}, [y, x[:, :8]]
    validation = ({"image": x[:96], "more": [x[:96, :3]]}, [y[:96], x[:96, :8]])
    history = fit(late, inputs, targets, validation_data=validation, sample_weight=x[:, 3] + 1)
    # Keras' own figures of each loss are means over batches, however many samples one has.
    results["late"] = trained(late, {name: history[name] for name in ("loss", "val_loss")})
    results["predicted"] = {str(i): p for i, p in enumerate(late.predict(inputs, verbose=0))}
    sequential = keras.Sequential([keras.layers.Dense(16, "tanh"), keras.layers.Dense(10)])
    compiled(sequential)
    hk.distribute(sequential)
    results["score"] = {"": sequential.evaluate(x, y, verbose=0)}  # its first sight of data
    results["sequential"] = trained(sequential, fit(sequential, Batches(x, y), batch_size=None))
    image, label = keras.Input((64,), name="image"), keras.Input((), dtype="int64", name="label")
    ended = keras.Model({"image": image, "label": label}, Endpoint()(label, keras.layers.Dense(10)(image)))
    ended.compile(SGD(0.1))
    hk.distribute(ended)
    results["endpoint"] = trained(ended, fit(ended, {"image": x, "label": y}))
    pair = [keras.Input((64,)), keras.Input((3,))]
    two = keras.Model(pair, keras.layers.Dense(1)(keras.layers.Concatenate()(pair)))
    two.compile(SGD(0.01), "mse")
    hk.distribute(two)
    results["lists"] = trained(two, fit(two, [x, x[:, :3]], y / 10, validation_split=0.2))
    return {f"{name} {key}": np.asarray(value) for name, case in results.items() for key, value in case.items()}


def batchnorm_and_dropout():
    model = hk.distribute(compiled(network(dropout=0.5, batchnorm=True)))
    history = fit(model, *digits(), validation_data=digits(99), shuffle=True)
    seeds = [
        np.array(keras.ops.convert_to_numpy(v)) for v in model.variables if v.path.endswith("seed_generator_state")
    ]
    results = trained(model, history) | {f"loop {k}": v for k, v in statistics_of_a_loop().items()}
    return {k: v for k, v in results.items() if v.dtype.kind == "f"} | {"own/seed": np.array(seeds[0])}


def statistics_of_a_loop():
    """At the end of a loop of the user's own; rank 0 has gone through the batches alone before."""
    model, optimizer, loss_of = network(batchnorm=True), SGD(0.1), cross_entropy()
    hk.distribute(model, optimizer)
    batches = hk.shard(*digits(), batch_size=BATCH)
    list(batches) if hk.rank() == 0 else None
    batches.set_epoch(0)

    def step(x, y):
        descent(optimizer, model.trainable_weights, lambda: [loss_of(y, model(x, training=True))])

    for x, y in batches:
        step(x, y)
    results = trained(model)
    if TENSORFLOW:
        import tensorflow as tf

        traced = tf.function(step)
        for x, y in hk.shard(tf.data.Dataset.from_tensor_slices(digits()).batch(BATCH)):
            traced(x, y)
        results |= {f"dataset {k}": v for k, v in trained(model).items()}
    return results


class Fixed(keras.layers.Layer):
    """Weights that are not trained: ``fixed``, whose sum over the ranks is no number of 32 bits, ``local``, and
    ``seen``, a whole number."""

    def build(self, shape):
        self.fixed = self.add_weight(shape=(99,), dtype="float32", trainable=False)
        self.local = self.add_weight(shape=(2,), initializer="ones", trainable=False)
        self.seen = self.add_weight(shape=(), initializer="zeros", dtype="int64", trainable=False)
        limit = np.finfo("float32").max
        self.fixed.assign(np.append(np.random.default_rng(0).normal(size=97), [-limit, limit]).astype("float32"))

    def call(self, x):
        return x


def frozen():
    """What is equal on all ranks keeps its bits and is not sent at an epoch's end; what differs becomes its mean."""
    model = keras.Sequential([keras.Input((64,)), Fixed(), keras.layers.Dense(10)])
    hk.distribute(compiled(model))
    fixed, local = model.layers[0].fixed, model.layers[0].local
    before = keras.ops.convert_to_numpy(fixed).copy()
    fit(model, *digits(), epochs=1)
    local.assign_add([3.0 * hk.rank(), 0.0])
    model.layers[0].seen.assign_add(5 + hk.rank())
    model.predict(digits()[0], verbose=0)
    seen = keras.ops.convert_to_numpy(model.layers[0].seen)
    return trained(model) | {"same": np.array_equal(keras.ops.convert_to_numpy(fixed), before), "seen": seen}


def fine_tuning():
    """Freeze, fit; unfreeze, compile, distribute, fit; another loss for the same optimizer, fit."""
    model = network()
    model.layers[0].trainable = False
    hk.distribute(compiled(model, SGD(0.1)))
    first = fit(model, *digits(), epochs=1)
    model.layers[0].trainable = True
    hk.distribute(compiled(model, Adam(0.01)))
    second = fit(model, *digits(), validation_data=digits(99))
    weights = trained(model)
    hk.distribute(compiled(model, model.optimizer, cross_entropy(reduction="sum")))
    model.optimizer.learning_rate = 1e-4
    third = fit(model, *digits(), epochs=1)
    results = trained(
        model, {f"{k}{n}": v for n, fitted in enumerate((first, second, third)) for k, v in fitted.items()}
    )
    return (
        results | {f"second/{k}": v for k, v in weights.items()} | {"accuracy": model.evaluate(*digits(), verbose=0)[1]}
    )
