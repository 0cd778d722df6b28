"""A pipeline stage in Keras. Forward passes and the update are graphs; a tape records what backward needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from hvd_train.config import FrontEndConfig
from hvd_train.errors import TrainError
from hvd_train.frontends.stages.frontend import Micro, StagedFrontEnd
from hvd_train.frontends.stages.links import Message
from hvd_train.frontends.tensorflow.blocks import blocks_of
from hvd_train.frontends.tensorflow.graphs import graph
from hvd_train.frontends.tensorflow.in_blocks import TensorFlowInBlocks, run
from hvd_train.frontends.tensorflow.optimizers import zeros_where
from hvd_train.protocol import Groups, Sample, StepUpdate


class Kept(NamedTuple):
    """What backward needs from a forward pass: the tape, the stage's input, and its output or the loss."""

    tape: tf.GradientTape
    x: tf.Tensor | None
    output: tf.Tensor


class Sums:
    """The sums of a micro-batch, (length,) float64."""

    def __init__(self, length: int) -> None:
        self.values: Any = np.zeros(length)

    def numpy(self) -> np.ndarray:
        return np.asarray(self.values)


class Chain:
    """Some blocks, run in order."""

    def __init__(self, blocks: Sequence[keras.layers.Layer]) -> None:
        self.layers = list(blocks)

    def __call__(self, x: Any, training: bool) -> Any:
        for block in self.layers:
            x = run(block, x, training)
        return x

    def _flatten_layers(self) -> list[keras.layers.Layer]:
        return [layer for block in self.layers for layer in block._flatten_layers()]


class StagedTensorFlow(StagedFrontEnd, TensorFlowInBlocks):
    def __init__(self, config: FrontEndConfig, groups: Groups, sample: Sample) -> None:
        super().__init__(config, groups, sample)
        self._begin_stages(groups.links)
        self._blocks = blocks_of(self.model, self._module, config.model.name)
        self._refuse_losses()
        self._link_error: TrainError | None = None

    # ---- setting up the blocks

    def _keep_blocks(self, first: int, last: int) -> None:
        mine = Chain(self._blocks[first:last])
        here = {id(v) for block in mine.layers for v in block.variables}
        # A generator keeps the number, and so the masks, that it has in the whole model.
        self._numbered = [(i, v) for i, v in self._numbered if id(v) in here]
        # Layers reference their neighbours, so those of other stages stay in memory; free their variables.
        for v in self.model.variables:
            if id(v) not in here:
                v._value = None
        self.model, self._blocks = mine, []
        self._score = graph(self._traced_evaluate)
        self._forward, self._loss = graph(self._traced_forward), graph(self._traced_loss)

    # ---- during a step

    def _connect(self, update: StepUpdate) -> None:
        super()._connect(update)
        with tf.device(self._device):
            self._accumulated = self._accumulated or [zeros_where(v) for v in self._trainable.values()]
        self._add, self._move = graph(self._traced_add), graph(self._traced_move)

    def _no_sums(self) -> Sums:
        return Sums(self.task.length)

    def _fill(self, sums: Sums, values: Any) -> None:
        sums.values = values

    def _traced_forward(self, x, weights, seed) -> tf.Tensor:
        self._begin_forward(weights, seed)
        return self.model(self._inputs(x) if self.first else x, training=True)

    def _traced_loss(self, x, labels, weights, scale, seed) -> tuple[tf.Tensor, tf.Tensor]:
        outputs = self._traced_forward(x, weights, seed)
        return self.task(self._result(outputs), labels, weights, scale)

    def _forward_stage(self, micro: Micro, x: tf.Tensor | None) -> tuple[Any, Kept]:
        inputs, labels, weights = micro.placed
        seed = tf.constant(micro.seed, tf.int64)
        # Watch explicitly, or the tape would record non-trainable variables.
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([v.value for v in self._trainable.values()])
            if x is not None:
                tape.watch(x)
            source = inputs if x is None else x
            if not self.last:
                output = self._forward(source, weights, seed)
                return output, Kept(tape, x, output)
            loss, sums = self._loss(source, labels, weights, tf.constant(self._scales(micro.scale), self.dtype), seed)
        return sums, Kept(tape, x, loss)

    def _backward_stage(self, kept: Kept, gradient: tf.Tensor | None) -> tf.Tensor | None:
        variables = [v.value for v in self._trainable.values()]
        sources = [*variables, *([] if kept.x is None else [kept.x])]
        unconnected = tf.UnconnectedGradients.ZERO
        gradients = kept.tape.gradient(kept.output, sources, gradient, unconnected_gradients=unconnected)
        gradients = [tf.convert_to_tensor(g) for g in gradients]
        self._add(gradients[: len(variables)])
        return None if kept.x is None else gradients[-1]

    def _traced_add(self, gradients) -> None:
        for total, gradient in zip(self._accumulated, gradients, strict=True):
            total.assign_add(gradient)

    def _traced_move(self, learning_rate, unscale) -> tf.Tensor:
        gradients = [tf.identity(total) for total in self._accumulated]
        with tf.control_dependencies(gradients):
            for total in self._accumulated:
                total.assign(tf.zeros_like(total))
        return self._traced_update(gradients, learning_rate, unscale)

    def _finish_step(self, learning_rate: float, unscale: float) -> None:
        numbers = (tf.constant(x, self.dtype) for x in (learning_rate, unscale))
        try:
            self._failures = self._move(*numbers)
        except tf.errors.OpError:
            if self._link_error:
                raise self._link_error from None
            raise

    def _traced_evaluate(self, x, labels, weights) -> Any:
        outputs = self.model(self._inputs(x) if self.first else x, training=False)
        if not self.last:
            return outputs
        return self.task.scores(self._result(outputs), labels, weights)

    def _evaluate_stage(self, placed: Any, x: tf.Tensor | None) -> Any:
        return self._score(placed[0] if x is None else x, *placed[1:])

    def _pack(self, x: tf.Tensor) -> Message:
        array = np.ascontiguousarray(x.numpy())
        return Message(x.dtype.name, tuple(x.shape), array.reshape(-1).view(np.uint8))

    def _unpack(self, message: Message) -> tf.Tensor:
        array = message.data.view(tf.as_dtype(message.kind).as_numpy_dtype).reshape(message.shape)
        with tf.device(self._device):
            return tf.constant(array)

    def joined(self, x: tf.Tensor, stages: Sequence[int], word: str) -> tf.Tensor:
        def sum_over_stages(array: np.ndarray) -> np.ndarray:
            try:
                return self.links.sum(array, stages, word)
            except TrainError as error:
                self._link_error = error  # TensorFlow raises an error of its own instead
                raise

        total = tf.numpy_function(sum_over_stages, [x], x.dtype)
        total.set_shape(x.shape)
        return total


open_frontend = StagedTensorFlow
