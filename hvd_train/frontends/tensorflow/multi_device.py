"""A Keras model over several devices of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvd_train.config import FrontEndConfig
from hvd_train.frontends.stages.multi_device import MultiDevice
from hvd_train.frontends.tensorflow.blocks import blocks_of
from hvd_train.frontends.tensorflow.in_blocks import TensorFlowInBlocks, run
from hvd_train.protocol import Groups, Sample


class MultiDeviceTensorFlow(MultiDevice, TensorFlowInBlocks):
    """A front-end with several devices, which records each block on a tape of its own.

    An operation gets the device of the code that makes it: one tape would put all of backward on one device.
    """

    _blocks: Sequence[keras.layers.Layer] = ()

    def __init__(self, config: FrontEndConfig, groups: Groups, sample: Sample) -> None:
        super().__init__(config, groups, sample)
        self.devices = self._devices
        self._blocks = blocks_of(self.model, self._module, config.model.name)
        self._refuse_losses()
        self._begin_devices()

    def _nbytes(self, name: str) -> int:
        v = (self._trainable | self._fixed)[name]
        return int(tf.size(v.value)) * tf.as_dtype(v.dtype).size

    def _put(self) -> None:
        for path, v in (self._trainable | self._fixed).items():
            with tf.device(self._devices[self._device_of[path]]):
                v._value = tf.Variable(v.value, dtype=v.dtype, trainable=v.trainable, name=v.name)

    def _run_block(self, number: int, block: keras.layers.Layer, x: Any, training: bool) -> Any:
        with tf.device(self._devices[self.places[number]]):
            return run(block, x, training)

    def _outputs(self, inputs: Any, training: bool) -> Any:
        if not self._blocks:  # while the model is built
            return super()._outputs(inputs, training)
        x = self._inputs(inputs)
        for number, block in enumerate(self._blocks):
            x = self._run_block(number, block, x, training)
        return self._result(x)

    def _backward(self, inputs: Any, labels: Any, weights: Any, scale: Any, seed: Any) -> tuple[list[tf.Tensor], Any]:
        self._begin_forward(weights, seed)
        x, kept = self._inputs(inputs), []
        for number, block in enumerate(self._blocks):
            values = {v.path: v.value for v in block.trainable_variables}
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch([*values.values(), *([x] if number else [])])
                y = self._run_block(number, block, x, training=True)
            kept.append((tape, values, x, y))
            x = y
        with tf.device(self._device), tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(tf.nest.flatten(x))
            loss, sums = self.task(self._result(x), labels, weights, scale)
        with tf.device(self._device):
            gradient = tape.gradient(loss, x, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        totals: dict[str, Any] = {}
        for number, (tape, values, x, y) in reversed(list(enumerate(kept))):
            with tf.device(self._devices[self.places[number]]):
                sources = [*values.values(), *([x] if number else [])]
                zero = tf.UnconnectedGradients.ZERO
                parts = tape.gradient(y, sources, gradient, unconnected_gradients=zero) if sources else []
                parts = [tf.convert_to_tensor(g) for g in parts]
                gradient = parts.pop() if number else None
            for path, part in zip(values, parts, strict=True):
                with tf.device(self._devices[self._device_of[path]]):
                    totals[path] = totals[path] + part if path in totals else part
        return [totals[path] for path in self._trainable], sums


open_frontend = MultiDeviceTensorFlow
