"""The device of a rank in TensorFlow, and the types that it computes in."""

from __future__ import annotations

import tensorflow as tf

from hvd_train.config import Config
from hvd_train.frontends.devices import gpu_of
from hvd_train.protocol import Communicator

DTYPES = {"64": "float64"}  # of weights; all other precisions: float32
MIXED = {"16-mixed": "mixed_float16", "bf16-mixed": "mixed_bfloat16"}


def device_of(config: Config, communicator: Communicator) -> str:
    gpus = tf.config.list_physical_devices("GPU")
    index = gpu_of(config, communicator, len(gpus), "TensorFlow")
    tf.config.set_visible_devices([] if index is None else [gpus[index]], "GPU")
    if index is None:
        return "/CPU:0"
    tf.config.experimental.set_memory_growth(gpus[index], True)
    return "/GPU:0"
