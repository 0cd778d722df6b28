"""Freeze parameters: no gradient is computed for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

FROZEN = "_frozen_by_hvd_train"  # an attribute of a frozen parameter


def freeze(trainable: Mapping[str, torch.nn.Parameter], trained: Collection[str]) -> None:
    """Freeze exactly the parameters that are not in ``trained``."""
    for name, parameter in trainable.items():
        parameter.requires_grad_(name in trained)
        if name not in trained or hasattr(parameter, FROZEN):
            setattr(parameter, FROZEN, name not in trained)


def thaw(model: torch.nn.Module) -> None:
    """Unfreeze what an earlier training of the same model has frozen."""
    for parameter in model.parameters():
        if getattr(parameter, FROZEN, False):
            parameter.requires_grad_(True)
