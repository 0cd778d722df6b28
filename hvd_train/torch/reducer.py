"""The gradients of a user's own PyTorch model, averaged over the ranks by the time that ``backward()`` returns."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from hvd_train.core.agreement import agree_on_weights, due
from hvd_train.errors import CommunicationError, ConfigError
from hvd_train.frontends.pytorch.buckets import users
from hvd_train.frontends.pytorch.model import PyTorchFrontEnd
from hvd_train.frontends.pytorch.ops import TorchOps
from hvd_train.protocol import Communicator, Compressor, TensorSpec
from hvd_train.script.dataloader import passes
from hvd_train.script.slow_rank import Slow
from hvd_train.script.world import Named
from hvd_train.torch import backward
from hvd_train.torch.buffers import Buffers, bits
from hvd_train.torch.residuals import Residuals
from hvd_train.update.exchange import Exchange
from hvd_train.update.overlap import Overlap

# Behind the flags of the parameters; on how many ranks:
BROKEN = 0  # a gradient that would be compressed is not finite
LATE = 1  # a gradient came after its bucket had gone
FAILED = 2  # an error ended the backward pass
ASKED = 3  # weights are to be compared
BUFFERS = 4  # from here on: a buffer has changed
FIRST = 2  # passes: ranks whose gradients are equal in all of them do the same work
APART_FIX = (
    "what a rank decides by its loss or its data sets it apart: decide by ht.sum, which is the same on all ranks, and "
    "keep what a layer gathers from its data in a buffer"
)


class Reducer:
    """Gradients, running statistics and a flag for each parameter travel in flat buckets, divided by the world's size.

    A gradient is a view of its bucket from its first exchange on, as long as the user does not set it to None. Every
    bucket travels after every backward pass: a mean is the same on all ranks, so averaging it again leaves it as it is,
    and several passes before a step add up to the mean of their sums. A parameter without a gradient on some ranks
    counts as zero there; one without on all ranks keeps None, as the flags tell. ``average`` False: the sum.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        statistics: Sequence[tuple[torch.nn.Module, str]],
        communicator: Communicator,
        compressor: Compressor,
        *,
        lossy: bool = False,
        overlap: bool = False,
        average: bool = True,
        buffers: Buffers | None = None,
        model: torch.nn.Module | None = None,
        every: int = 0,
        number: int = 0,
        slow: Slow | None = None,
    ) -> None:
        self.reducing, self.unreduced = True, False  # outside of no_sync; gradients that this rank alone has
        self.failed = False  # an error ended the last pass
        self.frozen: Any = None  # unfreeze.Frozen, of the same model
        self.fellows = [self]  # of the same model, with what was unfrozen; the first has its statistics and buffers
        self.number: float = number
        self.passes = self.steps = 0
        self._first, self._own = FIRST, 0  # of the first passes, how many are to come; bits of this rank's gradient
        self._equal = 0  # of them, in how many all ranks' were equal
        self._compared, self._asked = 0, passes.asked()  # passes before the last comparison
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []  # in the order of their first steps
        self.stepping = False  # within a step that calls backward() itself
        self._communicator, self._buffers, self._every, self._slow = communicator, buffers, every, slow
        self._names, self._parameters = list(parameters), list(parameters.values())
        self._model = model  # of the first fellow
        self._mean = 1.0 / communicator.size
        self._average, self._lossy, self._overlap = average, lossy, overlap
        first = self._parameters[0]
        ops = TorchOps(first.device)
        count = len(parameters) + BUFFERS + len(buffers or ())
        self._flags = torch.zeros(count, dtype=first.dtype, device=first.device)
        # Buckets are planned from the last to the first: flags and statistics, complete at the end, travel last.
        self._statistics = statistics
        self._riders = [self._flags, *(getattr(layer, name) for layer, name in statistics)]
        # What the ranks had in common: only changes are averaged, so that what is equal stays as it is.
        self._common = [torch.zeros_like(self._flags), *(x.detach().clone() for x in self._riders[1:])]
        self._tensors = [*self._riders, *self._parameters]
        specs = [TensorSpec(str(i), tuple(x.shape), ops.dtype(x)) for i, x in enumerate(self._tensors)]
        self._sizes = [spec.size for spec in specs]
        world: Any = Named(communicator, number)
        riders = range(len(self._riders))  # statistics and flags are never compressed
        self._exchange = Exchange(specs, PyTorchFrontEnd.packing, compressor, world, ops, whole=riders)
        state = [tuple(map(ops.from_numpy, arrays)) for arrays in self._exchange.init_state()]
        self._residuals = Residuals(self._exchange.buckets, self._sizes, state)
        self._sent = Overlap(self._exchange, self._start)  # riders never arrive: their buckets go at the end
        self._flats: dict[int, torch.Tensor] = {}
        self._views: dict[int, torch.Tensor] = {}
        self._versions: dict[int, int] = {}
        self._left: dict[int, int] = {}  # versions at the end of the last exchange, in an uneven batch
        self._places: dict[int, int] = {}  # where views lie
        self._strides: dict[int, tuple[int, ...]] = {}  # of the parameters that they were made for
        self._holders: dict[int, int] = {}  # of a bucket's memory, where nobody else has a part of it
        for b in range(len(self._exchange.buckets)):
            self._renew(b)
        self._owner = self._references(0)
        self.begun = False  # a backward pass that has not ended
        self._settled, self._weight = -1, 1.0
        self._broken = False
        self._arrivals: dict[int, int] = {}
        self._kept: set[int] = set()  # without ``average``: gradients that were added to the last sum
        self._summed: set[int] = set()  # without ``average``: gradients that no step has used
        # Until a step has used them: gradients that were set by hand, of all ranks now, and their versions.
        self._joined: dict[int, tuple[torch.Tensor, int]] = {}
        self._weights: dict[int, int] = {}  # bits of parameters that no optimizer has stepped so far
        self._stepped: set[int] = set()
        self._numbered = list(enumerate(self._parameters, len(self._riders)))
        self.index = {id(p): i for i, p in self._numbered}
        backward.watch_checkpoints()
        for i, parameter in self._numbered:
            parameter.register_post_accumulate_grad_hook(lambda _, i=i: self._arrived(i))
            if not average:
                parameter.register_hook(torch.utils.hooks.unserializable_hook(lambda _, i=i: self._before(i)))
            if lossy:
                parameter.register_hook(torch.utils.hooks.unserializable_hook(lambda _: self._settle()))

    # ---- one pass

    def _before(self, i: int) -> None:
        """A hook, without ``average``: backward is to add to gradient ``i``. Is it the last sum, or was that cleared?
        Clipping and the like change it, too, so changes cannot tell."""
        if not self._arrivals.get(i) or i in self._kept:
            view = self._views[i]
            kept = self._gradient(i) is view and (view._version == self._versions[i] or bool(view.any()))
            (self._kept.add if kept else self._kept.discard)(i)

    @torch.no_grad()
    def _arrived(self, i: int) -> None:
        """A hook: backward has added to gradient ``i``."""
        self.unreduced = True  # also after a backward pass that an error ended
        if not self._average:
            self._arrivals[i] = self._arrivals.get(i, 0) + 1
        if not self.reducing:
            return
        self.reached()
        gradient = self._gradient(i)
        if gradient.requires_grad:
            what = "backward(create_graph=True) keeps a graph of this rank's gradient, and no other rank's"
            fix = "take the gradients for a penalty from torch.autograd.grad(..., create_graph=True)"
            raise ConfigError(what, where=self._name(i), fix=fix, common=True)
        if self._overlap and (b := self._sent.arrived(i)) is not None:
            for k in self._exchange.buckets[b]:  # what comes now must not reach what travels
                self._parameters[k - len(self._riders)].grad = None

    def reached(self) -> None:
        """A backward pass has come to a parameter of the model. All its fellows take part: what the pass does not reach
        may be reached on another rank, and statistics change in any."""
        backward.enter()
        if not self.begun:
            for each in self.fellows:
                each.begin()

    def begin(self) -> None:
        self.begun, self._broken = True, False
        self._weight = passes.weight() if self._average else 1.0
        self._sent.begin()
        backward.join(self)
        if self.frozen:
            self.frozen.arrived()

    def _name(self, i: int) -> str:
        return self._names[i - len(self._riders)]

    def _gradient(self, i: int) -> Any:
        return self._parameters[i - len(self._riders)].grad

    def _start(self, b: int) -> Any:
        """Brings the bucket's members into its flat tensor, divided by the world's size and weighted, and sends it."""
        riders, members = len(self._riders), self._exchange.buckets[b]
        sources = {i: self._riders[i] if i < riders else self._gradient(i) for i in members}
        again = {i: self._again(i) for i in members if i >= riders and sources[i] is self._views[i]}
        others = [i for i in members if i >= riders and i not in again]
        # After ``p.grad.data = x`` a view lies elsewhere, and who has the bucket's memory cannot be told. A model
        # may be laid out anew: ``model.to(memory_format=torch.channels_last)``.
        if not all(map(self._at_home, members)) or self._held(b, others):
            self._renew(b)
        own = self._mean * self._weight if self._average else 1.0
        if self._first:
            self._own += sum(int(bits(x)) for i, x in sources.items() if i >= riders and x is not None)
        for i, source in sources.items():
            view = self._views[i]
            if i < riders:
                torch.sub(source, self._common[i], out=view)
                view.mul_(self._mean)
            elif source is None:
                view.zero_()
            elif source.is_sparse:
                fix = "make its layer with sparse=False"
                raise ConfigError("its gradient is sparse", where=self._name(i), fix=fix, common=True)
            else:
                torch.mul(source, again.get(i, own), out=view)
                if source is not view:
                    self._parameters[i - riders].grad = view
        return self._send(b)

    def _again(self, i: int) -> float:
        """The factor of a gradient that lies where the last one lay: with that one in it, or in its place."""
        if self._average:
            return self._mean * self._weight
        arrivals = self._arrivals.get(i, 0)
        if arrivals and i in self._kept:
            what = "a second backward() before the step would count the first one's sum once more for each rank"
            fix = "put all but the last into ht.no_sync, or clear the gradients before"
            raise ConfigError(what, where="ht.distribute(average=False)", fix=fix, common=True)
        return 1.0 if arrivals else self._mean  # without one it is the last sum, clipped or cleared

    def _at_home(self, i: int) -> bool:
        there = self._views[i].data_ptr() == self._places[i]
        return there and self._tensors[i].stride() == self._strides[i]

    def _send(self, b: int) -> Any:
        flat = self._flats[b]
        if self._lossy and not torch.isfinite(flat).all():  # a compressor would hide it and keep it
            self._broken = True
            flat.nan_to_num_(0.0, 0.0, 0.0)
        if self._broken and b == self._sent.bucket[0]:
            self._views[0][len(self._parameters) + BROKEN] = self._mean
        return self._exchange.start(b, flat, self._residuals.state[b])

    def finish(self) -> None:
        """The end of a backward pass: what has not travelled yet does so, and gradients become the ranks' mean."""
        self.begun = False
        self._end()

    def adopt(self) -> None:
        """The end of a pass that began before this reducer was there, or that other ranks make of the batch in use."""
        self._sent.begin()
        self._weight = passes.weight() if self._average else 1.0
        self._end()

    @torch.no_grad()
    def abandon(self) -> None:
        """An error ended this rank's backward pass; the others wait for it. All ranks must have failed alike."""
        self.begun, self.failed = False, True
        for b in range(len(self._flats)):
            if b not in self._sent.started:
                self._renew(b)  # the gradients that are there are not touched
        self._end(failed=True)

    @torch.no_grad()
    def _end(self, failed: bool = False) -> None:
        count = len(self._parameters)
        self._look_up()
        early = {i for b in self._sent.started for i in self._exchange.buckets[b]}
        late = {i: g for i in early if (g := self._gradient(i)) is not None}
        missing = [k for k, (i, p) in enumerate(self._numbered) if p.grad is None and i not in early]
        self.passes += 1
        changed = self._buffers.changed(self.passes, self._every) if self._buffers else []
        asked = passes.asked() != self._asked
        self._flags.zero_()
        self._flags[:count] = 1
        if missing:
            self._flags[missing] = 0
        if late or failed or asked or any(changed):
            self._flags[count:] = torch.tensor([0.0, bool(late), failed, asked, *changed])
        if failed:
            self._views[0].copy_(self._flags * self._mean)
        gradients, state = self._sent.finish(self._sent.bucket[0], self._send if failed else None)  # flags go last
        told = self._views[0]
        for b, gradient in enumerate(gradients):
            if gradient.data_ptr() != self._flats[b].data_ptr():
                self._flats[b].copy_(gradient)
        broken, any_late, any_failed, any_asked, *changed = told[count:].tolist()
        if any_failed:
            self._failed(failed)
            return
        for i, rider in enumerate(self._riders):
            if i:
                self._common[i].add_(self._views[i])
                rider.data.copy_(self._common[i])  # a graph that is kept may hold it
        if broken:
            for flat in self._flats.values():  # on some rank: all of them see it, and no residual keeps it
                flat.fill_(torch.nan)
        elif self._lossy:
            self._residuals.passed(state)
        self._broken = False
        if missing:
            elsewhere = (told[:count] != 0).tolist()
            missing = [k for k in missing if not elsewhere[k]]
        nowhere = set(missing)
        if any_late:
            self._once_more(late, nowhere)
            return
        for k, (i, p) in enumerate(self._numbered):
            if k not in nowhere and p.grad is not self._views[i]:
                p.grad = self._views[i]
        if not self._average:
            self._arrivals = {}
            self._summed = {i for i, p in self._numbered if p.grad is not None}
            self._versions |= {i: self._views[i]._version for i, _ in self._numbered}
        if self._lossy:
            self._residuals.settle({self._numbered[k][0]: False for k in missing})
            self._note()
        if self._buffers:
            self._buffers.share(changed)
        self.unreduced = self.failed = False
        self._left = {i: self._views[i]._version for i, _ in self._numbered} if passes.uneven() else {}
        if self._first:
            self._tell_equal()
        self._passed(bool(any_asked))

    def changed(self) -> bool:
        """Return whether the script changed gradients since they travelled last, in a batch uneven between ranks."""
        left = ((self._gradient(i), self._views[i], version) for i, version in self._left.items())
        return any(g is not None and (g is not view or view._version != version) for g, view, version in left)

    def _tell_equal(self) -> None:
        own, self._own, self._first = self._own % 2**64, 0, self._first - 1
        everyone = self._communicator.allgather_bytes(own.to_bytes(8, "little"), "gradients")
        self._equal += own > 0 and len(everyone) > 1 and len(set(everyone)) == 1
        if self._equal == FIRST and not self._communicator.rank:
            what = "all ranks computed the same gradients: do they go through the same samples?"
            warnings.warn(f"{what} Use the loader that ht.shard gives; draw batches apart", stacklevel=2)

    def _once_more(self, late: Mapping[int, torch.Tensor], nowhere: Collection[int]) -> None:
        """A part of the model ran twice in a pass: from now on nothing travels before the pass is over."""
        self._overlap = False
        for k, (i, p) in enumerate(self._numbered):
            view = self._views[i]
            if k in nowhere:
                continue
            if i in late:
                view = view * self._mean + late[i] if not self._average else view + late[i]
                p.grad = view
            else:
                p.grad = view if self._average else view * self._mean
        self._end()

    def _failed(self, own: bool) -> None:
        """Some rank's pass ended with an error. If all did, the next one begins anew; else the ranks are apart."""
        everyone = self._communicator.allgather_bytes(bytes([own]))
        ranks = [rank for rank, part in enumerate(everyone) if part[0]]
        if len(ranks) < len(everyone):
            what = "an error ended backward() on this rank alone, so that the others' step has no counterpart there"
            fix = "let the script end there, and mend what raised: smaller batches, if memory ran out"
            raise CommunicationError(what, where="backward()", fix=fix, common=True, ranks=ranks)

    def _look_up(self) -> None:
        """A script may have put other statistics in the places of those that it had."""
        for i, (layer, name) in enumerate(self._statistics, 1):
            if (x := getattr(layer, name)) is not None:
                self._riders[i] = x

    # ---- memory

    def _renew(self, b: int) -> None:
        """New memory for a bucket: the user holds gradients that lie in the old one, or they are not to be changed."""
        members = self._exchange.buckets[b]
        dtype, device = self._tensors[members[0]].dtype, self._tensors[members[0]].device
        flat = torch.zeros(sum(self._sizes[i] for i in members), dtype=dtype, device=device)
        self._flats[b] = flat
        for i, part in zip(members, flat.split([self._sizes[i] for i in members]), strict=True):
            # A gradient lies in memory as its parameter does (channels last, transposed, ...): fused steps rely on it.
            # ``data``: each with a count of changes of its own.
            x = self._tensors[i]
            self._views[i] = part.as_strided(x.shape, torch.empty_like(x).stride()).data
            self._strides[i] = x.stride()
            self._versions[i], self._places[i] = -1, self._views[i].data_ptr()
        del part
        self._holders[b] = users(self._flats[b])

    def _held(self, b: int, members: Sequence[int]) -> bool:
        """Whether someone has a gradient of the bucket, or a view of one, that is no parameter's any more."""
        if not members:
            return False
        return users(self._flats[b]) > self._holders[b] or any(self._references(i) > self._owner for i in members)

    def _references(self, i: int) -> int:
        return sys.getrefcount(self._views[i])

    @torch.no_grad()
    def loaded(self, model: torch.nn.Module) -> None:
        """All ranks have loaded its statistics: what they have in common, to the bit."""
        self._look_up()
        theirs = {id(x) for x in model.buffers()}
        for rider, common in zip(self._riders, self._common, strict=True):
            if id(rider) in theirs:
                common.copy_(rider)

    # ---- steps

    def used(self, optimizer: torch.optim.Optimizer, parameters: Collection[torch.nn.Parameter]) -> None:
        """The optimizer has used their gradients."""
        self.steps += 1
        self._joined.clear()  # they would stay in memory
        if all(optimizer is not known() for known in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))
        if self._average and not self._lossy:
            return
        members = {self.index[id(p)] for p in parameters}
        self._summed -= members
        if not self._lossy:
            return
        self._stepped |= members
        self._residuals.settle(dict.fromkeys(members, True))

    def _note(self) -> None:
        """Of parameters that no optimizer has stepped, what their weights are: a loop may update them by itself."""
        loose = [i for i in self._residuals.open() if i not in self._stepped]
        self._weights = {i: int(bits(self._tensors[i])) for i in loose}
        self._versions |= {i: self._views[i]._version for i in self._residuals.open()}

    @torch.no_grad()
    def _settle(self) -> None:
        """A hook, before a backward pass adds its first gradient: what became of those that the last one left?"""
        task = backward.here()
        if task == self._settled:
            return
        self._settled = task
        ends = {}
        for i in self._residuals.open():
            view, gradient = self._views[i], self._gradient(i)
            moved = i in self._weights and int(bits(self._tensors[i])) != self._weights[i]
            if moved or self.stepping:
                ends[i] = True
            elif gradient is view:
                if view._version != self._versions[i] and not view.any():
                    ends[i] = False
            else:
                del gradient
                ends[i] = self._references(i) > self._owner + 1  # ``view``
        self._residuals.settle(ends)

    @torch.no_grad()
    def by_hand(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Before a step with gradients that are no backward pass's: set by the user, they become the ranks' mean."""
        there = [self.index[id(p)] for p in parameters if p.grad is not None]
        own = [i for i in there if self._gradient(i) is not self._views[i] or not self._at_home(i)]
        if not own:
            return
        if self._summed.intersection(own):
            what = "a gradient was replaced after backward() had summed it, and would be summed again"
            where, fix = "ht.distribute(average=False)", "change it in its place, as in p.grad /= n"
            raise ConfigError(what, where=where, fix=fix, common=True)
        # A step within a step (super().step()) finds what the outer one has joined.
        new = [i for i in own if not self._joined_before(i)]
        if passes.asked() != self._asked:
            new.append(0)  # of the flags
        everyone = self._communicator.allgather_bytes(",".join(map(str, new)).encode())
        told = {int(i) for part in everyone for i in part.decode().split(",") if i}
        chosen = sorted(told - {0})
        if not chosen:
            return
        for dtype in dict.fromkeys(self._tensors[i].dtype for i in chosen):
            same = [i for i in chosen if self._tensors[i].dtype == dtype]
            parts = [torch.zeros_like(self._tensors[i]) if (g := self._gradient(i)) is None else g for i in same]
            flat = torch.cat([part.detach().to_dense().reshape(-1) for part in parts])
            if self._average:
                flat.mul_(self._mean * passes.weight())
            name = f"model{self.number}.by hand.{dtype}"
            flat = self._communicator.synchronize(self._communicator.allreduce_async(flat, name))
            for i, part in zip(same, flat.split([self._sizes[i] for i in same]), strict=True):
                p = self._parameters[i - len(self._riders)]
                p.grad = torch.empty_like(p, requires_grad=False).copy_(part.reshape(p.shape))
                self._joined[i] = p.grad, p.grad._version
        self.passes += 1
        self._passed(0 in told)

    def _joined_before(self, i: int) -> bool:
        gradient, version = self._joined.get(i, (None, 0))
        return gradient is not None and self._gradient(i) is gradient and gradient._version == version

    def joined(self, loss: float, total: Callable[[float], float]) -> float:
        """The loss of all ranks, of this rank's own."""
        return total(loss * passes.weight()) * self._mean if self._average else total(loss)

    def _passed(self, asked: bool) -> None:
        """Gradients have travelled. ``asked``: by any rank."""
        passes.exchanged()
        if self._slow:
            self._slow.stepped()
        if asked or due(self.passes, self._every):
            self.compare()

    def compare(self) -> None:
        """Now and then, on all ranks together: their weights must be the same, if there was a pass since."""
        self._asked = passes.asked()
        if not self._every or self.passes == self._compared:
            return
        self._compared = self.passes
        weights = dict(zip(self._names, self._parameters, strict=True))
        if self._model:  # frozen ones that a layer changes, and what it has put in the place of others
            weights |= self._model.named_parameters()
        totals = torch.stack([bits(p).to(self._flags.device) for p in weights.values()]).tolist()
        settings = {"optimizer steps": str(self.steps), **passes.orders()}
        optimizers = [optimizer for known in self._optimizers if (optimizer := known()) is not None]
        for k, optimizer in enumerate(optimizers):
            for g, group in enumerate(optimizer.param_groups):
                of = type(optimizer).__name__ + f" {k}" * (len(optimizers) > 1)
                of += f", group {g}" * (len(optimizer.param_groups) > 1)
                settings[f"learning rate of {of}"] = str(float(group.get("lr", "nan")))
        where = f"backward pass {self.passes} of the model"
        sums = dict(zip(weights, totals, strict=True))
        agree_on_weights(self._communicator, sums, where, settings=settings, fix=APART_FIX)
