"""Find layers that PyTorch does not register because they are in a plain list or dict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

HIDDEN_FIX = "make the list a torch.nn.ModuleList (a dict a torch.nn.ModuleDict), before the optimizer is made"


def hidden(model: torch.nn.Module) -> dict[str, list[torch.nn.Parameter]]:
    """Return trainable parameters that the model does not register, by attribute: "encoder.layers"."""
    known = {id(p) for p in model.parameters()}
    layers = {}
    for path, layer in model.named_modules():
        for name, x in vars(layer).items():
            if name in ("_modules", "_parameters", "_buffers") or not isinstance(x, list | tuple | dict):
                continue
            inner = [p for module in _modules(x) for p in module.parameters() if p.requires_grad and id(p) not in known]
            if inner:
                layers[f"{path}.{name}".lstrip(".")] = inner
    return layers


def not_part(names: Iterable[str]) -> str:
    """Return the message about the layers that ``hidden`` names."""
    return f"the layers in {', '.join(names)} are not part of the model: a Python list or dict hides them"


def _modules(x: Any, depth: int = 3) -> Iterator[torch.nn.Module]:
    if isinstance(x, torch.nn.Module):
        yield x
    elif isinstance(x, list | tuple | dict) and depth:
        for each in x.values() if isinstance(x, dict) else x:
            yield from _modules(each, depth - 1)
