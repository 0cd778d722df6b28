"""Broadcast of rank 0's buffers, other than running statistics, if they change."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module
from torch.nn.modules.batchnorm import _NormBase

from hvd_train.core.agreement import due
from hvd_train.protocol import Communicator
from hvd_train.script.pytorch.bit_sum import bits
from hvd_train.script.shared.broadcast import broadcast_parts

LOOKS = (1, 3)  # passes at which contents are compared, besides those of ``due``
_registrations = 0  # the number of registrations of buffers and layers in all modules of this process


def _count_registration(*_: Any) -> None:
    global _registrations
    # A compiled forward pass that makes layers, as a slice of a Sequential does, would be compiled anew in each step.
    if not torch.compiler.is_compiling():
        _registrations += 1


module.register_module_buffer_registration_hook(_count_registration)
module.register_module_module_registration_hook(_count_registration)


class Buffers:
    """The buffers that are broadcast from rank 0 after every pass, once they have changed on any rank.

    torch counts most changes; changes through ``.data`` are detected by checksums now and then. Buffers that never
    change (masks, tables) are not sent. Late buffers, which are registered after ``ht.distribute`` (masks of pruning),
    are sent once, and then whenever they change; they share one flag, the last.
    """

    def __init__(self, model: torch.nn.Module, communicator: Communicator) -> None:
        self._communicator, self._model = communicator, model
        norms = {id(layer) for layer in model.modules() if isinstance(layer, _NormBase)}
        running_stats = ("running_mean", "running_var", "num_batches_tracked")
        places: dict[Any, tuple[torch.nn.Module, str]] = {}
        for layer in model.modules():
            for name, x in layer._buffers.items():
                if x is None or not (id(layer) in norms and name in running_stats):
                    # A buffer that is None may be filled later, and one that two layers begin with may become two.
                    places[id(layer), name] = layer, name
        self._places = list(places.values())
        self._marks = [self._mark(k) for k in range(len(self._places))]
        self._contents = self._sums()
        # The buffers' first memory, kept so that nothing else is allocated there: {(layer, name): (buffer, address)}.
        self._own: dict[tuple[int, str], tuple[torch.Tensor, int]] = {}
        for place in self._places:
            self._keep(place)
        self._live: set[int] = set()
        self._moved: set[int] = set()  # changed on this rank since the last exchange
        self._layers = list(model.modules())  # kept alive, so that their ids are not reused
        self._first = {(id(layer), name) for layer in self._layers for name in layer._buffers}
        self._seen = _registrations
        self._late: dict[str, tuple[int, int]] = {}  # marks of late buffers, by name
        self._late_contents: dict[str, int] = {}
        self._late_new = self._late_live = False

    def _keep(self, place: tuple[torch.nn.Module, str]) -> None:
        layer, name = place
        if (x := layer._buffers.get(name)) is not None and x.layout is torch.strided:
            self._own[id(layer), name] = x, x.data_ptr()

    def __len__(self) -> int:
        """Return the number of flags."""
        return len(self._places) + 1

    def _late_places(self) -> dict[str, tuple[torch.nn.Module, str]]:
        """Return {name: (layer, buffer name)} of the late buffers."""
        places = [(path, layer, name) for path, layer in self._model.named_modules() for name in layer._buffers]
        late = [place for place in places if (id(place[1]), place[2]) not in self._first]
        return {f"{path}.{name}".lstrip("."): (layer, name) for path, layer, name in late}

    def _get(self, k: int) -> torch.Tensor | None:
        layer, name = self._places[k]
        return layer._buffers.get(name)

    def _mark(self, k: int) -> tuple[int, int]:
        return _mark_of(self._get(k))

    def _sums(self) -> list[int]:
        return [0 if x is None else int(bits(x)) for x in map(self._get, range(len(self._places)))]

    def changed(self, passes: int, every: int, look: bool = False) -> list[float]:
        """Return a flag for each buffer, 1.0 if it is known to change on this rank; the last is for late buffers.

        ``look``: compare contents in any case.
        """
        marks = [self._mark(k) for k in range(len(self._places))]
        # Kept until buffers are shared, because a failed or repeated exchange asks again.
        moved = self._moved
        moved |= {k for k, mark in enumerate(marks) if mark != self._marks[k]}
        # Not in every pass: a sum reads the whole buffer, and synchronizes with a GPU.
        look |= passes in LOOKS or due(passes, every or 100)
        if look:
            sums = self._sums()
            moved |= {k for k, x in enumerate(sums) if x != self._contents[k]}
        self._marks = marks
        known = [float(k in moved or k in self._live) for k in range(len(self._places))]
        return [*known, float(self._late_changed(look))]

    def _late_changed(self, look: bool) -> bool:
        """Return whether late buffers are new since the last pass, or change. ``look``: compare contents, too."""
        if self._seen == _registrations and not self._late:
            return False
        self._seen = _registrations
        buffers = {name: layer._buffers[k] for name, (layer, k) in self._late_places().items()}
        marks = {name: _mark_of(x) for name, x in buffers.items()}
        if look:
            contents = {name: int(bits(x)) for name, x in buffers.items() if x is not None}
            self._late_live |= any(contents.get(name, x) != x for name, x in self._late_contents.items())
            self._late_contents = contents
        self._late_live |= any(marks[name] != mark for name, mark in self._late.items() if name in marks)
        self._late_new |= not marks.keys() <= self._late.keys()
        self._late = marks
        return bool(marks) and (self._late_live or self._late_new)

    @torch.no_grad()
    def share(self, changed: list[float]) -> None:
        """Broadcast rank 0's contents of the buffers that any rank has ``changed``; all ranks call it."""
        # ``changed`` is a sum over ranks, so all ranks share the same buffers.
        *known, late = changed
        self._moved = set()
        if late:
            self._share_late()
        self._live |= {k for k, flag in enumerate(known) if flag}
        if not self._live:
            return
        _, received = self._from_rank_0({k: x for k in sorted(self._live) if (x := self._get(k)) is not None})
        if self._communicator.rank:
            for k, value in received:
                self._put(self._places[k], value)
            self._marks = [self._mark(k) for k in range(len(self._places))]

    def _from_rank_0(
        self, local: Mapping[Any, torch.Tensor], new: bool = False
    ) -> tuple[bool, Iterator[tuple[Any, torch.Tensor]]]:
        """Return rank 0's ``new``, and (key, contents) of its buffers ``local``; all ranks call it."""
        mine = {} if self._communicator.rank else local
        # Type and shape are sent as well: a buffer may be new or resized since the last pass.
        about = [[key, str(x.dtype).removeprefix("torch."), list(x.shape)] for key, x in mine.items()]
        (new, about), parts = broadcast_parts(self._communicator, [new, about], [_memory_of(x) for x in mine.values()])
        pairs = zip(about, parts, strict=True)
        return new, ((key, _tensor_of(kind, shape, part)) for (key, kind, shape), part in pairs)

    def _put(self, place: tuple[torch.nn.Module, str], value: torch.Tensor) -> None:
        """Set the buffer at ``place`` to ``value``."""
        layer, name = place
        x, (own, address) = layer._buffers.get(name), self._own.get((id(layer), name), (None, 0))
        if x is not None and x is own and (x.dtype, x.shape) == (value.dtype, value.shape) and x.data_ptr() == address:
            x.data.copy_(value)  # a retained graph may hold the tensor
            return
        # A tensor that the model has put there since may share memory with a batch, or with what the model returned.
        device = next(iter(layer.parameters()), value).device if x is None else x.device
        layer._buffers[name] = value.to(device)
        self._keep(place)

    def _share_late(self) -> None:
        """Broadcast rank 0's contents of the late buffers; warn of differences."""
        places = self._late_places()
        local = {name: x for name, (layer, k) in places.items() if (x := layer._buffers[k]) is not None}
        new, received = self._from_rank_0(local, self._late_new)
        self._late_new = False
        differing = []
        for name, value in received if self._communicator.rank else ():
            if name in places:
                x = local.get(name)
                if x is None or _memory_of(x).tobytes() != _memory_of(value).tobytes():
                    differing.append(name)
                self._put(places[name], value)
        self._late = {name: _mark_of(layer._buffers[k]) for name, (layer, k) in places.items()}
        if new:
            everyone = self._communicator.allgather_bytes(json.dumps(differing).encode(), "late buffers")
            names = sorted({name for part in everyone for name in json.loads(part)})
            if names and not self._communicator.rank:
                what = f"{', '.join(names)}: buffers that were registered after ht.distribute, and differ between"
                fix = "register them before ht.distribute, or give them the same values on all ranks"
                warnings.warn(f"{what} ranks; from now on all ranks have rank 0's; {fix}", stacklevel=2)


def _mark_of(x: torch.Tensor | None) -> tuple[int, int]:
    """Return a mark that differs once ``x`` has been changed or replaced."""
    # Inference tensors have no version counter.
    return id(x), 0 if x is None or x.is_inference() else x._version


def _tensor_of(kind: str, shape: list[int], part: memoryview) -> torch.Tensor:
    dtype = getattr(torch, kind)
    return (
        torch.frombuffer(bytearray(part), dtype=dtype).reshape(shape)
        if part.nbytes
        else torch.empty(shape, dtype=dtype)
    )


def _memory_of(x: torch.Tensor) -> np.ndarray:
    """Return a tensor's bytes, (bytes,) uint8."""
    return x.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
