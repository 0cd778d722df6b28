"""A Keras model in blocks: checks of their inputs and outputs, and their cost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_train.errors import ConfigError
from hvd_train.frontends.stages.in_blocks import TURNS, InBlocks, one_tensor
from hvd_train.frontends.stages.split import Cost
from hvd_train.frontends.tensorflow.model import TensorFlowFrontEnd
from hvd_train.frontends.user_model import checked
from hvd_train.protocol import Batch, made_up, one_or_all


def run(block: keras.layers.Layer, x: Any, training: bool) -> Any:
    takes = getattr(block, "_call_has_training_arg", False)
    return block(x, training=training) if takes else block(x)


class TensorFlowInBlocks(InBlocks, TensorFlowFrontEnd):
    UNTAKEN = (TypeError, ValueError, KeyError, AttributeError, tf.errors.InvalidArgumentError)
    _blocks: Sequence[keras.layers.Layer]

    def _refuse_losses(self) -> None:
        if self.model.losses:
            what = f"the model adds losses of its own (regularizers, add_loss), which {self.PART}s do not add up"
            raise ConfigError(
                what, where=f"model.name: {self.config.model.name}", fix="take optim.weight_decay instead"
            )

    def _names_of_blocks(self) -> list[set[str]]:
        native = {id(v): path for path, v in (self._trainable | self._fixed).items()}
        return [{native[id(v)] for v in block.variables if id(v) in native} for block in self._blocks]

    def _title(self, block: keras.layers.Layer) -> str:
        return block.name

    def _check_between(self, x: Any, block: str, where: str) -> None:
        one_tensor(x, block, where, tf.Tensor, lambda x: x.dtype.is_floating)
        if getattr(x, "_keras_mask", None) is not None:
            what = f"{block} gives a mask beside its tensor"
            raise ConfigError(what, where=where, fix=f"switch mask_zero off, or set {self.KEY}: 1")

    def _inputs(self, inputs: Any) -> Any:
        """Return the input of the first block: a tensor, or a dict of tensors."""
        return one_or_all({name: self._ready(inputs[name], field) for name, field in self._sample.inputs.items()})

    def _result(self, outputs: Any) -> Any:
        """Return the model's outputs on the first device, in the dtype of its weights."""
        with tf.device(self._device):
            named = checked(outputs, self.config.model.name)
            return tf.nest.map_structure(lambda x: tf.cast(x, self.dtype), named)

    def check_blocks(self) -> None:
        inputs = self._inputs(self.to_device(made_up(self._sample))[0])
        self._in_turn(inputs, lambda number, block, x: self._run_block(number, block, x, training=False))

    def _run_block(self, number: int, block: keras.layers.Layer, x: Any, training: bool) -> Any:
        return run(block, x, training)

    def costs(self, batch: Batch) -> list[Cost]:
        best, activations = [np.inf] * len(self._blocks), [0] * len(self._blocks)

        def timed(number: int, block: Any, x: Any) -> Any:
            variables = [v.value for v in block.trainable_variables]
            sources = [*variables, *([x] if number else [])]
            for _ in range(TURNS):
                began = time.perf_counter()
                with tf.GradientTape(watch_accessed_variables=False) as tape:
                    tape.watch(sources)
                    output = self._run_block(number, block, x, training=False)
                outputs = tf.nest.flatten(output)
                if sources:
                    tape.gradient(outputs, sources, unconnected_gradients=tf.UnconnectedGradients.ZERO)
                best[number] = min(best[number], time.perf_counter() - began)
            activations[number] = sum(int(tf.size(one)) * one.dtype.size for one in outputs)
            return output

        self._in_turn(self._inputs(self.to_device(batch)[0]), timed)
        weights = [sum(4 * int(np.prod(v.shape)) for v in block.trainable_variables) for block in self._blocks]
        return self._costs(best, weights, activations)
