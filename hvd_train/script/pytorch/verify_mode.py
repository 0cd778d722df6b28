"""Changes of ``hvd-train verify`` to a PyTorch script, and the recording of its steps."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hvd_train.frontends.pytorch.model import PyTorchFrontEnd
from hvd_train.protocol import Communicator, Tree
from hvd_train.script.pytorch import registry
from hvd_train.script.shared.dataloader import passes
from hvd_train.script.shared.record import SEED, Recording

_names: dict[int, str] = {}  # of parameters
_drawn: list[bytes] = []  # digest of torch's generator after the last step
_models = 0


def prepare(recording: Recording) -> None:
    """Switch to 64 bits and record each loss; called before the script creates anything."""
    recording.norm_fix = "ht.distribute(model, optimizer, sync_batchnorm=True) makes it independent of the ranks"
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(SEED)
    # autocast would compute in 16 bits, but results are compared in 64.
    begin, backward = torch.autocast.__init__, torch.Tensor.backward

    def without_autocast(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, *rest: Any, **more: Any
    ) -> None:
        if enabled:
            recording.note("torch.autocast is off")
        begin(self, device_type, dtype, False, *rest, **more)

    def recorded_backward(self: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        # The loss is the scalar on which backward() is called.
        if self.numel() == 1:
            recording.loss(float(self.detach()), *_weight())
        return backward(self, *arguments, **keywords)

    def widened_batch(current: passes.Pass, batch: Any, training: bool) -> Any:
        if training:
            recording.add_samples(current.number, current.indices())
        return widen(batch)

    passes.watch = widened_batch
    torch.autocast.__init__ = without_autocast
    torch.Tensor.backward = recorded_backward


def _weight() -> tuple[float, float]:
    """Return (w, d): the global loss is the sum over ranks of w times the loss, divided by the sum of d."""
    if registry.distributed and registry.communicator().size > 1 and not registry.averaging():
        return 1.0, 1.0 / registry.communicator().size
    return passes.weight(), passes.weight()


def widen(value: Any) -> Any:
    """Convert floats to 64 bits, also within containers."""
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return type(value)({key: widen(x) for key, x in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(widen, value))
    return type(value)(map(widen, value)) if isinstance(value, list | tuple) else value


def prepare_models(models: Sequence[torch.nn.Module], recording: Recording) -> None:
    """Convert the script's models to 64 bits without dropout, before they are distributed."""
    for model in models:
        model.double()
        # Masks depend on the rank and would hide other differences.
        PyTorchFrontEnd.without_dropout_in(model)
        model.register_forward_pre_hook(lambda _, xs, keys: (widen(xs), widen(keys)), with_kwargs=True)
    recording.note("dropout is off: masks depend on the rank")


def add(model: torch.nn.Module, recording: Recording) -> None:
    """Add a distributed model to the record."""
    global _models
    prefix = f"model{_models}." * (_models > 0)
    _models += 1
    _names.update({id(p): f"{prefix}{name}" for name, p in model.named_parameters()})

    def tree() -> Tree:
        weights = {f"weights/{prefix}{name}": p.detach().cpu().numpy().copy() for name, p in model.named_parameters()}
        floats = {name: x for name, x in model.named_buffers() if x.is_floating_point()}
        return weights | {f"statistics/{prefix}{name}": x.cpu().numpy().copy() for name, x in floats.items()}

    recording.model(tree)


def before_step(optimizer: torch.optim.Optimizer, recording: Recording) -> None:
    if len(recording.rates) == 1 and _drawn and _drawn[0] != _generator():
        what = "the script draws from torch's generator in its steps (noise, dropout of its own)"
        recording.note(f"{what}: ranks draw other numbers than one process, which alone makes them differ")
    for group in optimizer.param_groups:
        for p in group["params"]:
            name = f"weights/{_names.get(id(p))}"
            if id(p) in _names and p.grad is not None and name not in recording.gradient:
                recording.gradient[name] = p.grad.detach().cpu().numpy().copy()


def after_step(optimizer: torch.optim.Optimizer, recording: Recording, communicator: Communicator) -> None:
    _drawn[:] = [_generator()]
    recording.step(float(optimizer.param_groups[0].get("lr") or 0.0), communicator)


def _generator() -> bytes:
    return hashlib.sha256(torch.default_generator.get_state().numpy().tobytes()).digest()
