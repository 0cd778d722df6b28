"""Steps of a Keras model in local training, in one process."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_train.keras as hk
from hvd_train.errors import ConfigError
from hvd_train.script.keras.patches import MARK

X, Y = np.ones((4, 2), np.float32), np.zeros((4, 1), np.float32)


@pytest.fixture
def model():
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, use_bias=False), keras.layers.Dense(1)])
    made.compile(keras.optimizers.SGD(0.1), "mse")
    return hk.distribute(made, mode="outer", outer_steps=2)


def graph_step(model):
    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    return lambda: step(tf.constant(X), tf.constant(Y))


def test_steps_within_the_context_are_refused(model):
    model.train_on_batch(X, Y)
    with hk.global_weights(model), pytest.raises(ConfigError, match="a step within global_weights would be lost"):
        model.train_on_batch(X, Y)
    step = graph_step(model)
    with pytest.raises(ConfigError, match="a step within global_weights would be lost"), hk.global_weights(model):
        step()


def test_steps_of_a_graph_are_not_counted_while_the_model_has_the_global_weights(model):
    """A loop that is left early has one that is not counted; a look at data within the context must not join."""
    training, step = getattr(model, MARK).local, graph_step(model)
    train, scored = hk.shard(X, Y, batch_size=1), hk.shard(X, Y, batch_size=2)
    for k, _ in enumerate(train):
        step()
        if k == 1:
            break
    local = [w.copy() for w in model.get_weights()]
    assert training.taken == 1
    with hk.global_weights(model):
        for _ in scored:
            pass
        assert training.taken == 1
    assert all((a == b).all() for a, b in zip(model.get_weights(), local, strict=True))
    next(iter(train))
    assert training.taken == 2 and not training.update.diverged


def test_a_layer_that_is_loaded_between_two_rounds_stays_loaded(model):
    """The outer step moves the weights from there."""
    model.optimizer.learning_rate = 0.0
    model.layers[0].set_weights([np.full((2, 2), 5.0)])
    for _ in range(2):
        model.train_on_batch(X, Y)
    assert (model.get_weights()[0] == 5).all()
