"""Hooks of every optimizer's step. They refuse local gradients, with which ranks would silently diverge."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from hvd_train.errors import ConfigError
from hvd_train.frontends.pytorch.eager import eager
from hvd_train.script.pytorch import backward, elementwise, registry, uneven_parts, verify_mode
from hvd_train.script.pytorch.reducer import Reducer
from hvd_train.script.pytorch.sums import add_up
from hvd_train.script.shared.dataloader import shares
from hvd_train.script.shared.record import recording

# The steps of local training before a running step of an optimizer.
_taken: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()


def _reducers_of(optimizer: torch.optim.Optimizer) -> dict[Reducer, list[torch.nn.Parameter]]:
    """Return the optimizer's parameters by the reducer of their gradients. Raises ConfigError for late parameters."""
    reducers: dict[Reducer, list[torch.nn.Parameter]] = {}
    late: list[torch.nn.Parameter] = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            _, reducer = registry.parameters.get(id(p), (p, None))
            if reducer is not None:
                reducers.setdefault(reducer, []).append(p)
            elif p.grad is not None and id(p) not in registry.parameters:
                late.append(p)
    # A rank may have a local optimizer, but not for distributed models.
    if late and registry.communicator().size > 1:
        if reducers or optimizer in registry.optimizers or _is_of_models(late):
            what = f"a parameter of shape {tuple(late[0].shape)} was added to the model after ht.distribute"
            fix = "new layers and load_state_dict(assign=True) belong before it; one of this rank alone needs its own "
            fix += "optimizer"
            raise ConfigError(what, where=f"{type(optimizer).__name__}.step()", fix=fix, common=True)
        if registry.distributed or registry.loaders:
            warn_of_local_optimizer(type(optimizer).__name__)
    return reducers


def _refuse_beside_local_training(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError if a step has moved a model in local training, and was no step of its optimizer.

    Nobody would join the ranks' weights. The step of a wrapper is one of the optimizer within it, too.
    """
    every, before = {*registry.local_training.values()}, _taken.pop(optimizer, 0)
    if optimizer in registry.local_training or registry.communicator().size == 1:
        return
    held = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
    if any(local.trains(held) for local in every) and sum(local.taken for local in every) == before:
        kind = type(optimizer).__name__
        what = f"this {kind} is not the optimizer of the model's local training, so ranks would drift apart"
        fix = "step by the optimizer that ht.distribute was given"
        raise ConfigError(what, where=f"{kind}.step()", fix=fix, common=True)


@functools.cache
def warn_of_local_optimizer(kind: str) -> None:
    """Warn once per class of optimizer that ``ht.distribute`` may not have been called for its model."""
    if not registry.communicator().rank:
        what = f"{kind}.step(): no parameter of this optimizer was given to ht.distribute"
        warnings.warn(f"{what}, so each rank trains them by its own gradients", stacklevel=2)


def _is_of_models(parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Return whether a distributed model has one of ``parameters``."""
    wanted = {id(p) for p in parameters}
    return any(id(p) in wanted for model, _ in registry.distributed for p in model.parameters())


@eager
def before_step(optimizer: torch.optim.Optimizer, arguments: tuple, keywords: dict[str, Any]) -> Any:
    """Refuse a step with local gradients, and average those that the script has set itself.

    torch calls this before each step of every optimizer.
    """
    sharded = registry.sharded.get(optimizer)
    # A nested step of a sharded optimizer has pieces, whose gradients are already checked.
    if optimizer in elementwise.trying or (sharded and sharded.stepping):
        return None
    if sharded:
        sharded.place_hooks(optimizer)
    if (record := recording()) and optimizer in registry.optimizers:
        verify_mode.before_step(optimizer, record)
    if registry.local_training:
        _taken[optimizer] = sum(local.taken for local in {*registry.local_training.values()})
    reducers = _reducers_of(optimizer)
    if not reducers:
        return None
    if backward.current_pass() < 0:
        backward.after_failure()
    registry.part_sync().arrive(uneven_parts.STEP)
    for reducer, parameters in reducers.items():
        reducer.stepping = True  # the step may call backward() itself
        if reducer.begun:  # also if the gradients are in flight and None for now
            what, fix = "the gradients of this backward() are not reduced yet", "call it when backward() has returned"
            raise ConfigError(what, where=f"{type(optimizer).__name__}.step()", fix=fix, common=True)
        if reducer.unreduced and any(p.grad is not None for p in parameters):
            what = "the gradients of the last backward() were not reduced"
            fix = "call the last backward() before a step outside of ht.no_sync"
            if reducer.failed:
                what, fix = "an error ended the last backward()", "clear the gradients and go on with the next batch"
            raise ConfigError(what, where=f"{type(optimizer).__name__}.step()", fix=fix, common=True)
        reducer.reduce_manual(parameters)
    closure = keywords.get("closure", arguments[1] if len(arguments) > 1 else None)
    if closure is None:
        return None

    @eager
    def reduce_manual() -> None:
        for reducer, parameters in reducers.items():
            reducer.reduce_manual(parameters)

    def reducing_closure() -> Any:
        for reducer in reducers:
            reducer.begin_closure()
        loss = closure()
        reduce_manual()  # the closure may set gradients itself
        if not isinstance(optimizer, torch.optim.LBFGS):
            return loss
        # LBFGS searches by the loss; with local losses the ranks would diverge.
        given = loss.detach() if isinstance(loss, torch.Tensor) else None  # it may be a number
        whole = next(iter(reducers)).global_loss(float(loss if given is None else given), lambda x: add_up([x]))
        return whole if given is None else given.new_tensor(whole)

    return (arguments[0], reducing_closure, *arguments[2:]), {k: x for k, x in keywords.items() if k != "closure"}


@eager
def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Count the step. torch calls this after each step of every optimizer."""
    sharded = registry.sharded.get(optimizer)
    if optimizer in elementwise.trying or (sharded and sharded.stepping):
        return
    if registry.local_training:
        _refuse_beside_local_training(optimizer)
    if any(id(p) in registry.parameters for group in optimizer.param_groups for p in group["params"]):
        shares.stepped()
    for reducer, parameters in _reducers_of(optimizer).items():
        reducer.stepping = False
        with_gradient = [p for p in parameters if p.grad is not None]
        if optimizer._optimizer_step_pre_hooks:  # they run after ours
            reducer.note_replaced(with_gradient)
        reducer.used(optimizer, with_gradient)
    if (record := recording()) and optimizer in registry.optimizers:
        verify_mode.after_step(optimizer, record, registry.communicator())
