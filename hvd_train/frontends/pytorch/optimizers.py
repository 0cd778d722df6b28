"""PyTorch's optimizers over flat buckets. A kernel updates lists of tensors in place: buckets, parts of them, or views.

torch's functions are the reference formulas. Its optimizer classes are not used: they import torch's compiler only to
disable it, which takes 75 MB and 1.3 s on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from hvd_train.config import OptimConfig
from hvd_train.config.optimizers import OPTIMIZERS
from hvd_train.frontends.named_arrays import NamedArrays, TensorLayout
from hvd_train.frontends.pytorch.buckets import Flat
from hvd_train.frontends.pytorch.ops import TorchOps
from hvd_train.update import layerwise as formulas
from hvd_train.update.parameter_groups import TensorSettings, rule_of, step_key

BLOCK = 1 << 15  # entries
Tensors = list[torch.Tensor]
Total = formulas.Total


class Kernel(Protocol):
    """A formula that updates weights.

    ``slots``: their names; ``counts_steps``: whether it needs the number of the step; ``per_tensor``: whether it uses
    norms of tensors, and so needs whole tensors in their shapes.
    """

    slots: tuple[str, ...]
    counts_steps: bool
    per_tensor: bool

    def __call__(
        self,
        weights: Tensors,
        gradients: Tensors,
        slots: Sequence[Tensors],
        steps: Tensors,
        learning_rate: float,
        total: Total | None = None,
    ) -> None:
        """Update weights and slots in place. ``steps``: () float32 for each weight, incremented here. ``total``: sums
        the norms of tensors that are divided among ranks."""


class SGD:
    counts_steps = per_tensor = False

    def __init__(self, options: OptimConfig, ops: TorchOps) -> None:
        self.options = options
        self.slots = ("momentum",) if options.momentum else ()

    def __call__(self, weights, gradients, slots, steps, learning_rate, total=None) -> None:
        o = self.options
        keys: dict[str, Any] = {"weight_decay": o.weight_decay, "momentum": o.momentum, "nesterov": o.nesterov}
        momentum = slots[0] if slots else [None] * len(weights)
        # Fused: one pass over weights, gradients and slots together.
        sgd(weights, gradients, momentum, fused=True, lr=learning_rate, dampening=0, maximize=False, **keys)


class Adam:
    slots = ("exp_avg", "exp_avg_sq")
    counts_steps, per_tensor = True, False

    def __init__(self, options: OptimConfig, ops: TorchOps) -> None:
        self.options = options

    def __call__(self, weights, gradients, slots, steps, learning_rate, total=None) -> None:
        o = self.options
        keys: dict[str, Any] = {"beta1": o.betas[0], "beta2": o.betas[1], "eps": o.eps, "weight_decay": o.weight_decay}
        keys |= {"decoupled_weight_decay": o.name == "adamw", "amsgrad": False, "maximize": False}
        adam(weights, gradients, *slots, [], steps, fused=True, lr=learning_rate, **keys)


class FormulaKernel:
    """A formula of the framework-independent table of optimizers."""

    def __init__(self, options: OptimConfig, ops: TorchOps) -> None:
        self.options, self.ops, spec = options, ops, OPTIMIZERS[options.name]
        self._formula, self.slots = spec.formula, spec.slots_of(options.momentum)
        self.counts_steps, self.per_tensor = spec.counts_steps, spec.per_tensor

    def __call__(self, weights, gradients, slots, steps, learning_rate, total=None) -> None:
        t = None
        if self.counts_steps:
            torch._foreach_add_(steps, 1)
            t = steps[0].double()  # (), in 64 bits: 1 - beta^t cancels in 32

        @cache
        def there(device: torch.device) -> tuple[Any, ...]:
            # A schedule-free optimizer's learning rate is a tensor.
            now, rate = (x.to(device) if isinstance(x, torch.Tensor) else x for x in (t, learning_rate))
            return now, rate, self.options, self.ops.at(device)

        tensors: Iterable[Any] = zip(weights, gradients, *slots, strict=True)
        if not self.per_tensor:
            for w, g, *here in (block for one in tensors for block in _blocks(one)):
                _take(w, here, self._formula(w, g, here, *there(w.device)))
            return
        results: Iterable[Any] = (self._formula(w, g, old, *there(w.device)) for w, g, *old in tensors)
        if total:
            results = formulas.side_by_side([*results], total)
        else:
            # One tensor at a time, which needs the least memory.
            results = (formulas.side_by_side([one], formulas.whole)[0] for one in results)
        for weight, old, result in zip(weights, zip(*slots, strict=True), results, strict=True):
            _take(weight, old, result)


def _blocks(tensors: Sequence[torch.Tensor]) -> Iterable[Sequence[torch.Tensor]]:
    """Yield tensors of one shape in blocks, whose temporaries stay in a core's cache; on a GPU each as a whole."""
    if tensors[0].is_cuda or not all(x.is_contiguous() for x in tensors):
        return [tensors]
    return zip(*(x.view(-1).split(BLOCK) for x in tensors), strict=True)


def _take(weight: torch.Tensor, slots: Iterable[torch.Tensor], result: Sequence[torch.Tensor]) -> None:
    """Change a weight and its slots by the result of a formula."""
    loss, *new = result
    weight.sub_(loss)
    for slot, value in zip(slots, new, strict=True):
        slot.copy_(value)


KERNELS: dict[str, Any] = {"sgd": SGD, "adam": Adam, "adamw": Adam}


def make_kernel(options: OptimConfig, ops: TorchOps) -> Kernel:
    return KERNELS.get(options.name, FormulaKernel)(options, ops)


class KernelTensors(NamedTuple):
    """The tensors of one kernel: ``weights`` and ``slots`` in the form that it takes, from the buckets ``flats``."""

    kernel: Kernel
    rule: TensorSettings
    buckets: list[int]
    flats: list[Flat]
    weights: Tensors
    slots: list[Tensors]
    steps: Tensors


class FlatWeights:
    """Parameters, read and assigned by flat buckets, (n,) each; read on the device ``_home``."""

    _flats: list[Flat]
    _home: torch.device

    def weights(self, bucket: int) -> torch.Tensor:
        return self._flats[bucket].packed().to(self._home)

    def parts(self, bucket: int) -> list[torch.Tensor]:
        flat = self._flats[bucket]
        return [part.to(self._home) for part in flat.parts(flat.weight)]

    @torch.no_grad()
    def take(self, bucket: int, weights: torch.Tensor) -> None:
        flat = self._flats[bucket]
        torch._foreach_copy_(flat.parts(flat.weight), flat.parts(weights.to(flat.weight.device)))


class FlatOptimizer(FlatWeights, NamedArrays):
    """A kernel over flat weights, each with a flat tensor for each slot.

    Slots are made at once, so that every checkpoint has them. All tensors of a bucket have the same rule of
    ``optim.groups``; each rule has a kernel.
    """

    words = 2

    def __init__(
        self, options: OptimConfig, flats: list[Flat], layouts: dict[str, TensorLayout], ops: TorchOps
    ) -> None:
        self.layouts, self._flats, self._home = layouts, flats, ops.device
        self.kernel: Kernel = make_kernel(options, ops)
        weights = [flat.weight for flat in flats]  # (n,) each, like their slots
        self.slots = {name: [torch.zeros_like(w) for w in weights] for name in self.kernel.slots}
        self.steps = [torch.zeros((), dtype=torch.float32, device=w.device) for w in weights]
        places: dict[TensorSettings, list[int]] = {}
        for b, flat in enumerate(flats):
            places.setdefault(rule_of(options, layouts[flat.names[0]].name), []).append(b)
        # Make the views once: for 200 layers this takes 1 ms. Weights and slots are updated in place.
        self._parts = [
            KernelTensors(
                make_kernel(rule.options(options), ops),
                rule,
                buckets,
                chosen := [flats[b] for b in buckets],
                self._for_kernel(chosen, [weights[b] for b in buckets]),
                [self._for_kernel(chosen, [slots[b] for b in buckets]) for slots in self.slots.values()],
                [self.steps[b] for b in buckets],
            )
            for rule, buckets in places.items()
        ]

    @torch.no_grad()
    def step(self, gradients: Sequence[torch.Tensor], learning_rate: float) -> None:
        for part in self._parts:
            pairs = zip(part.flats, part.buckets, strict=True)
            aligned = [flat.aligned(gradients[b].to(flat.weight.device)) for flat, b in pairs]
            rate = learning_rate * part.rule.factor
            part.kernel(part.weights, self._for_kernel(part.flats, aligned), part.slots, part.steps, rate)

    def slot(self, name: str, bucket: int) -> torch.Tensor:
        """Return (n,): a slot of a bucket's weights; do not change it in place."""
        return self._flats[bucket].packed(self.slots[name][bucket]).to(self._home)

    def _for_kernel(self, flats: list[Flat], tensors: Tensors) -> Tensors:
        """Return a flat tensor for each bucket, or views in the weights' shapes if the kernel uses norms of tensors.

        Biases and scales are (n,), whatever shape they have in the model.
        """
        if not self.kernel.per_tensor:
            return tensors
        return [
            part if self.layouts[name].is_vector else view
            for flat, x in zip(flats, tensors, strict=True)
            for name, part, view in zip(flat.names, flat.parts(x), flat.views(x), strict=True)
        ]

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return {native key: view of a flat slot, or the number of steps}."""
        tensors = {key: steps[0] for key, steps in self._counts().items()}
        for slot, flat_slots in self.slots.items():
            for flat, x in zip(self._flats, flat_slots, strict=True):
                tensors |= {f"slots/{slot}/{name}": view for name, view in zip(flat.names, flat.views(x), strict=True)}
        return tensors

    def _readers(self) -> Mapping[str, Callable[[], np.ndarray]]:
        return {key: partial(array_of, x) for key, x in self._tensors().items()}

    def _assign(self, arrays: Mapping[str, np.ndarray]) -> None:
        tensors = self._tensors()
        for key, array in arrays.items():
            tensors[key].copy_(torch.from_numpy(np.asarray(array)))
        # A checkpoint has one number of steps; torch's kernels want one for each bucket.
        for first, *others in self._counts().values():
            for steps in others:
                steps.copy_(first)

    def _counts(self) -> dict[str, Tensors]:
        """Return {key: step counters}, one for each bucket, all equal."""
        counts: dict[str, Tensors] = {}
        for part in self._parts if self.kernel.counts_steps else ():
            counts.setdefault(step_key(part.rule), []).extend(part.steps)
        return counts


def array_of(x: torch.Tensor) -> np.ndarray:
    """Return a tensor's numbers in memory order, without a copy on a CPU."""
    return x.detach().cpu().numpy()
