"""Keras 3 on TensorFlow: forward, backward, exchange and update are traced as one ``tf.function``."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.layers.preprocessing.index_lookup import IndexLookup

from hvd_train.config import FrontEndConfig
from hvd_train.errors import ConfigError
from hvd_train.frameworks import TENSORFLOW
from hvd_train.frontends.base import StateTree
from hvd_train.frontends.changing_code import changing_code, of_layers
from hvd_train.frontends.devices import overlaps
from hvd_train.frontends.host_memory import HostMemory
from hvd_train.frontends.named_arrays import TensorLayout, layouts_of
from hvd_train.frontends.tensorflow import batchnorm, graphs, recompute
from hvd_train.frontends.tensorflow.blocks import joined
from hvd_train.frontends.tensorflow.device import DTYPES, MIXED, devices_of
from hvd_train.frontends.tensorflow.graphs import (
    BetweenSteps,
    Later,
    awaited,
    graph,
    packing,
    seconds_waited,
    seed_generators,
)
from hvd_train.frontends.tensorflow.host_memory import CommonWeights, GraphMemory, after_reads, in_memory
from hvd_train.frontends.tensorflow.ops import TensorFlowOps
from hvd_train.frontends.tensorflow.optimizers import view, zeros_where
from hvd_train.frontends.tensorflow.penalties import penalty
from hvd_train.frontends.tensorflow.sharded import ShardedOptimizer, check_constraints
from hvd_train.frontends.tensorflow.user_optimizer import variable_optimizer
from hvd_train.frontends.tensorflow.variables import by_path, check_none_is_late, common_state, states
from hvd_train.frontends.tensorflow.weight_files import names_here, numbered, paths_here
from hvd_train.frontends.user_model import (
    build_model,
    canonical_table,
    checked,
    finalizes,
    may_be_images,
    own_method,
    untaken,
)
from hvd_train.protocol import (
    Batch,
    DividedUpdate,
    Field,
    Groups,
    Optimizer,
    Sample,
    Scale,
    StepUpdate,
    TensorSpec,
    made_up,
    one_or_all,
)
from hvd_train.task.step import converted
from hvd_train.task.task import Task

# What code needs that changes variables, be it in ``call``.
CHANGES_WEIGHTS = re.compile(r"assign|set_weights|load_weights|\.value\b|\.numpy\(|scatter|dlpack")


class TensorFlowFrontEnd(batchnorm.Gathering, BetweenSteps, StateTree):
    sharded_from = 5_000_000  # a step calls Python from its graph to wait
    _cuts_padding = False
    _chain: Sequence[Any]  # what a training step calls one after the other: the model

    def __init__(self, config: FrontEndConfig, groups: Groups, sample: Sample) -> None:
        self.config, self.groups = config, groups
        self.packing, self._sample = packing(groups.data), sample
        self._ragged = any(field.ragged for field in sample.inputs.values())
        self._devices = devices_of(config, groups.world)  # the first one has all but other devices' layers
        self._device = self._devices[0]
        self.ops = TensorFlowOps(self._device)
        self.task = Task(config.task, sample, self.ops, training=True)
        self.dtype = DTYPES.get(config.precision, "float32")
        # Keras numbers layers globally: names must not depend on models built before.
        keras.utils.clear_session()
        keras.config.set_floatx(self.dtype)
        keras.config.set_dtype_policy(MIXED.get(config.precision, self.dtype))
        keras.utils.set_random_seed(config.seed)
        with tf.device(self._device):
            # A variable, so that a graph does not fold it into a constant; see ``_ready``.
            self._one = tf.Variable(1.0, trainable=False)
        # With several devices, the whole model may not fit on one of them.
        with tf.device(self._device if len(self._devices) == 1 else "/CPU:0"):
            model, module, _ = build_model(TENSORFLOW.zoo, config, sample)
            self.model, self._module = joined(model), module
            if config.restores:
                self._check_vocabularies()
            self._chain = [self.model]
            self._try_forward()
        if not self.model.trainable_variables:
            raise ConfigError("the model has no trainable variable", where=f"model.name: {config.model.name}")
        dtype = self.model.trainable_variables[0].dtype
        if dtype != self.dtype:
            fix = f"build it in a function, or after keras.config.set_dtype_policy('{self.dtype}')"
            raise ConfigError(f"the model's weights are {dtype}", where=f"precision: {config.precision}", fix=fix)
        self._batchnorm = batchnorm.prepare(
            self.model, groups.data, self.ops, config.sync_batchnorm, config.gathers_statistics
        )
        table = canonical_table(module, self.model)
        of_model = by_path(self.model.variables, config.model.name)
        self._trainable = {path: v for path, v in of_model.items() if v.trainable}
        self._fixed = {path: v for path, v in of_model.items() if not v.trainable}
        drawn = [*states(self.model), *([common_state()] if config.task.step else [])]
        self._numbered = list(enumerate(drawn))
        self.layouts = layouts_of({path: tuple(v.shape) for path, v in (self._trainable | self._fixed).items()}, table)
        if table:
            for path, weight in self._first_weights(self._trainable, config.seed):
                self._trainable[path].assign(weight)
        self._compiled: dict[Any, Callable] = {}
        self._passes = recompute.Passes()
        self._memory: GraphMemory | None = None
        self._waits, self._in_steps = seconds_waited(), 0.0  # in steps; its last known value
        self._call: Callable = lambda graph, *arguments: graph(*arguments)
        self._common: CommonWeights | None = None
        self._constants: dict[str, np.ndarray] = {}
        self._finalized = [layer for layer in self.model._flatten_layers() if finalizes(layer)]
        self._retrace_evaluation()
        with self.untouched():
            self._probe_task(sample)
            self.task.masking_layer = self._masking_layer()
        compiled = "compile()" * bool(getattr(self.model, "compiled", False))
        self.task.own_loss = own_method(self.model, ("compute_loss", "train_step")) or compiled
        # Losses that compare samples must not see padding. Stages exchange activations of one shape.
        # A step may join several views of a batch, and then batch normalization cannot tell which rows are padding.
        compares = self.task.compares_samples or self.task.step is not None
        self._cuts_padding = compares and config.parallel.pipeline == 1

    def _check_vocabularies(self) -> None:
        """Raise ConfigError for a layer whose vocabulary or bins no checkpoint has, and which did not adapt again."""
        layers = [getattr(layer, "_lookup_layer", layer) for layer in self.model._flatten_layers()]
        empty = [layer for layer in layers if isinstance(layer, IndexLookup) and not int(layer.lookup_table.size())]
        empty += [x for x in layers if isinstance(x, keras.layers.Discretization) and x.bin_boundaries is None]
        if empty:
            what = f"layer {empty[0].name} has no vocabulary or bins, which are no weights, and so in no checkpoint"
            fix = "adapt the layer even if pretrained is False, or give it its vocabulary"
            raise ConfigError(what, where=f"model.name: {self.config.model.name}", fix=fix)

    def _retrace_evaluation(self) -> None:
        self._count = graph(self._traced_counts)
        self._score, self._predict = graph(self._traced_score), graph(self._eval_outputs, reduce_retracing=self._ragged)

    def _try_forward(self) -> None:
        """Build the model if necessary, and check that it accepts the data's samples."""
        fields, plain = self._sample.inputs, len(self._sample.inputs) == 1
        # A functional model ignores inputs that it does not declare.
        takes = getattr(self.model, "_inputs_struct", None)
        try:
            if plain and not any(field.whole for field in fields.values()):
                known = self.model.built
                if not known and isinstance(self.model, keras.Sequential):
                    self.model.build((None, *self._sample.input_shape))
                # The layers of a subclass of Model get their weights in its first call, even if ``built`` is True.
                unbuilt = any(not layer.built for layer in self.model._flatten_layers())
                if not unbuilt and not (known and may_be_images(self._sample)):
                    return
            elif isinstance(takes, dict) and not plain and takes.keys() != fields.keys():
                raise ValueError(f"it has {', '.join(takes)}")
            self._eval_of(*self.to_device(made_up(self._sample))[:2])
        except (TypeError, ValueError, KeyError, AttributeError, tf.errors.InvalidArgumentError) as error:
            raise untaken(self.config.model.name, self._sample, error) from error

    def _masking_layer(self) -> str:
        """Return the name of a layer whose mask reaches the outputs, or ""."""
        masking = (
            x for x in self.model._flatten_layers() if getattr(x, "mask_zero", isinstance(x, keras.layers.Masking))
        )
        if (layer := next(masking, None)) is None:
            return ""
        outputs = self.model(one_or_all(self._inputs_ready(self.to_device(made_up(self._sample))[0])), training=False)
        masked = any(getattr(x, "_keras_mask", None) is not None for x in tf.nest.flatten(outputs))
        return layer.name if masked else ""

    def specs(self) -> list[TensorSpec]:
        return [TensorSpec(self.layouts[p].name, tuple(v.shape), v.dtype) for p, v in self._unfrozen.items()]

    def without_dropout(self) -> None:
        for layer in self.model._flatten_layers():
            for rate in ("rate", "dropout", "recurrent_dropout", "stddev"):  # dropout, recurrent layers, noise
                if isinstance(getattr(layer, rate, None), float):
                    setattr(layer, rate, 0.0)

    def host_memory(self, auto: bool = False) -> GraphMemory | None:
        # A constraint assigns a variable, which then no longer reads the common memory.
        usable = self._device == "/CPU:0" and all(v.constraint is None for v in self._unfrozen.values())
        usable &= not (auto and self.may_change_weights())
        host = HostMemory.of(self.groups.data, in_memory, usable, one_host=auto)
        if host:
            self._memory = GraphMemory(host)
            self._call = self._memory.run
        return self._memory

    def may_change_weights(self) -> str:
        layers = list(self.model._flatten_layers())
        if any(isinstance(layer, keras.layers.SpectralNormalization) for layer in layers):
            return "SpectralNormalization"
        code = [self._module, *of_layers(layers), *self.task.functions]
        return changing_code(code, ("keras", "tensorflow"), CHANGES_WEIGHTS)

    def connect(self, update: StepUpdate) -> Optimizer:
        with tf.device(self._device):
            optimizer = variable_optimizer(
                self.config.optim, self._unfrozen, self.layouts, update.exchange.from_buckets, update.buckets
            )
        self._connect(update)
        return optimizer

    def connect_sharded(self, update: DividedUpdate) -> ShardedOptimizer:
        check_constraints(self._unfrozen, self.config.averages_weights)
        with tf.device(self._device):
            self._common = CommonWeights(self._memory, self._unfrozen.values()) if self._memory else None
            optimizer = ShardedOptimizer(self.config.optim, self._unfrozen, self.layouts, update, self._common)
        self._connect(update)
        return optimizer

    def _connect(self, update: StepUpdate) -> None:
        self.update = update
        threads = tf.config.threading.get_intra_op_parallelism_threads() or len(os.sched_getaffinity(0))
        self._overlap = overlaps(self.config.overlap, self.groups.data, self._device != "/CPU:0", threads)
        with tf.device(self._device):
            accumulated = self._unfrozen.values() if self.config.micro_batches > 1 else ()
            self._accumulated = [zeros_where(v) for v in accumulated]
        self._compiled.clear()  # graphs of an earlier call
        if self.config.model.recompute:
            self._recompute()
        if self.config.model.compile:
            self._check_compiles()
            self._call = graphs.compiling(self._call)
        batchnorm.fix_statistics(self.model, self._fixed_statistics())
        self.queued: list[tuple[tuple[Any, ...], Later]] = []
        self._retrace_steps()
        steps = self.config.steps_per_execution
        # Run steps one by one if micro-batches come between them, or each is checked for finite gradients. A GPU is
        # busy while Python prepares the next step.
        self._one_by_one = self.config.micro_batches > 1 or self.config.checks_gradients
        self._one_by_one |= steps == 1 or (steps == "auto" and self._device != "/CPU:0")
        self._per_call: int = 1 if steps == "auto" else steps
        self._calls, self._seconds = 0, math.inf  # of the fastest step

    def _retrace_steps(self) -> None:
        self._accumulate, self._squares = graph(self._traced_accumulate), graph(self._traced_squares)
        self._compression_error = graph(self._traced_compression_error)
        self._gather = graph(self._traced_statistics)
        self.retrace()

    def _recompute(self) -> None:
        """Let backward compute layers again. With ``true``, a built-in model is called block by block."""
        patterns = self.config.model.recompute
        if len(self._chain) > 1:  # by an earlier call
            return
        zoo = patterns is True and ":" not in self.config.model.name and hasattr(self._module, "blocks")
        blocks = self._module.blocks(self.model) if zoo else []
        self._chain = blocks or [self.model]
        recompute.take(self.model, patterns, blocks[1:-1], self._passes)

    def retrace(self) -> None:
        self.run_queued()
        self._gradients: Any = self._gradients_of
        if self.config.model.compile:
            self._gradients = graph(self._gradients_of, jit_compile=True)
        self._step = graph(self._traced_step)
        self._steps: dict[int | None, Callable] = {}  # {rows of a batch, None where they vary: graph}

    def to_device(self, batch: Batch) -> tuple[dict[str, tf.Tensor], dict[str, tf.Tensor], tf.Tensor]:
        """Move a batch to the device in its stored dtype, mostly with its padding, so that shapes never change."""
        # The graph scales the inputs, so that this takes no additional call.
        rows = self._rows(batch)
        with tf.device(self._device):
            inputs = {name: tf.constant(batch.inputs[name][:rows]) for name in self._sample.inputs}
            return inputs, *self._place_labels(batch)

    def _place_labels(self, batch: Batch) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        rows = self._rows(batch)
        with tf.device(self._device):
            fields = self._label_fields(batch)
            labels = {name: self._ready(batch.labels[name][:rows], field) for name, field in fields.items()}
            return labels, tf.constant(batch.weights[:rows].astype(self.dtype, copy=False))

    def _rows(self, batch: Batch) -> int:
        """Return how many rows of a batch are moved: at least one, even without samples."""
        return max(batch.count, 1) if self._cuts_padding else len(batch.weights)

    def add_gradients(self, placed, scale: Scale, seed: int) -> tf.Tensor:
        numbers = tf.constant(self._scales(scale), self.dtype), tf.constant(seed, tf.int64)
        return self._run(self._accumulate, *placed, *numbers)

    def train_step(
        self, placed, scale: Scale, seed: int, learning_rate: float, unscale: float = 1.0
    ) -> tf.Tensor | Later:
        norms = self.update.exchange.norms
        more = np.asarray(unscale, self.dtype), np.asarray(norms.factor if norms else 0.0)
        rates = np.asarray(learning_rate, self.dtype), *more
        numbers = np.asarray(self._scales(scale), self.dtype), np.asarray(seed, np.int64), *rates
        if self._one_by_one:
            sums, self._failures = self._run(self._step, *placed, *map(tf.constant, numbers))
            return sums
        later = Later(self.run_queued)
        varies = self._ragged or self._cuts_padding
        if varies and self.queued and not graphs.same_shapes(placed, self.queued[0][0][:3]):
            self.run_queued()
        self.queued.append(((*placed, *numbers), later))
        if len(self.queued) == self._per_call:
            self.run_queued()
        return later

    def _run(self, graph: Any, *arguments: Any) -> Any:
        """Run a graph of (inputs, labels, weights, ...)."""
        if self._common:
            self._common.attach()
        # TensorFlow takes 0.4 ms a call to find the graph for a batch's shapes. Each field has one shape, so the length
        # of the weights, arguments[2], identifies it. Where lengths vary, one graph serves all shapes.
        key = graph, None if self._ragged else arguments[2].shape[0]
        if key not in self._compiled:
            self._compiled[key] = graph.get_concrete_function(*graphs.signature(self._sample, arguments))
            self.traced += 1
        return self._call(self._compiled[key], *arguments)

    def run_queued(self) -> None:
        steps, self.queued = self.queued, []
        if not steps:
            return
        flat = [tf.nest.flatten(arguments) for arguments, _ in steps]
        first, rows = flat[0], None if self._ragged else steps[0][0][2].shape[0]
        if rows not in self._steps:
            like = graphs.signature(self._sample, steps[0][0], None)
            self._steps[rows] = graph(self._traced_steps).get_concrete_function(*like)
            self.traced += 1
        together = graphs.columns(flat)
        started = time.perf_counter()
        if self._common:
            self._common.attach()
        sums = self._call(self._steps[rows], *tf.nest.pack_sequence_as(steps[0][0], together))
        for (_, later), of_step in zip(steps, tf.unstack(sums), strict=True):
            later.sums = of_step
        if self.config.steps_per_execution == "auto":
            self._calls += 1
            self._seconds = min(self._seconds, (time.perf_counter() - started) / len(steps))
            self._per_call = graphs.steps_per_call(self._seconds, [x for x in first if tf.is_tensor(x)])
            self._one_by_one = self._per_call == 1 and self._calls == 8  # a loop of one step is 5 % slower than none

    def flat_weights(self) -> list[tf.Tensor]:
        # Read without a copy: a kernel that finds a variable's memory in use updates a copy instead.
        return self.update.exchange.to_buckets([v.value.read_value() for v in self._unfrozen.values()])

    def waited(self, fresh: bool = True) -> float:
        if fresh and self.groups.data.size > 1:
            self._in_steps = float(self._waits)
        return self.groups.data.waited + self._in_steps

    def finite(self) -> bool:
        return float(self._failures[0]) == 0

    def accumulated_squares(self) -> tf.Tensor:
        return self._call(self._squares)

    def _traced_squares(self) -> tf.Tensor:
        return tf.add_n([tf.cast(self.ops.sum_of_squares(total), tf.float64) for total in self._accumulated])

    def _measure_error(self, placed, scale: Scale, seed: int) -> tf.Tensor:
        return self._compression_error(
            *placed, tf.constant(self._scales(scale), self.dtype), tf.constant(seed, tf.int64)
        )

    def evaluate_batch(self, placed) -> tf.Tensor:
        self.run_queued()
        return self._run(self._score, *placed)

    def predict(self, placed) -> Any:
        self.run_queued()
        return tf.nest.map_structure(lambda x: x.numpy(), self._predict(placed[0]))

    def _begin_forward(self, weights: Any, seed: Any) -> None:
        seed_generators(self._numbered, seed)
        self._batchnorm.weights = weights

    def _backward(self, inputs, labels, weights, scale, seed) -> tuple[list[tf.Tensor], tf.Tensor]:
        return self._gradients(inputs, labels, weights, scale, seed)

    def _gradients_of(self, inputs, labels, weights, scale, seed) -> tuple[list[tf.Tensor], tf.Tensor]:
        self._begin_forward(weights, seed)
        # watch_accessed_variables=False, or the tape would record non-trainable variables.
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            variables = [v.value for v in self._unfrozen.values()]
            tape.watch(variables)
            self._passes.trains = True
            loss, sums = self.task(self._of_batch(inputs, labels, training=True), labels, weights, scale)
            self._passes.trains = False
            check_none_is_late(self.model, self._trainable, self.config.model.name)
            # Weighted by samples: a loss may have no label in a step.
            share = scale[-1] * tf.cast(sums[self.task.samples], self.dtype)
            loss += penalty(self.model, share, f"model.name: {self.config.model.name}")
        gradients = tape.gradient(loss, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return [tf.convert_to_tensor(g) for g in gradients], sums

    def _of_batch(self, inputs, labels, training: bool) -> Any:
        """Return the model's outputs; of a user's step what it returns."""
        if not self.task.step:
            return self._outputs(inputs, training)
        result = self.task.step(self.model, one_or_all(self._inputs_ready(inputs)), one_or_all(labels), training)
        return converted(result, lambda x: tf.cast(x, self.dtype))

    def _eval_of(self, inputs, labels) -> Any:
        return self._of_batch(inputs, labels, training=False)

    def _step_weights_vary(self, placed) -> bool:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            variables = [v.value for v in self._trainable.values()]
            tape.watch(variables)
            weights = self._eval_of(*placed[:2]).weights
        return any(gradient is not None for gradient in tape.gradient(weights, variables))

    def _traced_counts(self, inputs, labels, weights) -> tf.Tensor:
        return self.task.counts_of(self._eval_of(inputs, labels), weights)

    def _step_counts(self, placed) -> tf.Tensor:
        self.run_queued()
        return self._run(self._count, *placed)

    def _inputs_ready(self, inputs) -> dict[str, tf.Tensor]:
        return {name: self._ready(inputs[name], field) for name, field in self._sample.inputs.items()}

    def _outputs(self, inputs, training: bool) -> Any:
        outputs = one_or_all(self._inputs_ready(inputs))
        for part in self._chain if training else [self.model]:
            outputs = part(outputs, training=training)
        outputs = checked(outputs, self.config.model.name)
        return tf.nest.map_structure(lambda x: tf.cast(x, self.dtype), outputs)

    def _eval_outputs(self, inputs) -> Any:
        return self._outputs(inputs, training=False)

    def _ready(self, x, field: Field) -> tf.Tensor:
        """Scale an array as its field says."""
        # A graph replaces a division by a constant with a multiplication, which changes bits. A product with a variable
        # is not a constant.
        x = tf.convert_to_tensor(x)
        if field.divisor != 1:
            x = tf.cast(x, tf.float32) / (field.divisor * self._one)
        if field.mean:
            x = (x - tf.constant(field.mean, tf.float32)) / (tf.constant(field.std, tf.float32) * self._one)
        return tf.cast(x, self.dtype) if x.dtype.is_floating else x if x.dtype.is_bool else tf.cast(x, tf.int64)

    def _traced_accumulate(self, inputs, labels, weights, scale, seed) -> tf.Tensor:
        gradients, sums = self._backward(inputs, labels, weights, scale, seed)
        for total, gradient in zip(self._accumulated, gradients, strict=True):
            total.assign_add(gradient)
        return sums

    def _traced_step(
        self, inputs, labels, weights, scale, seed, learning_rate, unscale, factor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Trace a step. ``factor``: of ``GradientNorms``; unused if the update has none."""
        self.update.begin()
        gradients, sums = self._backward(inputs, labels, weights, scale, seed)
        for i, total in enumerate(self._accumulated):
            gradients[i] = gradients[i] + total
            total.assign(tf.zeros_like(total))
        if self._common:
            gradients = after_reads(gradients, self._common.variables, sums)
        norms = self.update.exchange.norms
        with norms.traced(factor) if norms else nullcontext():
            return sums, self._traced_update(gradients, learning_rate, unscale)

    def _traced_update(self, gradients, learning_rate, unscale) -> tf.Tensor:
        """Exchange the gradients and update the weights; return the number of ranks with non-finite gradients."""
        if not self.config.checks_gradients:
            self._apply(gradients, learning_rate)
            return tf.zeros((1,))
        failures = self._awaited(gradients, lambda: self.update.failures(gradients))

        def update() -> tf.Tensor:
            self._apply([g * unscale for g in gradients], learning_rate)
            return failures

        # All ranks take the same branch: the number of failures is summed over ranks.
        return tf.cond(failures[0] > 0, lambda: failures, update)

    def _traced_steps(self, *columns) -> tf.Tensor:
        """Run one step for each row of the columns, in order; return (steps, sums)."""
        steps = tf.shape(columns[-1])[0]

        def body(k, sums) -> tuple[tf.Tensor, tf.TensorArray]:
            of_step, _ = self._traced_step(*tf.nest.map_structure(lambda column: column[k], columns))
            return k + 1, sums.write(k, of_step)

        start = 0, tf.TensorArray(tf.float64, steps, element_shape=(self.task.length,))
        return tf.while_loop(lambda k, _: k < steps, body, start, parallel_iterations=1)[1].stack()

    def _apply(self, gradients, learning_rate) -> None:
        # Otherwise TensorFlow starts each exchange during backward, as soon as the gradients of its bucket are
        # computed.
        if not self._overlap:
            with tf.control_dependencies(gradients):
                gradients = [tf.identity(g) for g in gradients]
        flats = self.update.exchange.to_buckets(gradients)
        reduced = self._awaited(gradients, lambda: self.update.reduce(flats))
        self.update.step(reduced, learning_rate)

    def _awaited(self, gradients, transfer: Callable[[], Any]) -> Any:
        return transfer() if self.groups.data.size == 1 else awaited(self._waits, gradients, transfer)

    def _traced_compression_error(self, inputs, labels, weights, scale, seed) -> tf.Tensor:
        gradients, _ = self._backward(inputs, labels, weights, scale, seed)
        return self.update.compression_error(self.update.exchange.to_buckets(gradients))

    def _traced_score(self, inputs, labels, weights) -> tf.Tensor:
        return self.task.scores(self._eval_of(inputs, labels), labels, weights)

    def _variables(self) -> dict[str, tf.Variable]:
        self.run_queued()
        variables = {f"weights/{p}": v for p, v in self._trainable.items()}
        return variables | {f"statistics/{p}": v for p, v in self._fixed.items()}

    def aliases(self, canonical: bool) -> dict[str, tuple[str, TensorLayout | None]]:
        known = super().aliases(canonical)
        return known if canonical else known | numbered(self.model, known)

    def names_here(
        self, path: Path | None, names: Collection[str], given: Callable[[str], bool], where: str
    ) -> dict[str, str]:
        if path:
            return names_here(path, self.model, given, where)
        return paths_here(names, self.model, self.aliases(True), given, where)

    def _readers(self) -> Mapping[str, Callable[[], np.ndarray]]:
        return {key: partial(view, v.value) for key, v in self._variables().items()}

    def _weights(self) -> Iterator[tuple[str, np.ndarray]]:
        self.run_queued()
        for path, variable in self._trainable.items():
            yield path, view(variable.value)

    def _assign(self, arrays: Mapping[str, np.ndarray]) -> None:
        variables = self._variables()
        for key, array in arrays.items():
            variables[key].assign(np.asarray(array).astype(variables[key].dtype))
        self._finalize()
        if self._common:
            self._common.assigned |= {variables[key].path for key in arrays}

    def _finalize(self) -> None:
        """Let layers such as Normalization compute their constants from variables that have changed."""
        if not self._finalized:
            return
        values = {v.path: np.array(view(v.value)) for layer in self._finalized for v in layer.variables}
        known = self._constants
        if known.keys() == values.keys() and all(np.array_equal(x, known[path]) for path, x in values.items()):
            return
        self._constants = values
        for layer in self._finalized:
            layer.finalize_state()
        self._retrace_evaluation()  # graphs have the constants of before
        if hasattr(self, "update"):
            self._retrace_steps()


def configure(threads: int) -> None:
    # In a notebook TensorFlow may already be running, with its threads fixed.
    with suppress(RuntimeError):
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)


open_frontend = TensorFlowFrontEnd


def cpu_ops() -> TensorFlowOps:
    return TensorFlowOps()


def gpus() -> int:
    return len(tf.config.list_physical_devices("GPU"))
