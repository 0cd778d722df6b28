"""``ht.sum``: conversion of a script's values to arrays, their sums over ranks, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hvd_train.core.reductions import FLOATS, WIDE, sums
from hvd_train.errors import ConfigError
from hvd_train.frontends.pytorch.eager import eager
from hvd_train.script.pytorch import backward, registry, uneven_parts
from hvd_train.script.shared import weight_check
from hvd_train.script.shared.dataloader import passes


def has_several(value: Any) -> bool:
    """Return whether ``value`` is a tensor or an array of other than one entry."""
    return isinstance(value, (torch.Tensor, np.ndarray)) and tuple(value.shape) != (1,) * value.ndim


def is_whole(value: Any) -> bool:
    """Return whether a number, also in a tensor or an array, is an integer or a boolean."""
    if isinstance(value, torch.Tensor):
        return not (value.is_floating_point() or value.is_complex())
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.kind in "biu"
    return isinstance(value, int)


def as_array(value: Any) -> np.ndarray:
    """Convert a value of the script to an array. Raises ConfigError for other than numbers, tensors and arrays."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if has_several(value):
            value = (value if value.layout == torch.strided else value.to_dense()).cpu()
            narrow = value.is_floating_point() and value.dtype not in (torch.float16, torch.float32, torch.float64)
            value = (value.float() if narrow else value).resolve_conj().resolve_neg().numpy()
    try:
        if has_several(value) and value.dtype.kind in WIDE:
            return value
        # NumPy does not convert an array with an axis to a number, even with one entry.
        number = value.item() if isinstance(value, np.ndarray | torch.Tensor) else value
        if isinstance(number, complex | np.complexfloating):
            return np.array(complex(number))
        if not is_whole(value):
            return np.array(float(number))
        if abs(int(number)) >= 2**63:
            raise ConfigError(f"the integer {int(number)} does not fit into 64 bits", where="ht.sum", fix=FLOATS)
        return np.array(int(number), np.int64)
    except (TypeError, ValueError) as error:
        fix = "give numbers, tensors or arrays of numbers"
        raise ConfigError(f"it cannot add up a {type(value).__name__}", where="ht.sum", fix=fix) from error


def like_input(value: Any, total: np.ndarray) -> Any:
    """Convert the sum to the kind of ``value``: a number, a tensor or an array."""
    if not has_several(value):
        return total.item()  # an int if the numbers are whole on all ranks
    narrow = value.dtype in (torch.float32, np.float32, torch.complex64, np.complex64)
    floats = value.is_floating_point() if isinstance(value, torch.Tensor) else value.dtype.kind == "f"
    half = floats and value.dtype.itemsize < 4
    if narrow or half:
        total = total.astype(np.complex64 if total.dtype.kind == "c" else np.float32)
    return torch.from_numpy(total).to(value.device) if isinstance(value, torch.Tensor) else total


@eager
def add_up(values: Sequence[Any]) -> Any:
    """Sum ``values`` over the ranks (see ``ht.sum``); all ranks call it."""
    arrays = [as_array(value) for value in values]
    # A failed pass must be exchanged first, or its transfers would be mixed up with this sum.
    if backward.current_pass() < 0:
        backward.after_failure()
    communicator = registry.communicator()
    if communicator.size > 1:
        # Other ranks may still process parts of a batch, and wait for this rank's gradients.
        registry.part_sync().arrive(uneven_parts.SUM)
        passes.summed()
        weight_check.summed("ht.sum", communicator)
    registry.unshared_sums().shared()
    totals = [like_input(value, x) for value, x in zip(values, sums(arrays, communicator, "ht.sum"), strict=True)]
    return totals[0] if len(values) == 1 else totals
