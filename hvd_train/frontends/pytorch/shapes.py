"""Shapes of inputs and weights in PyTorch."""

from __future__ import annotations

import torch

from hvd_train.protocol import Field


def native_shape(field: Field) -> tuple[int | None, ...]:
    """Return an input's shape in PyTorch: (channels, height, width) for an image."""
    return (field.shape[2], *field.shape[:2]) if field.image else field.model_shape


def lazy(model: torch.nn.Module) -> list[str]:
    """List the layers whose weights have no shape before the first forward pass."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return sorted({name.rpartition(".")[0] or name for name, x in named if torch.nn.parameter.is_lazy(x)})
