"""Batch normalization on N ranks in PyTorch: extends the classes of a model's layers."""

from __future__ import annotations

import copy
import copyreg
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm

from hvd_train.core.batchnorm import combine, counting, input_gradient, joined, of_all, running
from hvd_train.errors import ConfigError
from hvd_train.frontends.pytorch.eager import eager
from hvd_train.frontends.serial import Serial
from hvd_train.protocol import Communicator, Ops


class Context:
    """What a model's layers share: the ranks that join their statistics, and whether this rank has samples."""

    def __init__(self, communicator: Communicator, ops: Ops, sync: bool) -> None:
        self.communicator: Communicator = communicator if sync else Serial()
        self.ops, self.empty = ops, False
        # Whether torch.compile may take in the layers: no statistics are joined, and each batch has several samples.
        self.traceable = False
        self.weight: Callable[[], float] = lambda: 1.0  # the weight of this rank's gradients
        # Called before each forward pass that joins statistics.
        self.before: Callable[[], None] = lambda: None
        self._first = ""  # the first layer of a forward pass
        self._of_steps, self._everyone = self.communicator, communicator
        # For layers whose statistics are gathered: the row of all samples so far.
        self._rows: dict[_Joined, torch.Tensor | None] = {}

    def begin(self, layer: str) -> None:
        """Call ``before`` if this is the first layer of a pass that joins statistics."""
        self._first = self._first or layer
        if layer == self._first:
            self.before()

    def gather(self, layers: Iterable[_Joined]) -> None:
        """From now on, add up these layers' statistics of all samples. They normalize by those of the global batch."""
        self._rows, self.communicator = dict.fromkeys(layers), self._everyone

    def gathers(self, layer: _Joined) -> bool:
        return layer in self._rows

    def add(self, layer: _Joined, total: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> None:
        row, before = counting(torch.cat([total, mean, variance * total]), self.ops), self._rows[layer]
        self._rows[layer] = row if before is None else joined([before, row], self.ops)

    def gathered(self) -> dict[_Joined, torch.Tensor]:
        """Stop gathering; return the row of each layer that had samples."""
        rows, self._rows, self.communicator = self._rows, {}, self._of_steps
        return {layer: row for layer, row in rows.items() if row is not None}

    def take(self, weights: torch.Tensor) -> None:
        """Note whether this rank has samples, from the weights (n,) of its batch."""
        # A rank without samples computes on one row of padding. Other batches have no padding.
        self.empty = len(weights) == 1 and not weights.item()


class _Joined(_BatchNorm):
    """The forward pass in training, mixed in before the layer's class: names, buffers and evaluation do not change."""

    _context: Context
    _wire: str

    def forward(self, x) -> torch.Tensor:
        if torch.compiler.is_compiling() and self._context.traceable:
            return _BatchNorm.forward(self, x)
        return self._forward(x)

    @eager
    def _forward(self, x) -> torch.Tensor:
        if not self._context.gathers(self):
            if not self.training:
                return _BatchNorm.forward(self, x)
            alone, values = self._context.communicator.size == 1, x.numel() // x.shape[1]
            if alone and values > 1 and not self._context.empty:
                return _BatchNorm.forward(self, x)  # torch's kernel, which rejects a single value
        self._check_input_dim(x)
        return _Normalize.apply(x, self.weight, self.bias, self)

    def __reduce_ex__(self, protocol) -> tuple:
        """Pickle the layer as its plain class."""
        return copyreg._reconstructor, (type(self).__mro__[2], object, None), self.__dict__  # type: ignore[attr-defined]

    def __deepcopy__(self, memo) -> _Joined:
        other = memo[id(self)] = type(self).__new__(type(self))
        other.__dict__ = copy.deepcopy(self.__dict__, memo)
        return other

    def _move_running_statistics(self, total, mean, variance) -> None:
        if self.running_mean is None or not self.track_running_stats:
            return
        if self._context.gathers(self):
            self._context.add(self, total, mean, variance)
            return
        share = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_((total > 0).long()[0])
        # torch's momentum=None.
        if share is None:  # the mean over all batches
            share = 1.0 / self.num_batches_tracked.clamp(min=1).to(self.running_mean.dtype)
        old = self.running_mean, self.running_var
        total, mean, variance = (x.to(old[0].dtype) for x in (total, mean, variance))
        new = running(old, total, mean, variance, share, self._context.ops)
        for target, value in zip(old, new, strict=True):
            target.copy_(value)


class _Normalize(torch.autograd.Function):
    """One allgather forward, one allreduce backward. x: (n, C, ...); a rank's row: [count, means, deviations]."""

    @staticmethod
    def forward(ctx, x, weight, bias, layer) -> torch.Tensor:
        context, wide = layer._context, _wide(x)
        # (1, 1 + 2 C): a rank without samples sends zeros, with count 0.
        part = wide.new_zeros(1, 1 + 2 * x.shape[1])
        if not context.empty:
            variance, mean = torch.var_mean(wide, _others(x), correction=0)
            count = x.numel() // x.shape[1]
            part = torch.cat([mean.new_full((1,), count), mean, variance * count]).unsqueeze(0)
        communicator = context.communicator
        context.begin(layer._wire)
        parts = communicator.synchronize(communicator.allgather_async(part, f"{layer._wire}.forward"))
        total, mean, variance = combine(parts, context.ops)
        layer._move_running_statistics(total, mean, variance)
        inverse = torch.rsqrt(variance + layer.eps)
        ctx.save_for_backward(x, weight, mean, inverse, total)
        ctx.layer, ctx.has_samples, ctx.has_bias = layer, 0.0 if context.empty else 1.0, bias is not None
        # (n, C, ...), computed in 32 bits at least.
        y = (wide - _along(mean, x)) * _along(inverse if weight is None else inverse * weight, x)
        return (y if bias is None else y + _along(bias, x)).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, inverse, total = ctx.saved_tensors
        communicator, gradient = ctx.layer._context.communicator, _wide(gradient)
        normal = (_wide(x) - _along(mean, x)) * _along(inverse, x)
        # The parameters' gradients stay local: the exchange adds them like all other gradients.
        bias_gradient, weight_gradient = gradient.sum(_others(x)), (gradient * normal).sum(_others(x))
        x_gradient = None
        if ctx.needs_input_grad[0]:
            # The other ranks need this rank's sums for their gradients.
            share = ctx.layer._context.weight()
            # (2, C): sums of dL/dy and of dL/dy normal.
            sums = torch.stack([bias_gradient, weight_gradient]) * share
            handle = communicator.allreduce_async(sums, f"{ctx.layer._wire}.backward")
            first, second = communicator.synchronize(handle) / (total.clamp(min=1) * share)
            factor = _along(inverse if weight is None else inverse * weight, x)
            means = _along(first, x), _along(second, x)
            x_gradient = input_gradient(gradient, normal, factor, ctx.has_samples, means).to(x.dtype)
        weight_gradient = None if weight is None else weight_gradient.to(weight.dtype)
        bias_gradient = bias_gradient.to(weight.dtype) if ctx.has_bias else None
        return x_gradient, weight_gradient, bias_gradient, None


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Return x in at least 32 bits, which statistics need."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _others(x: torch.Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _along(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return values.reshape(1, -1, *[1] * (x.dim() - 2))


def of_weights(model: torch.nn.Module, names: Collection[str]) -> list[torch.nn.Module]:
    """Return the layers that have one of these weights."""
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)]
    return [x for name, x in layers if any(f"{name}.{kind}".lstrip(".") in names for kind in ("weight", "bias"))]


def prepare(model: torch.nn.Module, communicator: Communicator, ops: Ops, sync: bool, swa: bool = False) -> Context:
    """Attach the context to every batch normalization of ``model``, replacing that of an earlier training.

    The instances get another class. ``swa``: statistics will be recomputed for the averaged weights.
    """
    context = Context(communicator, ops, sync)
    for name, layer in model.named_modules():
        if not isinstance(layer, _BatchNorm):
            continue
        kind: Any = type(layer).__mro__[2] if isinstance(layer, _Joined) else type(layer)
        where = f"model layer {name or kind.__name__}"
        if kind.forward not in (_BatchNorm.forward, SyncBatchNorm.forward):
            if sync or swa:
                fix = "switch sync_batchnorm off" if sync else "leave swa out"
                raise ConfigError(f"{kind.__name__} has a forward of its own", where=where, fix=fix)
            continue
        if sync and not layer.track_running_stats:
            what = "track_running_stats=False normalizes an evaluation by its own batches, which depend on the ranks"
            raise ConfigError(what, where=where, fix="switch sync_batchnorm off, or track the statistics")
        if layer.momentum is not None:
            # No computation uses it and Keras has none, so leave it out: checkpoints fit both frameworks.
            layer.num_batches_tracked = None
        layer.__class__ = type(kind.__name__, (_Joined, kind), {"_context": context, "_wire": f"batchnorm.{name}"})
    return context


def share_counts(model: torch.nn.Module, communicator: Communicator) -> None:
    """Set the batch count of all ranks' layers with ``momentum=None`` to the largest one.

    A rank whose part of a batch was empty has counted less, so its next batch would weigh more than the others'.
    """
    counts = [
        layer.num_batches_tracked
        for layer in model.modules()
        if isinstance(layer, _Joined) and layer.num_batches_tracked is not None
    ]
    if not counts or communicator.size == 1:
        return
    parts = communicator.allgather_bytes(np.array([int(x) for x in counts]).tobytes(), "batches")
    largest = np.max([np.frombuffer(part, np.int64) for part in parts], axis=0)
    for count, most in zip(counts, largest.tolist(), strict=True):
        count.fill_(most)


class Gathering:
    """The part of a front-end that recomputes running statistics for given weights."""

    ops: Ops
    _batchnorm: Context
    _layers: list[torch.nn.Module]
    _eval_of: Any

    def begin_statistics(self) -> bool:
        layers = [layer for layer in self._layers if isinstance(layer, _Joined)]
        self._batchnorm.gather(layers)
        return bool(layers)

    @torch.no_grad()
    def add_statistics(self, placed) -> None:
        inputs, labels, weights = placed
        self._batchnorm.take(weights)
        self._eval_of(inputs, labels)

    @torch.no_grad()
    def take_statistics(self) -> None:
        for layer, row in self._batchnorm.gathered().items():
            if row[0] == 0:  # no sample has weight: keep the statistics of training
                continue
            for target, value in zip((layer.running_mean, layer.running_var), of_all(row, self.ops), strict=True):
                target.copy_(value)
