"""The gradients of a user's own PyTorch model, averaged over the ranks by the time that ``backward()`` returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hvd_train.core.exchange import SMALL, Exchange
from hvd_train.errors import ConfigError
from hvd_train.frontends.pt import PyTorchFrontEnd, TorchOps
from hvd_train.protocol import Communicator, Compressor, TensorSpec
from hvd_train.script import pt_passes
from hvd_train.script.world import Named


class Reducer:
    """Gradients, running statistics and a flag for each parameter travel in flat buckets, divided by the world's size.

    A gradient is a view of its bucket from its first exchange on, as long as the user does not set it to None. Every
    bucket travels after every backward pass: a mean is the same on all ranks, so averaging it again leaves it as it is,
    and several passes before a step add up to the mean of their sums. A parameter without a gradient on some ranks
    counts as zero there; one without on all ranks keeps None, as the flags tell.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        statistics: Sequence[torch.Tensor],
        communicator: Communicator,
        compressor: Compressor,
        *,
        lossy: bool = False,
        overlap: bool = False,
        number: int = 0,
    ) -> None:
        self.reducing, self.unreduced = True, False  # outside of no_sync; gradients that this rank alone has
        self._names, self._parameters = list(parameters), list(parameters.values())
        self._scale, self._lossy, self._overlap, self._number = 1.0 / communicator.size, lossy, overlap, number
        first = self._parameters[0]
        ops = TorchOps(first.device)
        self._flags = torch.ones(len(parameters), dtype=first.dtype, device=first.device)
        # Buckets are planned from the last to the first: flags and statistics, complete at the end, travel last.
        self._riders = [self._flags, *statistics]
        tensors = [*self._riders, *self._parameters]
        specs = [TensorSpec(str(i), tuple(x.shape), ops.dtype(x)) for i, x in enumerate(tensors)]
        small = max(SMALL, len(parameters) + 1)  # flags are never compressed
        packing = PyTorchFrontEnd.packing
        world: Any = Named(communicator, number)
        self._exchange = Exchange(specs, packing, compressor, world, ops, small=small)
        self._state = [tuple(map(ops.from_numpy, arrays)) for arrays in self._exchange.initial()]
        self._flats, self._views, self._bucket = [], dict[int, torch.Tensor](), dict[int, int]()
        for b, members in enumerate(self._exchange.buckets):
            flat = torch.zeros(sum(specs[i].size for i in members), dtype=tensors[members[0]].dtype, device=ops.device)
            self._flats.append(flat)
            for i, part in zip(members, flat.split([specs[i].size for i in members]), strict=True):
                # A gradient lies in memory as its parameter does (channels last, transposed, ...).
                self._views[i] = part.as_strided(tensors[i].shape, torch.empty_like(tensors[i]).stride())
                self._bucket[i] = b
        self._begun, self._weight = False, 1.0
        self._waiting: list[int] = []
        self._started: dict[int, Any] = {}
        self._broken = False
        for i, parameter in enumerate(self._parameters, len(self._riders)):
            parameter.register_post_accumulate_grad_hook(lambda _, i=i: self._arrived(i))

    @torch.no_grad()
    def _arrived(self, i: int) -> None:
        """A hook: backward has added to gradient ``i``."""
        self.unreduced = True  # also after a backward pass that an error ended
        if not self.reducing:
            return
        if not self._begun:
            self._begun, self._started, self._broken = True, {}, False
            self._weight = pt_passes.weight()
            self._waiting = [len(members) for members in self._exchange.buckets]
            _pending.append(self)
            torch.autograd.Variable._execution_engine.queue_callback(_finish_all)
        if self._overlap:
            b = self._bucket[i]
            self._waiting[b] -= 1
            if self._waiting[b] == 0:
                self._start(b)
            elif self._waiting[b] < 0:
                what = "a gradient changed after its exchange had begun: the model runs a part of its backward twice"
                where, fix = self._names[i - len(self._riders)], "give ht.distribute overlap=False"
                raise ConfigError(what, where=where, fix=fix, common=True)

    def _start(self, b: int) -> None:
        """Brings the bucket's members into its flat tensor, divided by the world's size and weighted, and sends it."""
        for i in self._exchange.buckets[b]:
            own = i - len(self._riders)
            view = self._views[i]
            source = self._riders[i] if own < 0 else self._parameters[own].grad
            scale = self._scale * (1.0 if own < 0 else self._weight)
            if source is None:
                view.zero_()
            elif source is view:
                view.mul_(scale)
            else:
                if source.is_sparse:
                    fix = "make its layer with sparse=False"
                    raise ConfigError("its gradient is sparse", where=self._names[own], fix=fix, common=True)
                torch.mul(source, scale, out=view)
                if own >= 0:
                    self._parameters[own].grad = view
        flat = self._flats[b]
        if self._lossy and not torch.isfinite(flat).all():  # a compressor would hide it and keep it
            self._broken = True
            flat.nan_to_num_(0.0, 0.0, 0.0)
        if self._broken and b == self._bucket[0]:
            self._views[0].fill_(torch.nan)  # the flags tell all ranks
        self._started[b] = self._exchange.start(b, flat, self._state[b])

    @torch.no_grad()
    def finish(self) -> None:
        """The end of a backward pass: what has not travelled yet does so, and gradients become the ranks' mean."""
        self._begun = False
        missing = [k for k, p in enumerate(self._parameters) if p.grad is None]
        self._flags.fill_(1)
        if missing:
            self._flags[missing] = 0
        last = self._bucket[0]  # that of the flags
        for b in range(len(self._flats)):
            if b not in self._started and b != last:
                self._start(b)
        self._start(last)
        gradients, state = self._exchange.finish([self._started[b] for b in range(len(self._flats))])
        for flat, gradient in zip(self._flats, gradients, strict=True):
            if gradient.data_ptr() != flat.data_ptr():
                flat.copy_(gradient)
        for i, rider in enumerate(self._riders):
            rider.copy_(self._views[i])
        if self._lossy and torch.isnan(self._flags).any():
            for flat in self._flats:  # on some rank: all of them see it, and no residual keeps it
                flat.fill_(torch.nan)
        else:
            self._state = state
        if missing:
            elsewhere = (self._flags != 0).tolist()
            for k in missing:
                if elsewhere[k]:
                    self._parameters[k].grad = self._views[k + len(self._riders)]
        self.unreduced = False
        pt_passes.exchanged()


_pending: list[Reducer] = []


def _finish_all() -> None:
    """At the end of a backward pass through several models: in the same order on every rank."""
    for reducer in sorted(_pending, key=lambda reducer: reducer._number):
        _pending.remove(reducer)
        reducer.finish()
