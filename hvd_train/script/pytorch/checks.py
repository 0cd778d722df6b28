"""Checks of models and optimizers, before they are distributed."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from hvd_train.config.conflicts import SHARDED, SUMMED, SYNC_BATCHNORM
from hvd_train.errors import ConfigError
from hvd_train.frontends.pytorch import embeddings
from hvd_train.frontends.pytorch.hidden import HIDDEN_FIX, hidden, not_part
from hvd_train.protocol import Communicator
from hvd_train.script.pytorch import registry
from hvd_train.script.pytorch.bit_sum import bits
from hvd_train.script.pytorch.elementwise import numbers_of
from hvd_train.script.pytorch.options import text_of
from hvd_train.script.shared.local_training import check_mode

WHERE = "ht.distribute"
DTYPES = (torch.float16, torch.float32, torch.float64)  # Horovod has no bfloat16


def refuse(what: str, fix: str, where: str = WHERE) -> None:
    """Raise ConfigError."""
    raise ConfigError(what, where=where, fix=fix)


def check_models(models: Sequence[Any], sync_batchnorm: bool) -> None:
    """Raise ConfigError for a model that cannot be distributed."""
    for model in models:
        if not isinstance(model, torch.nn.Module):
            refuse(f"it takes a torch.nn.Module, not a {type(model).__name__}", "call ht.distribute(model, optimizer)")
        if isinstance(model, (DistributedDataParallel, DataParallel)):
            refuse(f"the model is wrapped in {type(model).__name__}", "pass the model itself")
        if not sync_batchnorm and any(isinstance(layer, torch.nn.SyncBatchNorm) for layer in model.modules()):
            refuse("torch's SyncBatchNorm has no effect without torch.distributed", "give sync_batchnorm=True")
        if any(model is other for other, _ in registry.distributed):
            refuse(
                "this model is distributed already",
                "call ht.distribute once for each model; a further optimizer is used as it is",
            )
        if any(isinstance(p, torch.nn.parameter.UninitializedParameter) for p in model.parameters()):
            refuse("the model has lazy layers without shapes", "run one batch through it first")


def check_parameters(trained: Mapping[str, torch.nn.Parameter]) -> None:
    """Raise ConfigError for parameters that are already distributed, or of an unsupported type."""
    for name, p in trained.items():
        if id(p) in registry.parameters:
            refuse("this parameter is distributed with another model", "distribute one module that holds both", name)
        if p.dtype not in DTYPES:
            fix = "keep weights in float32, and compute under torch.autocast"
            if p.is_complex():
                fix = "keep it as real numbers, and compute with torch.view_as_complex(p)"
            refuse(f"{p.dtype} cannot be exchanged", fix, name)


def check(model: torch.nn.Module, optimizers: Sequence[Any]) -> None:
    """Raise ConfigError for parameters and optimizers that cannot be distributed. ``model``: all models in one."""
    parameters = trainable(model)
    hidden_layers = hidden(model)
    if not parameters and hidden_layers:
        refuse(not_part(hidden_layers), HIDDEN_FIX)
    if not parameters:
        refuse("the model has no trainable parameter", "set requires_grad of a part before ht.distribute")
    check_parameters(parameters)
    if len({p.device for p in parameters.values()}) > 1:
        refuse("the model lies on several devices", "one rank drives one device: move the model to ht.device()")
    # One optimizer may also train models that were distributed before.
    known = registry.parameters.keys() | {id(p) for p in model.parameters()}
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if not isinstance(optimizer, torch.optim.Optimizer):
            refuse(f"a {kind} is not an optimizer", "call ht.distribute(model, optimizer, ...)")
        if hasattr(optimizer, "_allreduce_grad_async"):
            refuse("the optimizer is Horovod's DistributedOptimizer", "pass the optimizer that it wraps")
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not held <= known:
            names = [name for name, tensors in hidden_layers.items() if held.intersection(map(id, tensors))]
            if names:
                refuse(not_part(names), HIDDEN_FIX)
            fix = "make it of this model's parameters(), or distribute the module that holds the others, too"
            refuse(f"{kind} holds parameters that are not the model's", fix)


def check_embeddings(model: torch.nn.Module) -> None:
    """Raise ConfigError for embeddings that depend on the local batch, so N ranks differ from one."""
    if what := embeddings.dependent_on_batch(model):
        refuse(what, embeddings.FIX)


def check_elementwise(optimizers: Sequence[torch.optim.Optimizer]) -> list[frozenset[str]]:
    """Return for each optimizer the state names that are not slots. Raises ConfigError if one cannot be
    sharded."""
    if not optimizers:
        refuse(
            "sharded=True needs an optimizer, and none was given", "call ht.distribute(model, optimizer, sharded=True)"
        )
    known = registry.sharded
    return [frozenset() if optimizer in known else numbers_of(optimizer, WHERE) for optimizer in optimizers]


def check_local(
    models: Sequence[Any], optimizers: Sequence[Any], mode: str, sync_batchnorm: bool, average: bool, sharded: bool
) -> None:
    """Raise ConfigError if local training is not possible."""
    where = f"{WHERE}(mode=...)"
    if len(models) != 1 or len(optimizers) != 1:
        refuse("local training takes one model and one optimizer", "call ht.distribute(model, optimizer)", where)
    held = {id(p) for group in optimizers[0].param_groups for p in group["params"]}
    if not held <= {id(p) for p in models[0].parameters()}:
        refuse("the optimizer trains another model as well", "make it of this model's parameters()", where)
    options = {SYNC_BATCHNORM: "sync_batchnorm=True" * sync_batchnorm, SUMMED: "average=False" * (not average)}
    check_mode(mode, options | {SHARDED: "sharded=True" * sharded}, WHERE)


def facts(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, str]:
    """Return {name: text} for all properties that must be equal on all ranks."""
    texts = {"torch": torch.__version__, "models before": str(len(registry.distributed))}
    for name, x in [*model.named_parameters(), *model.named_buffers()]:
        trained = "" if x.requires_grad else ", not trained"
        # Strides, because flat buckets are in memory order.
        texts[name] = f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}, strides {x.stride()}{trained}"
    for k, optimizer in enumerate(optimizers):
        texts[f"optimizer {k}"] = type(optimizer).__name__
        for g, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                shown = f"{len(value)} tensors" if key == "params" else text_of(value)
                texts[f"optimizer {k}, group {g}, {key}"] = shown
    return texts


def warn_of_plain_tensors(communicator: Communicator, model: torch.nn.Module) -> None:
    """Warn of tensors that are no parameters or buffers and differ between ranks, which may be intended."""
    if communicator.size == 1:
        return
    sums = {}
    for path, layer in model.named_modules():
        for name, x in vars(layer).items():
            # Tensors recomputed in each forward, as by weight_norm, have parameters as their sources.
            made = {f"{name}_orig", f"{name}_g"} & set(layer._parameters)
            if isinstance(x, torch.Tensor) and not (made or x.grad_fn or x.is_meta or x.is_quantized):
                sums[f"{path}.{name}".lstrip(".")] = int(bits(x))
    everyone = [json.loads(part) for part in communicator.allgather_bytes(json.dumps(sums).encode(), "tensors")]
    differing = [name for name in sums if len({each.get(name, sums[name]) for each in everyone}) > 1]
    if differing and not communicator.rank:
        what = f"{', '.join(differing)}: tensors of the model that are not buffers, and differ between ranks"
        fix = "register_buffer gives all ranks rank 0's values; or set a seed before the model is made"
        warnings.warn(f"{what}; {WHERE}; {fix}", stacklevel=3)


def warn_of_hidden_layers(communicator: Communicator, model: torch.nn.Module) -> None:
    """Warn of layers in lists and dicts, which no optimizer trains. This may be intended for a teacher model."""
    names = hidden(model)
    if names and not communicator.rank:
        fix = f"{HIDDEN_FIX}; or set requires_grad_(False) of what is not to be trained"
        warnings.warn(f"{not_part(names)}, and nobody trains them; {WHERE}; {fix}", stacklevel=3)


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the model's parameters that require gradients."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
