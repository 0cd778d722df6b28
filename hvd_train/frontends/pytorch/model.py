"""PyTorch: weights, gradients and slots are stored in flat buckets, of which the model's parameters are views."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from hvd_train.config import FrontEndConfig
from hvd_train.errors import ConfigError
from hvd_train.frameworks import PYTORCH
from hvd_train.frontends.base import StateTree, checksum
from hvd_train.frontends.devices import overlaps
from hvd_train.frontends.host_memory import HostMemory, pages_are_known
from hvd_train.frontends.named_arrays import TensorLayout, layouts_of
from hvd_train.frontends.pytorch import batchnorm, embeddings, linear, recompute
from hvd_train.frontends.pytorch.blocks import joined
from hvd_train.frontends.pytorch.buckets import GPU_ALIGN, Flat, dense, in_memory, stored_shape
from hvd_train.frontends.pytorch.compiled import Compiled
from hvd_train.frontends.pytorch.device import MIXED, devices_of, mixed_context, seeder
from hvd_train.frontends.pytorch.freezing import freeze, thaw
from hvd_train.frontends.pytorch.hidden import HIDDEN_FIX, hidden, not_part
from hvd_train.frontends.pytorch.ops import TorchOps
from hvd_train.frontends.pytorch.optimizers import array_of
from hvd_train.frontends.pytorch.shapes import as_real, lazy, moved, native_shape
from hvd_train.frontends.pytorch.sharded import ShardedOptimizer
from hvd_train.frontends.pytorch.user_optimizer import flat_optimizer
from hvd_train.frontends.user_model import build_model, canonical_table, checked, may_be_images, own_method, untaken
from hvd_train.protocol import (
    Batch,
    DividedUpdate,
    Field,
    Groups,
    Optimizer,
    Packing,
    Sample,
    Scale,
    StepUpdate,
    TensorSpec,
    made_up,
    one_or_all,
)
from hvd_train.task.step import converted
from hvd_train.task.task import Task
from hvd_train.update.overlap import Overlap

DTYPES = {"64": torch.float64}  # of weights; all other precisions: float32
UNTAKEN = (RuntimeError, TypeError, IndexError, KeyError, AttributeError, ValueError)  # what a model raises
IN_TRAINING = attrgetter("training")


class PyTorchFrontEnd(batchnorm.Gathering, StateTree):
    packing = Packing(bucket_bytes=4 << 20, alone_bytes=4 << 20)
    sharded_from = 1_000_000
    _compiled: Compiled | None = None
    _capacity = 0  # the most rows of a batch of this rank

    def __init__(self, config: FrontEndConfig, groups: Groups, sample: Sample) -> None:
        self.config, self.groups, self._sample = config, groups, sample
        self.device, *_ = self.devices = devices_of(config, groups.world)  # the first has all but other devices' layers
        self.ops = TorchOps(self.device)
        self.dtype = DTYPES.get(config.precision, torch.float32)
        self.task = Task(config.task, sample, self.ops)
        self._mixed = mixed_context(config.precision, self.device)
        # Move each number to the device once: the transfer waits until the GPU is idle.
        self._tensor_of = cache(partial(torch.tensor, device=self.device))
        torch.manual_seed(config.seed)
        self._seed = seeder(self.device)
        model, module, _ = build_model(PYTORCH.zoo, config, sample, native_shape)
        self._module, self._channels_last = module, False
        model = joined(model)
        self._check_state(model)
        self.model = model = self._on_devices(model)
        # Before batch normalization is prepared: initializing a lazy layer changes its class.
        if lazy(model):
            self._take_shapes()
        self._batchnorm = batchnorm.prepare(
            model, groups.data, self.ops, config.sync_batchnorm, config.gathers_statistics
        )
        if self.device.type == "cpu" and self.dtype == torch.float32:
            linear.take()
        table = canonical_table(module, model)
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        named = {name: as_real(x) for name, x in tensors.items()}
        layouts = layouts_of({n: tuple(t.shape) for n, t in named.items()}, table)
        # A normalization's scale is called weight.
        norms = {f"{n}.weight".lstrip(".") for n, x in self.model.named_modules() if "Norm" in type(x).__name__}
        self.layouts = {n: replace(layout, scales=True) if n in norms else layout for n, layout in layouts.items()}
        if (hidden_layers := hidden(self.model)) and not config.restores:
            raise ConfigError(not_part(hidden_layers), where=f"model.name: {config.model.name}", fix=HIDDEN_FIX)
        thaw(self.model)
        self._trainable = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        if not self._trainable:
            raise ConfigError("the model has no trainable parameter", where=f"model.name: {config.model.name}")
        self._fixed = {n: t for n, t in named.items() if n not in self._trainable}
        layers, parts = dict(self.model.named_modules()), {name: name.rpartition(".") for name in named}
        # {name: (layer, attribute)}
        self._places = {n: (layers[path], leaf) for n, (path, _, leaf) in parts.items()}
        self._flats: list[Flat] = []
        self._fixed_layers: Sequence[torch.nn.Module] = ()
        self._handles: list[Any] = []  # of backward hooks
        self._host: HostMemory | None = None
        self._stepped = self._changed = False
        with self.untouched():
            self._channels_last = self._takes_channels_last()
            self._probe_task(sample)
        self.task.own_loss = own_method(self.model, ["training_step"])
        if table:
            self._set(self._first_weights(self._trainable, config.seed))

    @property
    def axes(self) -> str:  # type: ignore[override]
        return "channels last" if self._channels_last else "channels first"

    def _check_state(self, model: torch.nn.Module) -> None:
        """Refuse weights that are no real numbers, and remark on what checkpoints do not have."""
        where = f"model.name: {self.config.model.name}"
        pairs = [name for name, p in model.named_parameters() if p.is_complex() and p.requires_grad]
        if pairs:
            fix = "make it a parameter of real numbers, (..., 2), and take torch.view_as_complex of it in forward"
            raise ConfigError(f"the weight {pairs[0]} has complex numbers", where=where, fix=fix)
        for name, layer in model.named_modules():
            if type(layer).get_extra_state is not torch.nn.Module.get_extra_state:
                what = f"checkpoints have no state of get_extra_state ({name or type(layer).__name__})"
                self.task.about_model.append(f"{what}: eval, predict and a resumed run begin without it; use buffers")
        for name, x in model.named_buffers():
            whole = is_lazy(x) or x.dtype != torch.float64 or self.dtype == torch.float64
            if not whole and not torch.equal(x.float().double(), x):
                what = f"the numbers of the buffer {name} are rounded from 64 to 32 bits"
                self.task.about_model.append(f"{what} (precision: {self.config.precision})")

    def _on_devices(self, model: torch.nn.Module) -> torch.nn.Module:
        return moved(model, self.device, self.dtype)

    def _take_shapes(self) -> None:
        """Initialize lazy layers (``LazyLinear``) by a forward pass of two samples."""
        try:
            self._try_forward(channels_last=False)
        except UNTAKEN as error:
            raise untaken(self.config.model.name, self._sample, error) from error
        if lazy(self.model):
            what = f"{', '.join(lazy(self.model))} has no shape yet: no sample reaches this lazy layer"
            where = f"model.name: {self.config.model.name}"
            raise ConfigError(what, where=where, fix="use it in forward, or leave it out")

    def _takes_channels_last(self) -> bool:
        """Decide whether images and kernels are stored channels last."""
        # That is a third faster on CPUs for SINGA's CNN, a tenth for ResNet-18. Models whose forward fails with it
        # (``view`` after a convolution) keep channels first.
        images = any(field.image for field in self._sample.inputs.values())
        kernels = any(p.dim() == 4 for p in self.model.parameters())
        mixed = self.device.type == "cuda" and self.config.precision not in MIXED
        if images and kernels and not mixed:
            self.model.to(memory_format=torch.channels_last)
            try:
                self._try_forward(channels_last=True)
                return True
            except (*UNTAKEN, ConfigError) as error:
                if isinstance(error, ConfigError) and not self.task.step:
                    raise
                self.model.to(memory_format=torch.contiguous_format)
        unsure = any(field.whole for field in self._sample.inputs.values()) or may_be_images(self._sample)
        if len(self._sample.inputs) > 1 or unsure:
            try:
                self._try_forward(channels_last=False)
            except UNTAKEN as error:
                raise untaken(self.config.model.name, self._sample, error) from error
        return False

    def _try_forward(self, channels_last: bool) -> None:
        """Run a forward pass of two samples of zeros; raises what the model raises."""
        # Not in inference mode: a tensor that the model caches here must also work in training.
        self._channels_last = channels_last
        self._eval_of(*self.to_device(made_up(self._sample))[:2])

    @torch.no_grad()
    def _eval_outputs(self, inputs: Mapping[str, torch.Tensor]) -> Any:
        self.model.eval()
        return self._outputs(inputs)

    @torch.no_grad()
    def _eval_of(self, inputs: Mapping[str, torch.Tensor], labels: Mapping[str, torch.Tensor]) -> Any:
        self.model.eval()
        return self._of_batch(inputs, labels)

    def _of_batch(self, inputs: Mapping[str, torch.Tensor], labels: Mapping[str, torch.Tensor]) -> Any:
        """Return the model's outputs; of a user's step what it returns."""
        if not self.task.step:
            return self._outputs(inputs)
        training = self.model.training
        before = self._gradient_versions() if training else []
        with self._running(inputs), self._mixed:
            result = self.task.step(self.model, one_or_all(inputs), one_or_all(labels), training)
        if training and self._gradient_versions() != before:
            what = "the step calls backward(), whose gradients would be added to those of the loss"
            raise ConfigError(what, where=self.task.step.where, fix="take the gradients by torch.autograd.grad")
        return converted(result, lambda x: x.to(self.dtype))

    def _gradient_versions(self) -> list[Any]:
        """Return what changes when a gradient of a weight does."""
        return [None if p.grad is None else (id(p.grad), p.grad._version) for p in self._trainable.values()]

    def _step_weights_vary(self, placed) -> bool:
        self.model.eval()
        with torch.enable_grad():
            return any(w.requires_grad for w in self._of_batch(*placed[:2]).weights)

    def _step_counts(self, placed) -> torch.Tensor:
        return self.task.counts_of(self._eval_of(*placed[:2]), placed[2])

    def _outputs(self, inputs: Mapping[str, torch.Tensor]) -> Any:
        """Return the model's outputs: a tensor, or a dict of tensors."""
        with self._running(inputs), self._mixed:
            outputs = self.model(*inputs.values()) if len(inputs) == 1 else self.model(**inputs)
        outputs = checked(outputs, self.config.model.name)
        if isinstance(outputs, Mapping):
            return {name: x.to(self.dtype) for name, x in outputs.items()}
        return outputs.to(self.dtype)

    def _running(self, inputs: Mapping[str, torch.Tensor]) -> AbstractContextManager:
        """Return the context in which the model is called: compiled if it trains on a full batch, else as it is."""
        if self._compiled is None:
            return nullcontext()
        # The ranks' parts of a full batch differ by one sample. Batch normalization of a single sample, or of a row of
        # padding, is not compiled.
        full = len(next(iter(inputs.values()))) >= max(self._capacity - 1, 2)
        return self._compiled.running(compiled=self.model.training and full)

    def specs(self) -> list[TensorSpec]:
        dtype = str(self.dtype).removeprefix("torch.")
        shapes = {n: stored_shape(p.shape, self._channels_last) for n, p in self._unfrozen.items()}
        return [TensorSpec(self.layouts[n].name, shape, dtype) for n, shape in shapes.items()]

    def without_dropout(self) -> None:
        self.without_dropout_in(self.model)

    @staticmethod
    def without_dropout_in(model: torch.nn.Module) -> None:
        for layer in model.modules():
            if isinstance(layer, torch.nn.modules.dropout._DropoutNd):
                layer.p = 0.0
            elif isinstance(getattr(layer, "dropout", None), float):  # recurrent layers, attention
                layer.dropout = 0.0

    def host_memory(self, auto: bool = False) -> HostMemory | None:
        usable = self.device.type == "cpu" and pages_are_known()
        self._host = HostMemory.of(self.groups.data, in_memory, usable, one_host=auto)
        return self._host

    def waited(self, fresh: bool = True) -> float:
        return self.groups.data.waited + (self._host.waited if self._host else 0.0)

    def peak_device_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0

    def _check_changes(self) -> None:
        """Before an update: take in changes that the user's code made to weights, and refuse replaced parameters."""
        if not self._stepped:
            self._check_none_is_late()
            self._stepped = True
        if replaced := [leaf for known, leaf, p in self._weight_places if known.get(leaf) is not p]:
            what = f"the model has replaced its '{replaced[0]}', a weight that is trained"
            fix = "make it a buffer, or change it in place, the same on all ranks"
            raise ConfigError(what, where=f"model.name: {self.config.model.name}", fix=fix, common=True)
        for flat in self._flats:
            flat.take_back()
        if self._host:
            own = self._host.copies.tensors if self._host.copies.changed() else ()
            # 0: nothing was changed. The update shows it to the other ranks.
            self._host.post(sum(checksum(x.numpy()) for x in own) % 2**63 + 1 if own else 0)

    @torch.no_grad()
    def _take_changes(self) -> None:
        """Write this rank's part of the user's changes to the shared weights, while no rank reads them."""
        assert self._host
        posted = self._host.posted()
        self._changed = any(posted)
        if len(set(posted)) > 1:
            what = "the model's code changes its weights, and differently on each rank"
            fix = "let the change depend on nothing that differs between ranks, such as their samples"
            raise ConfigError(what, where=f"model.name: {self.config.model.name}", fix=fix, common=True)
        if self._changed:
            for b, (flat, own) in enumerate(zip(self._flats, self._host.copies.tensors, strict=True)):
                part = slice(*self._bounds(b))
                flat.weight[part] = own[part]

    def _check_none_is_late(self) -> None:
        """Raise ConfigError if the model got a weight or buffer in its first step: nobody trains, saves or joins it."""
        known = {(id(owner), leaf) for owner, leaf in self._places.values()}
        tensors = {id(x) for x in (*self._trainable.values(), *self._fixed.values())}  # tied ones have several places
        for owner in self.model.modules():
            if isinstance(owner, torch.jit.ScriptModule):
                continue
            for leaf, x in (*owner._parameters.items(), *owner._buffers.items()):
                late = (id(owner), leaf) not in known and id(x) not in tensors and x is not None
                if late and leaf not in owner._non_persistent_buffers_set:
                    what = f"{type(owner).__name__} got '{leaf}' in its first step, which no checkpoint would have"
                    fix = "make it in __init__, with its shape (torch.zeros(...))"
                    raise ConfigError(what, where=f"model.name: {self.config.model.name}", fix=fix, common=True)

    def connect(self, update: StepUpdate) -> Optimizer:
        self._host = None
        self._connect(update)
        return flat_optimizer(self.config.optim, self._flats, self.layouts, TorchOps(self.device))

    def connect_sharded(self, update: DividedUpdate) -> ShardedOptimizer:
        self._connect(update)
        if update.host is None:
            self._host = None
        if self._host:
            common = self._host.share([flat.weight for flat in self._flats])
            for flat, weight, own in zip(self._flats, common, self._host.copies.tensors, strict=True):
                flat.move_to(weight, own)
        optimizer = ShardedOptimizer(self.config.optim, self._flats, self.layouts, TorchOps(self.device), update)
        if self._host:
            self._bounds, optimizer.before = update.bounds, self._take_changes
        return optimizer

    def _connect(self, update: StepUpdate) -> None:
        # Looked up in each step, so (the layer's parameters, attribute, weight) for 60 ns each.
        self._weight_places = [
            (owner._parameters, leaf, self._trainable[name])
            for name, (owner, leaf) in self._places.items()
            if name in self._trainable and not isinstance(owner, torch.jit.ScriptModule)
        ]
        exact = self.config.exact and self.groups.data.size > 1
        if exact and (embedding := embeddings.dependent_on_batch(self.model)):
            raise ConfigError(embedding, where=f"model.name: {self.config.model.name}", fix=embeddings.FIX)
        self.update = update
        names, parameters = list(self._unfrozen), list(self._unfrozen.values())
        freeze(self._trainable, names)
        align = GPU_ALIGN if self.device.type == "cuda" else 1
        # From here on the parameters are views of the buckets.
        self._flats = [
            Flat([names[i] for i in b], [parameters[i] for i in b], self._channels_last, align, update.delay + 1)
            for b in update.buckets
        ]
        self._fixed_layers = batchnorm.of_weights(self.model, self._fixed_statistics())
        self._layers = [layer for layer in self.model.modules() if layer not in self._fixed_layers]
        if self.config.model.recompute:
            recompute.take(self.model, self.config.model.recompute)
        if self.config.model.compile and self._compiled is None:
            self._compiled = Compiled(self.model, self.config.model.compile)
            self._batchnorm.traceable = self._batchnorm.communicator.size == 1
        self._sent, self._last = Overlap(update, self._start), False  # whether this is a step's last backward
        self._gathered: dict[int, torch.Tensor] = {}
        self._finite, self._arrivals = True, Counter[int]()
        # None: the first step shows whether backward reaches a gradient twice (reentrant checkpointing of shared
        # layers).
        self._overlapping = None if (overlap := self._overlap()) and self.config.overlap == "auto" else overlap
        for handle in self._handles:
            handle.remove()
        self._handles = [
            p.register_post_accumulate_grad_hook(lambda _, i=i: self._arrived(i))
            for i, p in enumerate(parameters if overlap else ())
        ]

    def _overlap(self) -> bool:
        """Return whether exchanges start during backward; not if the gradients are checked first."""
        # A delayed gradient is exchanged during the next step.
        if self.config.checks_gradients or self.update.delay:
            return False
        gpu = self.device.type == "cuda"
        return overlaps(self.config.overlap, self.groups.data, gpu, torch.get_num_threads())

    def _arrived(self, i: int) -> None:
        """Note that gradient ``i`` is final; the last one of a bucket starts its exchange."""
        if not self._last or self._overlapping is False:
            return
        if self._overlapping is None:
            self._arrivals[i] += 1
        elif self._sent.bucket[i] in self._sent.started:
            what = "a gradient changed after its exchange had begun: the model runs a part of its backward twice"
            raise ConfigError(what, where="exchange.overlap", fix="set exchange.overlap: false")
        else:
            self._sent.arrived(i)

    def _decide(self) -> None:
        """After the first step's backward, decide whether to overlap, alike on all ranks."""
        repeated = bytes([max(self._arrivals.values(), default=0) > 1])
        self._overlapping = not any(part[0] for part in self.groups.data.allgather_bytes(repeated))

    def _start(self, bucket: int) -> Any:
        started = self.update.start(bucket, self._gradient(bucket))
        self._flats[bucket].drop_gradients()
        del self._gathered[bucket]  # only the exchange needs it now, and may free its memory before the step
        return started

    def _gradient(self, bucket: int) -> torch.Tensor:
        """Return the flat gradient of a bucket; it is joined once per step."""
        if bucket not in self._gathered:
            self._gathered[bucket] = self._flats[bucket].gather().to(self.device)
        return self._gathered[bucket]

    def _gradients(self) -> list[torch.Tensor]:
        return [self._gradient(b) for b in range(len(self._flats))]

    def _discard_gradients(self, handed_over: bool = False) -> None:
        self._gathered.clear()
        for flat in self._flats:
            flat.discard_gradients(handed_over)

    def to_device(self, batch: Batch) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], torch.Tensor]:
        """Move a batch without its padding, which no layer may see, to the device."""
        # A rank without samples keeps one row of padding: not every layer accepts an empty batch.
        rows, fields = max(batch.count, 1), self._sample.inputs
        self._capacity = len(batch.weights)
        inputs = {name: self._place(batch.inputs[name][:rows], field) for name, field in fields.items()}
        return inputs, *self._place_labels(batch)

    def _place_labels(self, batch: Batch) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        rows, fields = max(batch.count, 1), self._label_fields(batch)
        labels = {name: self._place(batch.labels[name][:rows], field) for name, field in fields.items()}
        return labels, torch.from_numpy(batch.weights[:rows]).to(self.device, self.dtype, non_blocking=True)

    def _place(self, x: np.ndarray, field: Field) -> torch.Tensor:
        """Move an array to the device in its stored dtype, and scale it there as its field says.

        Images are stored as (height, width, channels), as decoders return them; PyTorch needs channels first.
        """
        placed = torch.from_numpy(x).to(self.device, non_blocking=True)
        if field.divisor != 1:
            # Divide by a tensor: on a GPU, torch multiplies by the inverse of a number, which changes bits.
            placed = placed.to(torch.float32, copy=True).div_(self._tensor_of(field.divisor))
        if field.mean:
            mean, std = (self._tensor_of(x, dtype=torch.float32) for x in (field.mean, field.std))
            placed = placed.sub(mean).div_(std)
        if placed.is_floating_point():
            placed = placed.to(self.dtype)
        elif placed.dtype != torch.bool:
            placed = placed.long()
        if field.image:
            placed = placed.permute(0, 3, 1, 2)
        return placed.contiguous() if field.image and not self._channels_last else placed

    def add_gradients(self, placed, scale: Scale, seed: int) -> torch.Tensor:
        inputs, labels, weights = placed
        # ``train()`` traverses all layers, which takes 1 ms of each step for 200 of them.
        if not all(map(IN_TRAINING, self._layers)) or any(map(IN_TRAINING, self._fixed_layers)):
            self._train()
        self._seed(seed)
        # Before the forward pass: a rank without samples computes on a row of padding.
        self._batchnorm.take(weights)
        loss, sums = self.task(self._of_batch(inputs, labels), labels, weights, self._scales(scale))
        loss.backward()
        return sums

    def _train(self) -> None:
        self.model.train()
        for layer in self._fixed_layers:
            layer.eval()

    def train_step(self, placed, scale: Scale, seed: int, learning_rate: float, unscale: float = 1.0) -> torch.Tensor:
        self._sent.begin()
        # Gradients of earlier micro-batches are not final, so only this backward starts exchanges.
        self._last = True
        sums = self.add_gradients(placed, scale, seed)
        self._last = False
        if self._overlapping is None:
            self._decide()
        # All ranks decide alike, so none waits for an exchange that another skips.
        if finite := self._unscale(unscale):
            self._check_changes()
            self.update.step(self._sent.finish(), learning_rate)
            if self._host and self._changed:
                self._host.copies.drop()
            self.update.begin()
        self._discard_gradients(handed_over=finite)
        return sums

    def _unscale(self, unscale: float) -> bool:
        """Divide the gradients by the loss scale; return False if some rank's are not finite."""
        if not self.config.checks_gradients:
            return True
        gradients = self._gradients()
        self._finite = float(self.update.failures(gradients)) == 0
        if self._finite and unscale != 1.0:
            torch._foreach_mul_(gradients, unscale)
        return self._finite

    def flat_weights(self) -> list[torch.Tensor]:
        return [torch.cat(flat.parts(flat.weight)).to(self.device) for flat in self._flats]

    def _native(self, stored: np.ndarray) -> np.ndarray:
        return stored.transpose(0, 3, 1, 2) if self._channels_last and stored.ndim == 4 else stored

    def _from_native(self, native: np.ndarray) -> np.ndarray:
        return native.transpose(0, 2, 3, 1) if self._channels_last and native.ndim == 4 else native

    def finite(self) -> bool:
        return self._finite

    def accumulated_squares(self) -> torch.Tensor:
        gradients = [p.grad for p in self._unfrozen.values() if p.grad is not None]
        squares = [self.ops.sum_of_squares(dense(g) if g.is_sparse else g) for g in gradients]
        return torch.stack([x.to(self.device, torch.float64) for x in squares]).sum()

    def _measure_error(self, placed, scale: Scale, seed: int) -> torch.Tensor:
        self.add_gradients(placed, scale, seed)
        figures = self.update.compression_error(self._gradients())
        self._discard_gradients()
        return figures

    @torch.no_grad()
    def evaluate_batch(self, placed) -> torch.Tensor:
        return self.task.scores(self._eval_of(*placed[:2]), *placed[1:])

    def predict(self, placed) -> Any:
        outputs, labels = self._eval_outputs(placed[0]), self._sample.labels
        if isinstance(outputs, dict):
            return {name: self._stored(x, labels.get(name)) for name, x in outputs.items()}
        return self._stored(outputs, next(iter(labels.values())) if len(labels) == 1 else None)

    def _stored(self, x: torch.Tensor, label: Field | None) -> np.ndarray:
        """Return an output in the data's axis order: images as (height, width, channels)."""
        image = label is not None and label.image and x.dim() == 4
        return self.ops.to_numpy(x.permute(0, 2, 3, 1) if image else x)

    def _tensors(self) -> dict[str, torch.Tensor]:
        weights = {f"weights/{n}": p.detach() for n, p in self._trainable.items()}
        return weights | {f"statistics/{n}": self._now(n) for n in self._fixed}

    def _now(self, name: str) -> torch.Tensor:
        """Return the tensor that now has this name: a model's forward may have replaced it (``self.mean = x``)."""
        first, (owner, leaf) = self._fixed[name], self._places[name]
        now = getattr(owner, leaf, None)
        if now is None or now is first:
            return first
        now = as_real(now)
        if now.shape != first.shape:
            if leaf in owner._non_persistent_buffers_set:  # no state, such as a table of positions that grows
                return first
            what = f"{name} had the shape {tuple(first.shape)} and now has {tuple(now.shape)}"
            raise ConfigError(what, where=f"model.name: {self.config.model.name}", fix="keep the shapes of buffers")
        return now.detach()

    def _separate(self) -> None:
        """Leave evaluation, in which layers such as LoRA's have merged their weights."""
        if not self.model.training:
            self._train()

    def _read(self, key: str) -> np.ndarray:
        prefix, _, name = key.partition("/")
        self._separate()
        if prefix == "weights":
            return array_of(self._trainable[name])
        return array_of(self._now(name).to(self._fixed[name].dtype))

    def aliases(self, canonical: bool) -> dict[str, tuple[str, TensorLayout | None]]:
        """Add all names of tied weights: a file may hold the weight under any of them."""
        known = super().aliases(canonical)
        kept = {"remove_duplicate": False}
        first: dict[int, str] = {}
        for name, x in (*self.model.named_parameters(**kept), *self.model.named_buffers(**kept)):
            there = first.setdefault(id(x), name)
            if name != there and there in known:
                known.setdefault(name, known[there])
        return known

    def _readers(self) -> Mapping[str, Callable[[], np.ndarray]]:
        return {key: partial(self._read, key) for key in self._tensors()}

    def _weights(self) -> Iterator[tuple[str, np.ndarray]]:
        self._separate()
        for flat in self._flats:
            yield from zip(flat.names, (x.numpy() for x in flat.parts(flat.weight.cpu())), strict=True)
        unfrozen = self._unfrozen
        yield from ((name, array_of(p)) for name, p in self._trainable.items() if name not in unfrozen)

    @torch.no_grad()
    def _set(self, weights: Iterable[tuple[str, np.ndarray]]) -> None:
        for name, array in weights:
            self._trainable[name].copy_(torch.from_numpy(array))

    @torch.no_grad()
    def _average(self, keys: Collection[str]) -> None:
        super()._average(keys)
        batchnorm.share_counts(self.model, self.groups.data)

    def _assign(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._separate()
        tensors = self._tensors()
        for key, array in arrays.items():
            tensors[key].copy_(torch.from_numpy(np.asarray(array)))
        if self._host and self._host.copies.changed():  # all ranks assign the same
            for flat, own in zip(self._flats, self._host.copies.tensors, strict=True):
                flat.weight.copy_(own)
            self._host.copies.drop()


def configure(threads: int) -> None:
    torch.set_num_threads(threads)


open_frontend = PyTorchFrontEnd


def cpu_ops() -> TorchOps:
    return TorchOps(torch.device("cpu"))


def gpus() -> int:
    return torch.cuda.device_count()
