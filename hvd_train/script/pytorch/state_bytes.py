"""Serialization of PyTorch state dicts without pickle: safetensors, with everything else as JSON in the header."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections import Counter
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from hvd_train.errors import CheckpointError

KEY = "hvd_train"
# Errors in reading untrusted bytes: a file may have any structure under a valid hash.
FOREIGN = (
    SafetensorError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RuntimeError,
    OverflowError,
    struct.error,
)
CONTAINERS = {"list": list, "tuple": tuple, "dict": dict, "Counter": Counter, "set": set, "frozenset": frozenset}
OPTION = re.compile(r"(^|/)param_groups/\d+/")  # the path of an optimizer's option
KEPT = object()  # placeholder for a function among options; a load keeps the script's function


def pack(value: Any) -> bytes:
    """Serialize nested dicts, lists and tuples of tensors, numbers and strings to the bytes of a safetensors file.

    Raises CheckpointError for anything else, with its path.
    """
    tensors: dict[str, torch.Tensor] = {}
    structure = json.dumps(_encode(value, "", tensors))
    return save(tensors, metadata={KEY: structure, "sha256": _digest(structure, tensors)})


def unpack(data: bytes) -> Any:
    """Restore the value given to ``pack``, bit for bit, on the CPU. Raises ValueError for other bytes."""
    try:
        return _unpacked(data)
    except _DigestError as error:
        raise ValueError("it is damaged: its SHA-256 differs") from error
    except FOREIGN as error:
        raise ValueError("it is damaged, or not a file of ht.save") from error


def _unpacked(data: bytes) -> Any:
    # safetensors: the header's length (8 bytes), the header (JSON), the tensors.
    (length,) = struct.unpack_from("<Q", data)
    about = json.loads(data[8 : 8 + length])["__metadata__"]
    tensors = load(data)
    if about["sha256"] != _digest(about[KEY], tensors):
        raise _DigestError
    return _decode(json.loads(about[KEY]), tensors)


class _DigestError(Exception):
    pass


def with_functions(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Insert the optimizer's current functions into a state loaded from a file."""
    groups = [
        {key: now.get(key) if x is KEPT else x for key, x in group.items()}
        for group, now in zip(state["param_groups"], optimizer.param_groups, strict=False)
    ]
    # torch reports groups that do not match.
    return state | {"param_groups": groups + state["param_groups"][len(groups) :]}


def _digest(structure: str, tensors: dict[str, torch.Tensor]) -> str:
    # safetensors itself has no checksum.
    total = hashlib.sha256(structure.encode())
    for key, x in sorted(tensors.items()):
        total.update(f"{key} {x.dtype} {tuple(x.shape)} ".encode() + x.reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def _encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Convert to JSON; containers become {kind: items}, so that keys and tuples keep their types."""
    if isinstance(value, torch.Tensor):
        while path in tensors:  # {"a/b": x, "a": {"b": y}}, or the keys 1 and "1"
            path += "'"
        if value.layout != torch.strided:
            fix = "keep its indices and values, as dense tensors"
            raise CheckpointError(
                "a sparse tensor cannot be sent or saved", where=path.lstrip("/"), fix=fix, common=True
            )
        if value.dtype == torch.complex128:  # safetensors has none
            tensors[path] = torch.view_as_real(value.detach().to("cpu", copy=True).resolve_conj()).contiguous()
            return {"complex": path}
        # A copy, because the format refuses tensors that share memory.
        tensors[path] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": path}
    if isinstance(value, dict):
        kind = "Counter" if isinstance(value, Counter) else "dict"
        return {kind: [[_plain(k, path), _encode(v, f"{path}/{k}", tensors)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encode(v, f"{path}/{i}", tensors) for i, v in enumerate(value)]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, (set, frozenset)):
        return {type(value).__name__: [_encode(v, f"{path}/{i}", tensors) for i, v in enumerate(value)]}
    if callable(value) and OPTION.search(path):
        return {"kept": path}
    return _plain(value, path)


def _plain(value: Any, path: str) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    fix = "save its numbers, strings and tensors"
    raise CheckpointError(f"a {type(value).__name__} cannot be saved", where=path.lstrip("/"), fix=fix, common=True)


def _decode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "tensor":
        return tensors[inner]
    if kind == "complex":
        return torch.view_as_complex(tensors[inner])
    if kind == "dtype":
        if not isinstance(dtype := getattr(torch, inner, None), torch.dtype):
            raise ValueError(f"{inner} is no type")
        return dtype
    if kind == "kept":
        return KEPT
    if kind in ("list", "tuple", "set", "frozenset"):
        return CONTAINERS[kind](_decode(item, tensors) for item in inner)
    return CONTAINERS[kind]({key: _decode(item, tensors) for key, item in inner})
