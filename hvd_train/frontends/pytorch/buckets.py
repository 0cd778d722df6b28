"""Flat buckets: contiguous memory for the weights, gradients and slots of several parameters."""

from __future__ import annotations

import math
import mmap
from collections import deque
from collections.abc import Sequence
from itertools import compress

import torch

from hvd_train.errors import ConfigError

# torch's tensors begin at multiples of this many bytes, and cuDNN relies on it. When ResNet's weights followed a bias
# of ten numbers, a convolution ended with "unable to find an engine" (one H200, cuDNN 9.19).
GPU_ALIGN = 64


class Flat:
    """One bucket: a flat weight, of which the parameters are views, and its flat gradient.

    Gradients are autograd's tensors until ``gather`` joins them. If a bucket has one parameter, its gradient's memory
    is used directly, which saves a zeroing, an addition and a copy; not if autograd shares that memory.
    ``channels_last``: convolution kernels are stored as (out, height, width, in). ``align``: weights and slots begin at
    multiples of so many bytes, padded with zeros; gradients are not padded. ``memories``: how many joined gradients are
    kept, this step's included.
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
        # In entries. No zeros follow the last tensor.
        step = max(1, align // parameters[0].element_size())
        self._steps = [-(-size // step) * step for size in self.sizes[:-1]] + self.sizes[-1:]
        values = [self._stored(p.detach()).reshape(-1) for p in parameters]
        self.weight = self.aligned(torch.cat(values))
        self.parameters = parameters
        joined = [torch.cat(values).zero_() for _ in range(memories if len(parameters) > 1 else 0)]
        # Keep their views: to make them for 200 layers takes 0.5 ms of each step.
        self._joined = deque((x, self.views(x)) for x in joined)
        self.move_to(self.weight)

    def move_to(self, weight: torch.Tensor, seen: torch.Tensor | None = None) -> None:
        """Replace the flat weight, and make the parameters views of it, or of ``seen``, which has the same numbers."""
        self.weight = weight
        # The optimizer updates the flat weight, and so all parameters at once.
        self._places = self.views(weight if seen is None else seen)
        for p, w in zip(self.parameters, self._places, strict=True):
            p.data, p.grad = w, None
        self._addresses = [w.data_ptr() for w in self._places]

    @torch.no_grad()
    def take_back(self) -> None:
        """Take the values of parameters that got other memory, as by ``p.data = x`` in a model's forward.

        They are views of the flat weight again. Raises ConfigError for another shape.
        """
        moved = [p.data_ptr() != address for p, address in zip(self.parameters, self._addresses, strict=True)]
        for name, p, place in compress(zip(self.names, self.parameters, self._places, strict=True), moved):
            if p.shape != place.shape:
                what = f"{name} of the shape {tuple(place.shape)} was replaced by one of {tuple(p.shape)}"
                raise ConfigError(what, where="the model's code", fix="keep the shape, as with p.data.copy_(x)")
            p.data = place.copy_(p.data)

    @torch.no_grad()
    def gather(self) -> torch.Tensor:
        """Return the gradient of all parameters, (n,), with zeros for those that backward did not reach.

        Its memory is reused in the next step, unless it is handed over.
        """
        gradients = [p.grad for p in self.parameters]
        gradients = [dense(g) if g is not None and g.is_sparse else g for g in gradients]
        if not self._joined:
            (alone,) = gradients
            if alone is None:
                return torch.zeros_like(self.weight)
            lent = users(alone) == 1  # before we make a view of it
            flat = self._stored(alone).reshape(-1)
            return flat if lent else flat.clone()
        # A parameter that backward did not reach has no gradient; zeros instead.
        joined, places = self._joined[0]
        there = [(place, g) for place, g in zip(places, gradients, strict=True) if g is not None]
        if len(there) < len(gradients):
            joined.zero_()
        if there:
            torch._foreach_copy_([place for place, _ in there], [g for _, g in there])
        return joined

    def drop_gradients(self) -> None:
        """Drop the gradients of the parameters, but not the joined one."""
        for p in self.parameters:
            p.grad = None

    def discard_gradients(self, handed_over: bool) -> None:
        """Drop the gradients. ``handed_over``: keep the joined one, and use other memory for the next."""
        self.drop_gradients()
        if handed_over:
            self._joined.rotate(-1)

    def _stored(self, x: torch.Tensor) -> torch.Tensor:
        return x.permute(0, 2, 3, 1) if self.channels_last and x.dim() == 4 else x

    def aligned(self, flat: torch.Tensor) -> torch.Tensor:
        """Pad a flat gradient as the weights are; returns the same tensor if they have no padding."""
        if self._steps == self.sizes:
            return flat
        laid_out = flat.new_zeros(sum(self._steps))
        torch._foreach_copy_(self.parts(laid_out), self.parts(flat))
        return laid_out

    def packed(self, flat: torch.Tensor | None = None) -> torch.Tensor:
        """Remove the padding of ``flat``, by default the weights; return (n,), which must not be changed."""
        flat = self.weight if flat is None else flat
        return flat if self._steps == self.sizes else torch.cat(self.parts(flat))

    def parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Split a flat tensor, padded or not, into the parts of the parameters."""
        if len(flat) == sum(self.sizes):
            return list(torch.split(flat, self.sizes))
        return [part[:size] for part, size in zip(torch.split(flat, self._steps), self.sizes, strict=True)]

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        views = [part.view(shape) for part, shape in zip(self.parts(flat), self.shapes, strict=True)]
        return [x.permute(0, 3, 1, 2) if self.channels_last and x.dim() == 4 else x for x in views]


def in_memory(memory: mmap.mmap, dtype: torch.dtype, entries: int, start: int) -> torch.Tensor:
    """Return the flat tensor at byte ``start`` of a memory."""
    return torch.frombuffer(memory, dtype=dtype, count=entries, offset=start)


def dense(x: torch.Tensor) -> torch.Tensor:
    """Return a sparse gradient as a dense one."""
    # A GPU would add repeated rows in a different order each time; ``coalesce`` sorts them.
    return (x.coalesce() if x.is_cuda else x).to_dense()


def users(x: torch.Tensor) -> int:
    """Count the tensors that share the memory of ``x``, itself included."""
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata) - 1


def stored_shape(shape: Sequence[int], channels_last: bool) -> tuple[int, ...]:
    """Return a parameter's shape in memory order."""
    return (shape[0], *shape[2:], shape[1]) if channels_last and len(shape) == 4 else tuple(shape)
