"""Engines on TensorFlow: a handwritten process, MultiWorkerMirroredStrategy, ``fit`` with two lines of ours."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from work import BATCHES, LOSSES, MODELS, SGD, Count, cycle, held, keras_loss, keras_value, prepared, settings

EPOCH = 300  # steps per epoch of model.fit


def bare_tensorflow(model: str, count: Count, size: int) -> None:
    """Train in one process with a handwritten loop: one tf.function, Keras' SGD. The loss is of its own samples."""
    import keras
    import tensorflow as tf

    net, batches = prepared("tensorflow", model, int(os.environ.get("COPY", "0")), size)
    optimizer = keras.optimizers.SGD(SGD["lr"], SGD["momentum"])
    optimizer.build(net.trainable_variables)
    losses = keras_loss(keras, batches[0][1])

    @tf.function
    def step(inputs, labels) -> Any:
        with tf.GradientTape() as tape:
            loss = keras_value(losses, labels, net(inputs, training=True))
        optimizer.apply(tape.gradient(loss, net.trainable_variables), net.trainable_variables)
        return loss

    for inputs, labels in cycle(batches):
        loss = step(inputs, labels)
        loss.numpy()
        count(lambda loss=loss: float(loss))


def legacy_ops(tf) -> Any:
    """Return what the zoo uses of ``keras.ops``, which Keras 2 does not have."""
    from types import SimpleNamespace

    plain = ("matmul", "transpose", "reshape", "unstack", "cast", "equal", "pad")
    return SimpleNamespace(
        **{name: getattr(tf, name) for name in plain},
        softmax=tf.nn.softmax,
        erf=tf.math.erf,
        take=lambda x, at, axis: tf.gather(x, at, axis=axis),
        swapaxes=lambda x, a, b: tf.linalg.matrix_transpose(x),  # of the last two axes
        full=lambda shape, value, kind: tf.cast(tf.fill(shape, value), kind),
        triu=lambda x, k: x - tf.linalg.band_part(x, -1, k - 1),
    )


def multi_worker(model: str, count: Count) -> None:
    """Train by MultiWorkerMirroredStrategy with legacy Keras' ``fit`` (it raises under Keras 3)."""
    import tensorflow as tf
    import tf_keras

    sys.modules["keras"] = tf_keras  # the zoo's file builds the same network with Keras 2
    tf_keras.ops = legacy_ops(tf)
    tf_keras.backend.result_type = lambda *kinds: "float32"
    import importlib

    from hvd_train.config import Config
    from hvd_train.core.initialization import first_weight
    from hvd_train.data.catalog import open_data
    from hvd_train.data.loader import Loader
    from hvd_train.protocol import one_or_all

    threads = int(os.environ["OMP_NUM_THREADS"])
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    from tensorflow.python.eager import context

    # Otherwise a worker that waits for its turn is considered dead.
    service = context.context().configure_coordination_service
    context.context().configure_coordination_service = partial(service, heartbeat_timeout_in_ms=10**7)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rank, size = strategy.cluster_resolver.task_id, 2
    config = Config.model_validate(settings("tensorflow", model, {}))
    data = open_data(config.data, config.task)
    loader = Loader(data.train, global_batch=config.global_batch(size), rank=rank, size=size, seed=config.seed)
    held.append(data)
    steps = [step.micro_batches[0] for step, _ in zip(loader.epoch(0), range(BATCHES), strict=False)]
    images = {name: np.concatenate([batch.inputs[name] for batch in steps]) for name in data.sample.inputs}
    for name, field in data.sample.inputs.items():
        if field.divisor != 1:  # bytes, which our front-end converts to floats on the device
            images[name] = images[name].astype(np.float32) / np.float32(field.divisor)
    inputs = one_or_all(images)
    labels = one_or_all({name: np.concatenate([batch.labels[name] for batch in steps]) for name in data.sample.labels})

    with strategy.scope():
        options = dict(config.model.options)
        net = importlib.import_module(f"tf_models.{config.model.name}").build(
            data.sample.input_shape, data.sample.num_classes, **options
        )
        zoo = {"gamma": "scale", "beta": "bias"}  # the zoo's names
        for variable in net.trainable_variables:
            layer, _, kind = variable.name.partition(":")[0].rpartition("/")
            variable.assign(first_weight(f"{layer}.{zoo.get(kind, kind)}", tuple(variable.shape), 0))
        net.compile(
            tf_keras.optimizers.SGD(SGD["lr"], SGD["momentum"]),
            keras_loss(tf_keras, labels),
        )

    class Tick(tf_keras.callbacks.Callback):
        before = 0.0

        def on_train_batch_end(self, index, logs=None) -> None:
            def loss() -> float:  # logs hold the mean since the epoch began
                mean = float(logs["loss"])
                value = mean * (index + 1) - self.before * index
                self.before = mean
                return value / size  # it reports a sum over the workers

            count(loss)

    batch = config.batch_size
    assert batch
    dataset = strategy.distribute_datasets_from_function(
        lambda context: tf.data.Dataset.from_tensor_slices((inputs, labels)).batch(batch).repeat().prefetch(2)
    )
    net.fit(dataset, epochs=10**6, steps_per_epoch=10**6, verbose=0, callbacks=[Tick()])


def script_keras(model: str, count: Count, steps: int = 1) -> None:
    """Train by ``model.fit`` with two lines of ours, which divide the arrays."""
    import hvd_train.keras as hk  # isort: skip
    import keras

    net, batches = prepared("tensorflow", model, 0, 1, EPOCH)  # global batches: every rank has all of them
    inputs, labels = (np.concatenate([batch[i].numpy() for batch in batches]) for i in (0, 1))
    net.compile(
        keras.optimizers.SGD(SGD["lr"], SGD["momentum"]),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        steps_per_execution=steps,
    )
    hk.distribute(net)

    class Tick(keras.callbacks.Callback):
        means: list = [0.0]  # of the losses since the epoch began

        def on_train_batch_end(self, index, logs=None) -> None:
            if len(self.means) <= LOSSES:
                self.means.append(float(logs["loss"]) * (index + 1))
            count(lambda: self.means[-1] - self.means[-2]) if steps == 1 else [count() for _ in range(steps)]

    net.fit(inputs, labels, batch_size=MODELS[model][2], epochs=10**6, shuffle=False, verbose=0, callbacks=[Tick()])


TENSORFLOW: dict[str, Callable] = {
    "copies": lambda model, count: bare_tensorflow(model, count, 2),
    "one process": lambda model, count: bare_tensorflow(model, count, 1),
    "ours (model.fit)": script_keras,
    "ours (model.fit by 10)": partial(script_keras, steps=10),
    "MultiWorker": multi_worker,
}
