"""``model.fit`` with arrays, steps of the user's and several inputs."""

from __future__ import annotations

import keras
import numpy as np

import hvd_train.keras as hk
from tests.script.keras.cases.models import BATCH, COUNT, SGD, TENSORFLOW, Adam, compiled, digits, fit, network, trained


def arrays():
    x, y = digits()
    if hk.is_main():
        keras.layers.Dense(1)  # the layers of rank 0 have other numbers from here on
    model = hk.distribute(compiled())
    history = fit(model, x, y, validation_data=digits(157))
    score = model.evaluate(x[:101], y[:101], batch_size=BATCH, verbose=0)
    return trained(model, history, score=score, predicted=model.predict(x[:101], batch_size=7, verbose=0))


class TwoInputs(keras.Model):
    """Inputs in a dictionary, a train_step of its own, an embedding (sparse gradient), a layer that nothing uses."""

    def __init__(self):
        super().__init__()
        self.embedding, self.dense = keras.layers.Embedding(17, 3), keras.layers.Dense(10)
        self.unused = keras.layers.Dense(4)

    def build(self, shape=None):
        self.embedding.build((None, 64))
        self.dense.build((None, 64 * 3 + 64))
        self.unused.build((None, 5))
        self.built = True

    def call(self, inputs):
        embedded = keras.ops.reshape(self.embedding(inputs["pixels"]), (-1, 64 * 3))
        return self.dense(keras.ops.concatenate([embedded, inputs["image"]], -1))


class UserStep(keras.Model):
    def train_step(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        variables = self.trainable_variables
        if TENSORFLOW:
            import tensorflow as tf

            with tf.GradientTape() as tape:
                predicted = self(x, training=True)
                loss = self.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=weight)
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        else:
            self.zero_grad()
            predicted = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=weight)
            loss.backward()
            self.optimizer.apply([v.value.grad for v in variables], variables)
        for metric in self.metrics:
            metric.update_state(loss) if metric.name in ("loss", "own_mean") else metric.update_state(y, predicted)
        return self.get_metrics_result()


def user_step():
    inputs = keras.Input((64,))
    model = hk.distribute(compiled(UserStep(inputs, keras.layers.Dense(10)(inputs))))
    return trained(model, fit(model, *digits(), validation_data=digits(157)))


class OwnMean(keras.metrics.Mean):
    """A user's subclass, which means the same."""


class UserLogs(UserStep):
    """Its step gives more than the metrics' results, and something else than the result of one of them."""

    def train_step(self, data):
        logs = super().train_step(data)
        return logs | {"accuracy": logs["accuracy"] * 0 + 2, "more": logs["loss"] * 0 + 3}


class Named(UserStep):
    """Its step gives results by the metrics' names, as in Keras' guide: those of compile as a dict of their own."""

    def train_step(self, data):
        super().train_step(data)
        return {metric.name: metric.result() for metric in self.metrics}


def user_logs():
    x, y = digits(499)  # two ranks share the rest of 19, 10 and 9
    results = {}
    for kind in (UserLogs, Named):
        inputs = keras.Input((64,))
        model = kind(inputs, keras.layers.Dense(1, "sigmoid")(inputs))
        model.own_mean = OwnMean(name="own_mean")
        model.compile(SGD(0.1), "binary_crossentropy", metrics=["accuracy", keras.metrics.AUC(name="auc")])
        history = fit(hk.distribute(model), x, (y % 2)[:, None], validation_data=(x[:99], y[:99, None] % 2))
        results |= {f"{kind.__name__} {key}": value for key, value in trained(model, history).items()}
    return results


def rates():
    """A learning rate is multiplied once, however often its optimizer is compiled again."""
    model, optimizer = network(), Adam(0.01 / hk.size())
    for _ in range(2):
        hk.distribute(compiled(model, optimizer), lr_scaling="linear")
        history = fit(model, *digits(), epochs=1)
    return trained(model, history)


def two_inputs():
    x, y = digits()
    model = TwoInputs()
    model.build()
    model = hk.distribute(compiled(model))
    inputs = {"image": x, "pixels": (x * 16).astype("int32")}
    history = fit(model, inputs, y, sample_weight=np.linspace(0.5, 2, COUNT), validation_split=0.2)
    return trained(model, history, predicted=model.predict(inputs, verbose=0))


def class_weight():
    model = hk.distribute(compiled())
    return trained(model, fit(model, *digits(), class_weight={i: 1 + i / 10 for i in range(10)}))
