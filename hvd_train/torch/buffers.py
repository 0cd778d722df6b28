"""Buffers of a model that are not running statistics: all ranks take rank 0's, where they change at all."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _NormBase

from hvd_train.core.agreement import due
from hvd_train.protocol import Communicator
from hvd_train.script.broadcast import broadcast_parts
from hvd_train.torch.bit_sum import bits

LOOKS = (1, 3)  # passes, besides those of ``due``, at which contents are compared


class Buffers:
    """Buffers that all ranks take from rank 0 after every pass, from the first change on any rank on.

    torch counts most changes; those made through ``.data`` show in the contents, which are looked at now and then.
    Buffers that never change (masks, tables) cost no transfer.
    """

    def __init__(self, model: torch.nn.Module, communicator: Communicator) -> None:
        self._communicator = communicator
        norms = {id(layer) for layer in model.modules() if isinstance(layer, _NormBase)}
        running_stats = ("running_mean", "running_var", "num_batches_tracked")
        places: dict[Any, tuple[torch.nn.Module, str]] = {}
        for layer in model.modules():
            for name, x in layer._buffers.items():
                if not (id(layer) in norms and name in running_stats):
                    # One that is None may be made of the first batch; several layers may have the same tensor.
                    places.setdefault((id(layer), name) if x is None else id(x), (layer, name))
        self._places = list(places.values())
        self._marks = [self._mark(k) for k in range(len(self._places))]
        self._contents = self._sums()
        self._live: set[int] = set()

    def __len__(self) -> int:
        return len(self._places)

    def _get(self, k: int) -> torch.Tensor | None:
        layer, name = self._places[k]
        return layer._buffers.get(name)

    def _mark(self, k: int) -> tuple[int, int]:
        x = self._get(k)
        # Inference tensors have no count of changes.
        return id(x), 0 if x is None or x.is_inference() else x._version

    def _sums(self) -> list[int]:
        return [0 if x is None else int(bits(x)) for x in map(self._get, range(len(self)))]

    def changed(self, passes: int, every: int) -> list[float]:
        """Return, for each buffer, 1.0 if this rank knows that it changes, else 0.0."""
        marks = [self._mark(k) for k in range(len(self))]
        moved = {k for k, mark in enumerate(marks) if mark != self._marks[k]}
        # A sum reads the whole buffer, and on a GPU waits for it: not in every pass.
        if passes in LOOKS or due(passes, every or 100):
            sums = self._sums()
            moved |= {k for k, x in enumerate(sums) if x != self._contents[k]}
        self._marks = marks
        return [float(k in moved or k in self._live) for k in range(len(self))]

    @torch.no_grad()
    def share(self, changed: list[float]) -> None:
        """Take rank 0's contents of the buffers that any rank has ``changed``; on all ranks together."""
        # ``changed`` is a sum over ranks, so that all of them keep the same set and send the same buffers.
        self._live |= {k for k, flag in enumerate(changed) if flag}
        if not self._live:
            return
        local = {k: x for k in sorted(self._live) if (x := self._get(k)) is not None}
        head: list[Any] = []
        parts: list[np.ndarray] = []
        if not self._communicator.rank:
            head = [[k, str(x.dtype).removeprefix("torch."), list(x.shape)] for k, x in local.items()]
            parts = [_memory_of(x) for x in local.values()]
        # Type and shape travel along: a buffer may be new, or have grown, since the last pass.
        head, sent = broadcast_parts(self._communicator, head, parts)
        if not self._communicator.rank:
            return
        for (k, kind, shape), part in zip(head, sent, strict=True):
            dtype = getattr(torch, kind)
            value = torch.empty(shape, dtype=dtype)
            if part.nbytes:
                value = torch.frombuffer(bytearray(part), dtype=dtype).reshape(shape)
            x = local.get(k)
            if x is not None and (x.dtype, x.shape) == (value.dtype, value.shape):
                x.data.copy_(value)  # a graph that is kept may hold it
            else:
                layer, name = self._places[k]
                place = next(iter(layer.parameters()), value).device if x is None else x.device
                layer._buffers[name] = value.to(place)
        self._marks = [self._mark(k) for k in range(len(self))]


def _memory_of(x: torch.Tensor) -> np.ndarray:
    """Return a tensor's bytes."""
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
