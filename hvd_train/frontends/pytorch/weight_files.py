"""Files of PyTorch's weights, read without running any code of theirs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch


def _state_dictionary(path: Path) -> dict[str, np.ndarray]:
    """Return {name: array} of a state dictionary, which may lie in one under ``state_dict`` or ``model``."""
    content = torch.load(path, map_location="cpu", weights_only=True)
    for key in ("state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    tensors = (
        {name: x for name, x in content.items() if isinstance(x, torch.Tensor)} if isinstance(content, dict) else {}
    )
    if not tensors:
        raise ValueError("it holds no state dictionary")
    return {name: (x.float() if x.dtype == torch.bfloat16 else x).numpy() for name, x in tensors.items()}


WEIGHT_FILES = dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), _state_dictionary)
