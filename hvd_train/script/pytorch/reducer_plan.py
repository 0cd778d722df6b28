"""The reducers of one ``ht.distribute``: the first one, and one for each set of parameters unfrozen later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from hvd_train.compression import make
from hvd_train.core.agreement import agree, collectively
from hvd_train.frontends.devices import overlaps
from hvd_train.frontends.pytorch import batchnorm
from hvd_train.frontends.pytorch.ops import TorchOps
from hvd_train.protocol import Communicator
from hvd_train.script.pytorch import registry, uneven_parts
from hvd_train.script.pytorch.buffers import Buffers
from hvd_train.script.pytorch.checks import check_parameters
from hvd_train.script.pytorch.reducer import Reducer
from hvd_train.script.pytorch.unfreeze import Frozen
from hvd_train.script.shared.dataloader import passes


@dataclass
class ReducerPlan:
    """The settings of one ``ht.distribute``. ``whole``: one module with all ``models``."""

    communicator: Communicator
    models: list[torch.nn.Module]
    whole: torch.nn.Module
    compression: str
    exchange: Any
    average: bool
    sync_batchnorm: bool
    every: int

    def start(self, parameters: dict[str, torch.nn.Parameter]) -> None:
        """Start to reduce the gradients of ``parameters``; in a world of one, only register them."""
        if self.communicator.size == 1:
            self.remember()
            return
        if self.sync_batchnorm:
            device = next(iter(parameters.values())).device
            synchronize_batchnorm(self.whole, self.communicator, TorchOps(device), self.average)
        reducer = self._make(parameters, True)
        if statistics_of(self.whole, self.sync_batchnorm):
            passes.at_end.append(reducer.average_statistics)
        passes.at_end.append(reducer.share_buffers)
        registry.part_sync().add(reducer)
        # Integers can never be trained.
        frozen = {name: p for name, p in self.whole.named_parameters() if not p.requires_grad and p.is_floating_point()}
        reducer.frozen = Frozen(frozen, reducer, self._unfreeze)
        self._register(parameters, reducer)

    def remember(self) -> None:
        """Only register the parameters, whose gradients stay local."""
        # Frozen ones, too: their steps count after unfreezing, as with several ranks.
        self._register(dict(self.whole.named_parameters()), None)

    def _unfreeze(self, parameters: dict[str, torch.nn.Parameter]) -> Reducer:
        collectively(self.communicator, lambda: check_parameters(parameters))
        # Otherwise gradients of different parameters would be added.
        agree(self.communicator, {name: "trained from now on" for name in parameters}, "unfrozen")
        reducer = self._make(parameters, False)
        self._register(parameters, reducer)
        registry.part_sync().add(reducer)
        return reducer

    def _make(self, parameters: dict[str, torch.nn.Parameter], first: bool) -> Reducer:
        on_gpu = next(iter(parameters.values())).device.type == "cuda"
        world = self.communicator
        return Reducer(
            parameters,
            statistics_of(self.whole, self.sync_batchnorm) if first else [],
            world,
            make(self.compression, world.size, world.rank, **self.exchange.options(self.compression)),
            lossy=self.compression != "none",
            overlap=overlaps(self.exchange.overlap, world, on_gpu, torch.get_num_threads()),
            average=self.average,
            buffers=Buffers(self.whole, world) if first else None,
            model=self.whole if first else None,
            every=self.every,
            # Equal on all ranks, which distribute in the same order; part of the transfer names.
            number=len(registry.distributed),
            slow=registry.slow_rank_report(),
        )

    def _register(self, parameters: dict[str, torch.nn.Parameter], reducer: Reducer | None) -> None:
        registry.distributed.extend((model, reducer) for model in self.models)
        registry.parameters.update({id(p): (p, reducer) for p in parameters.values()})


def statistics_of(model: torch.nn.Module, sync_batchnorm: bool) -> list[tuple[torch.nn.Module, str]]:
    """Return (layer, name) of the running means and variances that each rank computes from its own batches."""
    # Synchronized layers use the global batch, so their statistics are equal on all ranks.
    synchronized = _BatchNorm if sync_batchnorm else ()
    norms = [layer for layer in model.modules() if isinstance(layer, _NormBase)]
    layers = [layer for layer in norms if not isinstance(layer, synchronized)]
    names = ("running_mean", "running_var")
    return [(layer, name) for layer in layers for name in names if getattr(layer, name) is not None]


def synchronize_batchnorm(model: torch.nn.Module, communicator: Communicator, ops: TorchOps, average: bool) -> None:
    """Make batch normalization use the statistics of the global batch."""
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    counts = [layer.num_batches_tracked for layer in layers]
    context = batchnorm.prepare(model, communicator, ops, True)
    if average:
        # In a backward pass all ranks are here: they decide on the batch now, if they compare lengths for it.
        context.weight = passes.averaged

    def before() -> None:
        registry.part_sync().arrive(uneven_parts.FORWARD)
        registry.unshared_sums().shared()  # a pass without steps but with communication, like torch's update_bn

    context.before = before
    for layer, count in zip(layers, counts, strict=True):
        layer.num_batches_tracked = count  # it belongs to the user's state_dict
