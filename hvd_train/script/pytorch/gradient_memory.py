"""The memory for exchanged gradients: flat buckets, with a view for each tensor."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from hvd_train.frontends.pytorch.buckets import users


class GradientMemory:
    """A flat tensor for each bucket; ``views[i]`` is the view for tensor ``i``.

    After an exchange the views are the parameters' gradients. If a script keeps one, or a part of one, beyond the step,
    its bucket gets new memory before the next write.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], buckets: Sequence[Sequence[int]]) -> None:
        self._tensors, self._buckets = tensors, buckets
        self._sizes = [x.numel() for x in tensors]
        self.flats: dict[int, torch.Tensor] = {}
        self.views: dict[int, torch.Tensor] = {}
        self.versions: dict[int, int] = {}  # of views, when last recorded
        self._addresses: dict[int, int] = {}
        self._strides: dict[int, tuple[int, ...]] = {}  # of the tensors when the views were made
        self._users: dict[int, int] = {}  # of a bucket's memory, without references from outside
        for b in range(len(buckets)):
            self.renew(b)
        self._references = self._count_references(0)  # of a view without references from outside

    def renew(self, b: int) -> None:
        """Allocate new memory for a bucket, because a script holds the old one or it must not change."""
        members = self._buckets[b]
        first = self._tensors[members[0]]
        flat = torch.zeros(sum(self._sizes[i] for i in members), dtype=first.dtype, device=first.device)
        self.flats[b] = flat
        for i, part in zip(members, flat.split([self._sizes[i] for i in members]), strict=True):
            # A gradient has its parameter's memory layout (channels last, transposed, ...): fused steps rely on it.
            # ``data``: each view has its own version counter.
            x = self._tensors[i]
            self.views[i] = part.as_strided(x.shape, torch.empty_like(x).stride()).data
            self._strides[i] = x.stride()
            self.versions[i], self._addresses[i] = -1, self.views[i].data_ptr()
        del part
        self._users[b] = users(self.flats[b])

    def in_place(self, i: int) -> bool:
        """Return whether view ``i`` is still in its bucket, in the layout of its tensor."""
        there = self.views[i].data_ptr() == self._addresses[i]
        return there and self._tensors[i].stride() == self._strides[i]

    def is_held(self, b: int, members: Sequence[int]) -> bool:
        """Return whether a script holds an old gradient of ``members``, or a part of one."""
        if not members:
            return False
        return users(self.flats[b]) > self._users[b] or any(map(self.is_referenced, members))

    def is_referenced(self, i: int, known: int = 0) -> bool:
        """Return whether view ``i`` has a reference besides this object's and ``known`` others."""
        return self._count_references(i) > self._references + known

    def _count_references(self, i: int) -> int:
        return sys.getrefcount(self.views[i])

    def note_versions(self, members: Sequence[int]) -> None:
        """Record the version counters of the views of ``members``."""
        self.versions.update({i: self.views[i]._version for i in members})

    def is_changed(self, i: int) -> bool:
        """Return whether view ``i`` has changed since its version was recorded."""
        return self.views[i]._version != self.versions[i]
