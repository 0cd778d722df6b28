"""Batch normalization on N ranks in PyTorch: what torch's layers lack is added to the instances of a model."""

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
    """The context of a model's layers: the ranks that join their statistics, and what this forward pass is over."""

    def __init__(self, communicator: Communicator, ops: Ops, sync: bool) -> None:
        self.communicator: Communicator = communicator if sync else Serial()
        self.ops, self.empty = ops, False
        self.weight: Callable[[], float] = lambda: 1.0  # by which this rank's gradients will count
        # Called before each forward pass that joins statistics.
        self.before: Callable[[], None] = lambda: None
        self._first = ""  # the layer that a forward pass comes to first
        self._of_steps, self._everyone = self.communicator, communicator
        # Rows of all samples so far, of the layers whose statistics are gathered.
        self._rows: dict[_Joined, torch.Tensor | None] = {}

    def begin(self, layer: str) -> None:
        """Note that a layer is about to join its statistics, and call ``before`` at the first layer of a pass."""
        self._first = self._first or layer
        if layer == self._first:
            self.before()

    def gather(self, layers: Iterable[_Joined]) -> None:
        """Add up these layers' statistics of all samples from now on. They normalize by those of the global batch."""
        self._rows, self.communicator = dict.fromkeys(layers), self._everyone

    def gathers(self, layer: _Joined) -> bool:
        return layer in self._rows

    def add(self, layer: _Joined, total: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> None:
        row, before = counting(torch.cat([total, mean, variance * total]), self.ops), self._rows[layer]
        self._rows[layer] = row if before is None else joined([before, row], self.ops)

    def gathered(self) -> dict[_Joined, torch.Tensor]:
        """Return the row of each layer that had samples, and gather no more."""
        rows, self._rows, self.communicator = self._rows, {}, self._of_steps
        return {layer: row for layer, row in rows.items() if row is not None}

    def take(self, weights: torch.Tensor) -> None:
        """Note whether this rank has samples, by the weights (n,) of its batch."""
        # Without any it computes on one row of padding; else a batch holds samples alone.
        self.empty = len(weights) == 1 and not weights.item()


class _Joined(_BatchNorm):
    """The forward pass in training; comes before the layer's class, so names, buffers and evaluation stay."""

    _context: Context
    _wire: str

    @eager
    def forward(self, x) -> torch.Tensor:
        if not self._context.gathers(self):
            if not self.training:
                return _BatchNorm.forward(self, x)
            alone, values = self._context.communicator.size == 1, x.numel() // x.shape[1]
            if alone and values > 1 and not self._context.empty:
                return _BatchNorm.forward(self, x)  # torch's kernel, which refuses a single value
        self._check_input_dim(x)
        return _Normalize.apply(x, self.weight, self.bias, self)

    def __reduce_ex__(self, protocol) -> tuple:
        """Pickle the layer as its plain class, because a file knows no ranks."""
        return copyreg._reconstructor, (type(self).__mro__[2], object, None), self.__dict__  # type: ignore[attr-defined]

    def __deepcopy__(self, memo) -> _Joined:
        other = memo[id(self)] = type(self).__new__(type(self))
        other.__dict__ = copy.deepcopy(self.__dict__, memo)
        return other

    def _move_running_statistics(self, total, mean, variance) -> None:
        """Move the running statistics."""
        if self.running_mean is None or not self.track_running_stats:
            return
        if self._context.gathers(self):
            self._context.add(self, total, mean, variance)
            return
        share = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_((total > 0).long()[0])
        # momentum=None in torch.
        if share is None:  # the mean over all batches
            share = 1.0 / self.num_batches_tracked.clamp(min=1).to(self.running_mean.dtype)
        old = self.running_mean, self.running_var
        total, mean, variance = (x.to(old[0].dtype) for x in (total, mean, variance))
        new = running(old, total, mean, variance, share, self._context.ops)
        for target, value in zip(old, new, strict=True):
            target.copy_(value)


class _Normalize(torch.autograd.Function):
    """One allgather forward, one allreduce backward. x: (n, C, ...); the wire's row: [count, means, deviations]."""

    @staticmethod
    def forward(ctx, x, weight, bias, layer) -> torch.Tensor:
        context, wide = layer._context, _wide(x)
        # (1, 1 + 2 C): a rank without samples gives a row of zeros, which counts nothing.
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
        # The parameters' gradients stay local: the exchange adds them like all others.
        bias_gradient, weight_gradient = gradient.sum(_others(x)), (gradient * normal).sum(_others(x))
        x_gradient = None
        if ctx.needs_input_grad[0]:
            # The others' gradients reach them through this one's.
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
    """Return x in 32 bits at least, which statistics need."""
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
    """Give every batch normalization of ``model`` the context, in place of the one that an earlier training left; the
    instances change their class, nothing else. ``swa``: their statistics will be gathered anew."""
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
            # No arithmetic uses it, and Keras has none: checkpoints cross.
            layer.num_batches_tracked = None
        layer.__class__ = type(kind.__name__, (_Joined, kind), {"_context": context, "_wire": f"batchnorm.{name}"})
    return context


def share_counts(model: torch.nn.Module, communicator: Communicator) -> None:
    """Give the layers of all ranks the largest count of batches; layers with ``momentum=None`` have one.

    A rank whose part of a batch was empty has counted less. Its next batch would weigh more than the others'.
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
    """The part of a front-end that gathers running statistics of given weights."""

    ops: Ops
    _batchnorm: Context
    _layers: list[torch.nn.Module]
    _eval_outputs: Any

    def begin_statistics(self) -> bool:
        layers = [layer for layer in self._layers if isinstance(layer, _Joined)]
        self._batchnorm.gather(layers)
        return bool(layers)

    @torch.no_grad()
    def add_statistics(self, placed) -> None:
        inputs, _, weights = placed
        self._batchnorm.take(weights)
        self._eval_outputs(inputs)

    @torch.no_grad()
    def take_statistics(self) -> None:
        for layer, row in self._batchnorm.gathered().items():
            if row[0] == 0:  # no sample counts: the statistics of training stay
                continue
            for target, value in zip((layer.running_mean, layer.running_var), of_all(row, self.ops), strict=True):
                target.copy_(value)
