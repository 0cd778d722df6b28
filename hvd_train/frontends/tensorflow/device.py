"""The device of a rank in TensorFlow."""

from __future__ import annotations

import tensorflow as tf

from hvd_train.config import Config
from hvd_train.frontends.devices import gpu_of
from hvd_train.protocol import Communicator


def device_of(config: Config, communicator: Communicator) -> str:
    gpus = tf.config.list_physical_devices("GPU")
    index = gpu_of(config, communicator, len(gpus), "TensorFlow")
    tf.config.set_visible_devices([] if index is None else [gpus[index]], "GPU")
    if index is None:
        return "/CPU:0"
    tf.config.experimental.set_memory_growth(gpus[index], True)
    return "/GPU:0"
