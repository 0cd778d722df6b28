"""Begin distributed training of a model that has its weights."""

from __future__ import annotations

import json
import re
import warnings
import weakref
from dataclasses import dataclass
from typing import Any

import keras

from hvd_train.compression.uncompressed import Uncompressed
from hvd_train.config import ExchangeConfig
from hvd_train.core.agreement import agree
from hvd_train.protocol import Communicator, Compressor
from hvd_train.script.keras import layers, losses, metrics, verify_mode
from hvd_train.script.keras.backends import slow_rank_report
from hvd_train.script.keras.fit import DistributedFit
from hvd_train.script.keras.gradients import Reduction, connect, count_samples, watch_inputs
from hvd_train.script.keras.local_training import LocalModel, LocalReduction
from hvd_train.script.keras.patches import Patches, optimizers_of, with_rates
from hvd_train.script.keras.sharded import ShardedUpdate
from hvd_train.script.keras.sharded_saving import SharedSaving
from hvd_train.script.shared.record import recording

scaled: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers whose learning rate has been scaled, once


@dataclass
class Start:
    """A model and its optimizers, about to be distributed. ``arguments``: of ``hk.distribute``, by name."""

    model: Any
    optimizers: list[Any]
    communicator: Communicator
    backend: Any
    exchange: ExchangeConfig
    compressor: Compressor
    patches: Patches
    arguments: dict[str, Any]
    where: str

    def begin(self) -> None:
        """Patch the model and its optimizers, and give all ranks rank 0's state; on all ranks together."""
        model, communicator, patches = self.model, self.communicator, self.patches
        optimizer, *others = self.optimizers
        # With several optimizers, it is not known yet which variables belong to which.
        if not optimizer.built and not others:
            optimizer.build(model.trainable_variables)
        # Before anything is changed or sent: with different shapes the first broadcast would fail.
        agree(communicator, _facts(model, self.arguments))
        layers.agree_on_settings(model, communicator)
        if self.arguments["lr_scaling"] == "linear":
            for x in set(with_rates(self.optimizers)) - set(scaled):
                x.learning_rate = float(keras.ops.convert_to_numpy(x.learning_rate)) * communicator.size
                scaled.add(x)
        if model.compiled and model.jit_compile:
            model.jit_compile = False
            if communicator.rank == 0:
                warnings.warn("jit_compile is off: a compiled graph cannot contain a transfer", stacklevel=3)
        local = not self.exchange.spec.gradients
        # Gradients that stay local are not compressed.
        kind, compressor = (LocalReduction, Uncompressed()) if local else (Reduction, self.compressor)
        reduction = kind(model.trainable_variables, compressor, communicator, self.backend)
        connect(optimizer, reduction, self.backend, patches)
        for other in others:
            connect(other, reduction, self.backend, patches, reduction.of_others(self.compressor, communicator))
        count_samples(model, reduction, self.backend, patches)
        watch_inputs(model, reduction, patches)
        losses.share_losses(model, reduction, patches)
        if model.compiled:
            metrics.share_means(model, reduction, patches, communicator.rank == 0)
        given = self.arguments
        fit = DistributedFit(
            model,
            communicator,
            reduction,
            patches,
            shard=given["shard"],
            seed=given["seed"],
            every=given["agreement_every_n_steps"],
            slow=slow_rank_report(),
        )
        state = fit.state
        state.share_layer_states(self.where)
        state.take_from_rank_0()
        if local:
            self._start_local_training(fit, reduction)
        fit.follow()
        if self.arguments["sharded"] and communicator.size > 1:
            state.sharded = [ShardedUpdate(x, communicator, self.backend, patches) for x in self.optimizers]
            fit.turns = SharedSaving(model, state.sharded, communicator, patches).turns
        if model.compiled:
            state.trace_again()
        if record := recording():
            verify_mode.add(model, record)

    def _start_local_training(self, fit: DistributedFit, reduction: Reduction) -> None:
        communicator, (optimizer,) = self.communicator, self.optimizers
        fit.local = self.patches.local = local = LocalModel(
            self.model, optimizer, self.exchange, communicator, self.backend, reduction, self.where
        )
        fit.turns = local.turns
        local.patch(self.model, self.patches, communicator.rank)


def _facts(model: Any, arguments: dict[str, Any]) -> dict[str, str]:
    """Return {name: text} of everything that must be equal on all ranks.

    Keras' numbers of layers are left out: they differ if one rank has built another model before.
    """
    paths = [re.sub(r"_\d+(?=/)", "", v.path) for v in model.variables]
    facts = {
        f"weight {k}": f"{path} {tuple(v.shape)} {v.dtype}"
        for k, (path, v) in enumerate(zip(paths, model.variables, strict=True))
    }
    configs = [json.dumps(layers.comparable(x.get_config())) for x in optimizers_of(model)]
    kinds = [type(x).__name__ for x in optimizers_of(model)]
    config = {"optimizer": "; ".join(map(" ".join, zip(kinds, configs, strict=True)))}
    return {"keras": keras.__version__, "backend": keras.backend.backend(), **facts, **config} | {
        f"hk.distribute({name}=)": str(value) for name, value in arguments.items()
    }
