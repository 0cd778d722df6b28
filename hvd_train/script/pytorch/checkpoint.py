"""Checkpoints of a script: rank 0 writes one file, all ranks load it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hvd_train import files
from hvd_train.core.agreement import collectively
from hvd_train.errors import CheckpointError
from hvd_train.protocol import Communicator
from hvd_train.script.pytorch import registry, state_bytes
from hvd_train.script.pytorch.local_training import STATE
from hvd_train.script.shared.dataloader import passes
from hvd_train.script.shared.record import recording


def save(path: str | os.PathLike, **parts: Any) -> None:
    """Write one file on rank 0: ``ht.save("last.ckpt", model=model, optimizer=optimizer, loader=loader, epoch=3)``.

    A part is anything with a ``state_dict``, a loader of ``ht.shard``, or numbers, strings and tensors. The file is in
    safetensors format and gets its name when it is complete. With a sharded optimizer or local training all ranks must
    call this, because each has other state; otherwise only rank 0 must.
    """
    if recording():
        return
    optimizers = {name: part for name, part in parts.items() if isinstance(part, torch.optim.Optimizer)}
    slots = {
        name: divided.state_on_rank_0(part)
        for name, part in optimizers.items()
        if (divided := registry.sharded.get(part) or registry.local_training.get(part))
    }
    if registry.communicator().rank:
        return
    data = state_bytes.pack({name: _state_of(part) for name, part in parts.items() if name not in slots} | slots)
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        files.put(Path(path), data)
    except OSError as error:
        raise CheckpointError(f"the checkpoint cannot be written: {error.strerror}", where=str(path)) from error


def load(path: str | os.PathLike, *, missing_ok: bool = False, **parts: Any) -> dict[str, Any]:
    """Restore the ``parts`` that ``save`` wrote; return the file's other values by name.

    Call it on all ranks, before or after ``distribute``; rank 0 reads the file. Nothing is unpickled. ``missing_ok``:
    return {} if there is no file. Raises CheckpointError on all ranks.
    """
    communicator = registry.communicator()

    def read() -> bytes:
        if communicator.rank:
            return b""
        try:
            data = files.content(Path(path))
            # Unpacked to check it: a damaged file must raise here, before the broadcast.
            if not isinstance(state_bytes.unpack(data), dict):
                raise ValueError("it is not a file of ht.save")
        except FileNotFoundError as error:
            if missing_ok:
                return b""
            raise CheckpointError("there is no checkpoint", where=str(path)) from error
        except OSError as error:
            raise CheckpointError(f"it cannot be read: {error.strerror}", where=str(path)) from error
        except ValueError as error:
            raise CheckpointError(str(error), where=str(path)) from error
        return data

    data = communicator.broadcast_bytes(collectively(communicator, read))
    if not data:
        return {}
    state = state_bytes.unpack(data)
    for name, part in parts.items():
        if name not in state:
            fix = f"it holds {', '.join(map(str, state))}"
            raise CheckpointError(f"there is no {name} in it", where=str(path), fix=fix, common=True)
        try:
            # All ranks have the same bytes, so an error occurs on all of them, hence ``common``.
            found = state[name]
            if isinstance(part, torch.optim.Optimizer):
                found = state_bytes.with_functions(found, part)
            _owner(part).load_state_dict(found)
            if isinstance(part, torch.optim.Optimizer):
                lay_slots(part)
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
            what = f"it does not fit this {name}: " + (" ".join(str(error).split()) or type(error).__name__)
            raise CheckpointError(what, where=str(path), common=True) from error
        if isinstance(part, torch.optim.Optimizer) and part not in registry.optimizers:
            registry.read_before[part] = state[name] if STATE in state[name] else None
        if isinstance(part, torch.nn.Module):
            for reducer in {reducer for _, reducer in registry.distributed if reducer}:
                # Running statistics are exchanged as changes since the last pass; a load does not count as one.
                reducer.loaded(part)
    return {name: value for name, value in state.items() if name not in parts}


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model without torch.compile's wrapper, whose parameters have other names."""
    return getattr(model, "_orig_mod", model)


def _owner(part: Any) -> Any:
    """Return the object with the ``state_dict`` of a part, or the part itself."""
    if isinstance(part, passes.Sharded):
        return part.share
    return unwrapped(part) if isinstance(part, torch.nn.Module) else part


def _state_of(part: Any) -> Any:
    owner = _owner(part)
    return owner.state_dict() if hasattr(owner, "state_dict") else owner


def lay_slots(optimizer: torch.optim.Optimizer) -> None:
    """Give slots the memory layout of their parameters, as the optimizer itself does."""
    # Files and broadcasts have contiguous tensors; fused steps need weight, gradient and slot in one layout.
    for parameter, slots in optimizer.state.items():
        for name, x in slots.items():
            if isinstance(x, torch.Tensor) and x.shape == parameter.shape and x.stride() != parameter.stride():
                slots[name] = torch.empty_like(parameter, dtype=x.dtype, requires_grad=False).copy_(x)


@torch.no_grad()
def broadcast(communicator: Communicator, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Broadcast rank 0's weights, buffers and optimizer state, bit for bit."""
    if communicator.size == 1:
        return
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    states = [optimizer.state_dict() for optimizer in optimizers]
    packed = collectively(communicator, lambda: b"" if communicator.rank else state_bytes.pack([tensors, states]))
    data = communicator.broadcast_bytes(packed)
    if communicator.rank:
        weights, states = state_bytes.unpack(data)
        for name, x in weights.items():
            if 0 in tensors[name].stride():  # an expanded buffer, of which several entries are one
                tensors[name].data = tensors[name].contiguous()
            tensors[name].copy_(x)
        for optimizer, state in zip(optimizers, states, strict=True):
            _take(optimizer, state)
            lay_slots(optimizer)


def _take(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a state into an optimizer whose groups the script may hold, and whose slots keep their types."""
    groups, held = optimizer.param_groups, [dict(group) for group in optimizer.param_groups]
    optimizer.load_state_dict(state_bytes.with_functions(state, optimizer))
    for group, before, new in zip(groups, held, optimizer.param_groups, strict=True):
        group.update(new)
        for key, x in before.items():
            if isinstance(x, torch.Tensor) and isinstance(group[key], torch.Tensor) and x.shape == group[key].shape:
                group[key] = x.copy_(group[key])
    optimizer.param_groups = groups
    saved = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [p for group in groups for p in group["params"]]
    for number, p in zip(saved, parameters, strict=True):
        for name, x in state["state"].get(number, {}).items():
            # load_state_dict makes everything floating-point that belongs to a floating-point weight.
            if isinstance(x, torch.Tensor) and not x.is_floating_point() and optimizer.state[p][name].dtype != x.dtype:
                optimizer.state[p][name] = x.to(p.device)
