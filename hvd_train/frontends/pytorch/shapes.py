"""Shapes and types of inputs and weights in PyTorch."""

from __future__ import annotations

import torch

from hvd_train.protocol import Field


def native_shape(field: Field) -> tuple[int | None, ...]:
    """Return an input's shape in PyTorch: (channels, height, width) for an image."""
    return (field.shape[2], *field.shape[:2]) if field.image else field.model_shape


def moved(model: torch.nn.Module, device: torch.device | str, dtype: torch.dtype) -> torch.nn.Module:
    """Move a model to a device; cast real floats to ``dtype``, complex ones to the complex type of that precision."""
    pairs = torch.complex128 if dtype == torch.float64 else torch.complex64

    def one(x: torch.Tensor) -> torch.Tensor:
        return x.to(device, dtype if x.is_floating_point() else pairs if x.is_complex() else None)

    return model._apply(one)  # as ``model.to`` does, which casts complex numbers to real ones


def as_real(x: torch.Tensor) -> torch.Tensor:
    """Return a view of complex numbers as pairs of real ones, (..., 2), and other tensors as they are."""
    return torch.view_as_real(x) if x.is_complex() else x


def lazy(model: torch.nn.Module) -> list[str]:
    """List the layers whose weights have no shape before the first forward pass."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return sorted({name.rpartition(".")[0] or name for name, x in named if torch.nn.parameter.is_lazy(x)})
