"""The device of a rank in TensorFlow, and the dtypes of its computations."""

from __future__ import annotations

from contextlib import suppress

import tensorflow as tf

from hvd_train.config import FrontEndConfig
from hvd_train.frontends.devices import gpus_of
from hvd_train.protocol import Communicator

DTYPES = {"64": "float64"}  # of weights; all other precisions: float32
MIXED = {"16-mixed": "mixed_float16", "bf16-mixed": "mixed_bfloat16"}


def devices_of(config: FrontEndConfig, communicator: Communicator) -> list[str]:
    """Return the ``parallel.devices_per_rank`` devices of this rank."""
    gpus = tf.config.list_physical_devices("GPU")
    indices = gpus_of(config, communicator, len(gpus), "TensorFlow")
    tf.config.set_visible_devices([gpus[index] for index in indices], "GPU")
    for index in indices:
        tf.config.experimental.set_memory_growth(gpus[index], True)
    if indices:
        return [f"/GPU:{k}" for k in range(len(indices))]
    return _cpus(config.parallel.devices_per_rank)


def _cpus(count: int) -> list[str]:
    """Split the CPU into ``count`` logical devices."""
    if count == 1:
        return ["/CPU:0"]
    # A process that has already computed, such as a notebook, cannot change its devices.
    with suppress(RuntimeError):
        parts = [tf.config.LogicalDeviceConfiguration()] * count
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], parts)
    there = len(tf.config.list_logical_devices("CPU"))
    return [f"/CPU:{k % there}" for k in range(count)]
