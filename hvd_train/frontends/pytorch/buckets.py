"""Flat buckets: the memory in which weights, gradients and slots of several parameters lie together."""

from __future__ import annotations

import math
import mmap
from collections import deque
from collections.abc import Sequence

import torch

# Bytes at whose multiples torch's tensors begin, as far as cuDNN looks. Behind a bias of ten numbers, ResNet's
# weights began elsewhere, and a convolution ended with "unable to find an engine" (one H200, cuDNN 9.19).
GPU_ALIGN = 64


class Flat:
    """One bucket: a flat weight that the optimizer moves, of which the parameters are views, and its flat gradient.

    Gradients are autograd's tensors until ``gather`` joins them; a parameter that is alone in its bucket lends its
    gradient's memory, which saves a zeroing, an addition and a copy, unless autograd gave a part of it to another one.
    ``channels_last``: convolution kernels lie as (out, height, width, in) in memory. ``align``: weights and slots begin
    at multiples of so many bytes, with zeros between them; gradients lie without, as they travel. ``memories``: as many
    joined gradients are kept at a time, that of this step among them.
    """

    def __init__(
        self,
        names: list[str],
        parameters: list[torch.nn.Parameter],
        channels_last: bool,
        align: int = 1,
        memories: int = 1,
    ) -> None:
        self.names, self.channels_last = names, channels_last
        self.shapes = [stored_shape(p.shape, channels_last) for p in parameters]
        self.sizes = [math.prod(shape) for shape in self.shapes]
        # In entries. The last tensor needs no zeros behind it.
        step = max(1, align // parameters[0].element_size())
        self._steps = [-(-size // step) * step for size in self.sizes[:-1]] + self.sizes[-1:]
        values = [self._stored(p.detach()).reshape(-1) for p in parameters]
        self.weight = self.aligned(torch.cat(values))
        self.parameters = parameters
        joined = [torch.cat(values).zero_() for _ in range(memories if len(parameters) > 1 else 0)]
        # With their views: to cut 200 layers' buckets anew takes 0.5 ms of each step.
        self._joined = deque((x, self.views(x)) for x in joined)
        self.move_to(self.weight)

    def move_to(self, weight: torch.Tensor) -> None:
        """Take another flat weight, whose values become the parameters'."""
        self.weight = weight
        # The optimizer moves the flat weight, and so all parameters at once.
        for p, w in zip(self.parameters, self.views(weight), strict=True):
            p.data, p.grad = w, None

    @torch.no_grad()
    def gather(self) -> torch.Tensor:
        """Return the gradient of all parameters, (n,), zeros where backward reached none; for this step, unless it is
        handed over."""
        gradients = [p.grad for p in self.parameters]
        gradients = [dense(g) if g is not None and g.is_sparse else g for g in gradients]
        if not self._joined:
            (alone,) = gradients
            if alone is None:
                return torch.zeros_like(self.weight)
            lent = users(alone) == 1  # before there is a view of it
            flat = self._stored(alone).reshape(-1)
            return flat if lent else flat.clone()
        # A parameter that backward did not reach has no gradient, and counts as zeros.
        joined, places = self._joined[0]
        there = [(place, g) for place, g in zip(places, gradients, strict=True) if g is not None]
        if len(there) < len(gradients):
            joined.zero_()
        if there:
            torch._foreach_copy_([place for place, _ in there], [g for _, g in there])
        return joined

    def drop_gradients(self) -> None:
        """Forget the gradients of the parameters; the joined one stays as it is."""
        for p in self.parameters:
            p.grad = None

    def discard_gradients(self, handed_over: bool) -> None:
        """Forget the gradients. ``handed_over``: the joined one stays as it is while later ones take other memories."""
        self.drop_gradients()
        if handed_over:
            self._joined.rotate(-1)

    def _stored(self, x: torch.Tensor) -> torch.Tensor:
        return x.permute(0, 2, 3, 1) if self.channels_last and x.dim() == 4 else x

    def aligned(self, flat: torch.Tensor) -> torch.Tensor:
        """Lay out a flat gradient as the weights lie; returns the same tensor where that is the same."""
        if self._steps == self.sizes:
            return flat
        laid_out = flat.new_zeros(sum(self._steps))
        torch._foreach_copy_(self.parts(laid_out), self.parts(flat))
        return laid_out

    def packed(self, flat: torch.Tensor | None = None) -> torch.Tensor:
        """Return (n,): the weights, or what lies as they do, as a gradient travels; not to be changed."""
        flat = self.weight if flat is None else flat
        return flat if self._steps == self.sizes else torch.cat(self.parts(flat))

    def parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Cut what lies as weights or as gradients do into the flat parts of the tensors."""
        if len(flat) == sum(self.sizes):
            return list(torch.split(flat, self.sizes))
        return [part[:size] for part, size in zip(torch.split(flat, self._steps), self.sizes, strict=True)]

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        views = [part.view(shape) for part, shape in zip(self.parts(flat), self.shapes, strict=True)]
        return [x.permute(0, 3, 1, 2) if self.channels_last and x.dim() == 4 else x for x in views]


def in_memory(memory: mmap.mmap, dtype: torch.dtype, entries: int, start: int) -> torch.Tensor:
    """Return the flat tensor that begins at byte ``start`` of a memory."""
    return torch.frombuffer(memory, dtype=dtype, count=entries, offset=start)


def dense(x: torch.Tensor) -> torch.Tensor:
    """Return a sparse gradient as a dense one."""
    # A GPU would add rows that occur several times in another order each time; ``coalesce`` sorts them.
    return (x.coalesce() if x.is_cuda else x).to_dense()


def users(x: torch.Tensor) -> int:
    """Count the tensors that lie in the memory of ``x``, which is one of them."""
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata) - 1


def stored_shape(shape: Sequence[int], channels_last: bool) -> tuple[int, ...]:
    """Return a parameter's shape in the order in which its axes lie in memory."""
    return (shape[0], *shape[2:], shape[1]) if channels_last and len(shape) == 4 else tuple(shape)
