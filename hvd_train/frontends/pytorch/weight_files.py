"""Read files of PyTorch's weights without running code from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

DEEPEST = 3  # nesting of dictionaries: {"model": {"state_dict": ...}}


def _state_dictionaries(path: Path) -> dict[str, dict[str, np.ndarray]]:
    """Return the file's state dictionaries as {key in the file: {name: array}}; the top level has the key ''."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # damaged files raise many kinds
        raise ValueError(_refused(path) or "it is no file of torch.save, or a damaged one") from error
    found = dict(_within(content))
    if not found:
        raise ValueError("it holds no state dictionary")
    return found


def _within(content: Any, place: str = "", depth: int = 0) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    if not isinstance(content, Mapping) or depth > DEEPEST:
        return
    named = {key: x for key, x in content.items() if isinstance(key, str)}
    if tensors := {key: _array(key, x) for key, x in named.items() if isinstance(x, torch.Tensor)}:
        yield place, tensors
    for key, x in named.items():
        yield from _within(x, f"{place}.{key}".lstrip("."), depth + 1)


def _array(name: str, x: torch.Tensor) -> np.ndarray:
    try:
        return (x.float() if x.dtype == torch.bfloat16 else x).numpy(force=True)
    except (TypeError, RuntimeError):
        kind = str(x.dtype).removeprefix("torch.")
        raise ValueError(f"{name} has the type {kind} ({x.layout}), which cannot hold weights") from None


def _refused(path: Path) -> str:
    """Name the contents of a file that could run code; "" if there are none."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # the file is damaged
        return ""
    return f"it holds {', '.join(sorted(names)[:4])}, and to read these could run code" if names else ""


WEIGHT_FILES = dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), _state_dictionaries)
