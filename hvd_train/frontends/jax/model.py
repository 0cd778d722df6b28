"""JAX on CPUs: a step is a jitted gradient, an exchange of its buckets, and a jitted update."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hvd_train.config import FrontEndConfig
from hvd_train.errors import ConfigError
from hvd_train.frameworks import JAX
from hvd_train.frontends.base import StateTree
from hvd_train.frontends.devices import gpu_of
from hvd_train.frontends.jax.ops import JaxOps
from hvd_train.frontends.jax.optimizer import Arrays, JaxOptimizer
from hvd_train.frontends.named_arrays import TensorLayout
from hvd_train.frontends.user_model import build_model, untaken
from hvd_train.protocol import Batch, Field, Groups, Packing, Sample, Scale, StepUpdate, TensorSpec, made_up
from hvd_train.task.task import Task

# Sums are float64 and indices int64 in every precision. Weights have the dtype that they are given.
jax.config.update("jax_enable_x64", True)


class JaxFrontEnd(StateTree):
    """A built-in model on one CPU. Names, axes and first weights are the canonical ones."""

    packing = Packing(bucket_bytes=4 << 20, alone_bytes=4 << 20)

    def __init__(self, config: FrontEndConfig, groups: Groups, sample: Sample) -> None:
        refuse_unsupported(config, sample)
        gpu_of(config, groups.world, 0, "JAX")
        self.config, self.groups, self._sample, self.ops = config, groups, sample, JaxOps()
        self.dtype = "float64" if config.precision == "64" else "float32"
        self.task = Task(config.task, sample, self.ops)
        (shapes, self._forward), _, _ = build_model(JAX.zoo, config, sample)
        self.layouts = {name: TensorLayout.of(shape, (name, None, None, shape)) for name, shape in shapes.items()}
        self.w: Arrays = {}
        self._assign({f"weights/{name}": x for name, x in self._first_weights(shapes, config.seed)})
        self.gradients: Arrays = {}
        self._drops, self._finite = True, True
        self._differentiate = jax.jit(jax.value_and_grad(self._loss, has_aux=True))
        self._evaluate = jax.jit(self._outputs)
        self._score = jax.jit(lambda w, inputs, *labels: self.task.scores(self._outputs(w, inputs), *labels))
        inputs, *_ = self.to_device(made_up(sample))
        try:
            with jax.numpy_dtype_promotion("strict"):  # else whole numbers would become fractions
                jax.eval_shape(self._outputs, self.w, inputs)
        except (TypeError, ValueError) as error:
            raise untaken(config.model.name, sample, error) from error
        self._probe_task(sample)

    @property
    def _trainable(self) -> Arrays:  # type: ignore[override]
        return self.w

    def specs(self) -> list[TensorSpec]:
        return [TensorSpec(name, x.shape, self.dtype) for name, x in self._unfrozen.items()]

    def _readers(self) -> Mapping[str, Callable[[], np.ndarray]]:
        return {f"weights/{name}": partial(np.asarray, x) for name, x in self.w.items()}

    def _assign(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.w |= {key.removeprefix("weights/"): jnp.array(x, self.dtype) for key, x in arrays.items()}

    def _weights(self) -> Iterable[tuple[str, np.ndarray]]:
        return ((name, np.asarray(x)) for name, x in self.w.items())

    def flat_weights(self) -> list[jax.Array]:
        return joined(self._buckets, list(self._unfrozen.values()), 1.0)

    def without_dropout(self) -> None:
        self._drops = False

    # ---- batches

    def to_device(self, batch: Batch) -> tuple[Any, ...]:
        fields = self._sample.inputs
        inputs = {name: self._place(batch.inputs[name], field) for name, field in fields.items()}
        return inputs, *self._place_labels(batch)

    def _place_labels(self, batch: Batch) -> tuple[dict[str, jax.Array], jax.Array]:
        fields = self._label_fields(batch)
        labels = {name: self._place(batch.labels[name], field) for name, field in fields.items()}
        return labels, jnp.array(batch.weights, self.dtype)

    def _place(self, x: np.ndarray, field: Field) -> jax.Array:
        """Scale an array in 32 bits as its field says; copy it, because the loader reuses its memory."""
        if field.divisor != 1:
            x = x.astype(np.float32) / np.float32(field.divisor)
        if field.mean:
            x = (x - np.array(field.mean, np.float32)) / np.array(field.std, np.float32)
        return jnp.array(x, {"f": self.dtype, "b": "bool"}.get(x.dtype.kind, "int64"))

    # ---- training

    def connect(self, update: StepUpdate) -> JaxOptimizer:
        self.update, self._buckets = update, tuple(map(tuple, update.buckets))
        return JaxOptimizer(self)

    def connect_sharded(self, update: Any) -> Any:
        raise NotImplementedError  # refuse_unsupported has refused optim.sharded

    def _outputs(self, w: Arrays, inputs: Mapping[str, jax.Array], seed: Any = None) -> jax.Array:
        """Return the logits. ``seed``: for dropout; None: no dropout."""
        (x,) = inputs.values()
        return self._forward(w, x, dropout(seed) if self._drops and seed is not None else lambda x, rate: x)

    def _loss(self, w: Arrays, frozen: Arrays, placed: Any, scales: Sequence[float], seed: int) -> Any:
        inputs, labels, weights = placed
        return self.task(self._outputs(frozen | w, inputs, seed), labels, weights, scales)

    def add_gradients(self, placed: Any, scale: Scale, seed: int) -> jax.Array:
        trained = self._unfrozen
        frozen = {name: x for name, x in self.w.items() if name not in trained}
        (_, sums), new = self._differentiate(trained, frozen, placed, self._scales(scale), seed)
        self.gradients = {name: self.gradients[name] + g if self.gradients else g for name, g in new.items()}
        return sums

    def train_step(self, placed: Any, scale: Scale, seed: int, learning_rate: float, unscale: float = 1.0) -> jax.Array:
        sums = self.add_gradients(placed, scale, seed)
        flats = self._take_gradients(unscale)
        self._finite = not (self.config.checks_gradients and float(self.update.failures(flats)[0]))
        if self._finite:
            self.update.step(self.update.reduce(flats), learning_rate)
            self.update.begin()
        return sums

    def _take_gradients(self, factor: float = 1.0) -> list[jax.Array]:
        """Return the flat gradient of each bucket, and begin the next step."""
        flats = joined(self._buckets, [self.gradients[name] for name in self._unfrozen], factor)
        self.gradients = {}
        return flats

    def finite(self) -> bool:
        return self._finite

    def accumulated_squares(self) -> jax.Array:
        return jnp.stack([self.ops.sum_of_squares(x).astype("float64") for x in self.gradients.values()]).sum()

    def _measure_error(self, placed: Any, scale: Scale, seed: int) -> jax.Array:
        self.add_gradients(placed, scale, seed)
        return self.update.compression_error(self._take_gradients())

    # ---- evaluation

    def _eval_outputs(self, inputs: Mapping[str, jax.Array]) -> jax.Array:
        return self._evaluate(self.w, inputs)

    def evaluate_batch(self, placed: Any) -> jax.Array:
        return self._score(self.w, *placed)

    def predict(self, placed: Any) -> np.ndarray:
        return np.asarray(self._eval_outputs(placed[0]))


@partial(jax.jit, static_argnums=0)
def joined(buckets: Collection[Collection[int]], tensors: Sequence[jax.Array], factor: float) -> list[jax.Array]:
    """Return (n,) for each bucket: its tensors, times a factor."""
    return [jnp.concatenate([tensors[i].reshape(-1) * factor for i in members]) for members in buckets]


def dropout(seed: Any) -> Callable[[jax.Array, float], jax.Array]:
    """Return a function that drops entries at a rate; each call draws other ones."""
    calls = count()

    def drop(x: jax.Array, rate: float) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), next(calls))
        return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0.0) if rate else x

    return drop


def refuse_unsupported(config: FrontEndConfig, sample: Sample) -> None:
    """Raise ConfigError for settings that would otherwise be ignored."""
    refused = {
        f"model.name: {config.model.name}": ":" in config.model.name,
        f"task.step: {config.task.step}": bool(config.task.step),
        f"optim.name: {config.optim.name}": ":" in config.optim.name,
        f"precision: {config.precision}": config.precision not in ("32", "64"),
        "model.compile": bool(config.model.compile),  # jax compiles each model
        "model.recompute": bool(config.model.recompute),
        "optim.sharded": config.optim.sharded is True,
        "exchange.overlap": config.overlap is True,
        "data.lengths": any(field.ragged for field in sample.inputs.values()),
        f"inputs {', '.join(sample.inputs)}": len(sample.inputs) > 1,
    }
    for where, is_refused in refused.items():
        if is_refused:
            raise ConfigError("jax does not have this", where=where, fix="leave it out, or take framework: pytorch")


# ---- the module (protocol.FrontEndModule)

open_frontend, cpu_ops = JaxFrontEnd, JaxOps


def configure(threads: int) -> None:
    os.environ["PJRT_NPROC"] = str(threads)  # XLA reads it when the first array is made


def gpus() -> int:
    return 0
