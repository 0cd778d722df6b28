"""The mean of a user's gradients over the ranks, ready when ``backward()`` returns."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from hvd_train.errors import CommunicationError, ConfigError
from hvd_train.frontends.pytorch.eager import eager
from hvd_train.frontends.pytorch.model import PyTorchFrontEnd
from hvd_train.frontends.pytorch.ops import TorchOps
from hvd_train.protocol import Communicator, Compressor, TensorSpec
from hvd_train.script.pytorch import backward, loss_scale
from hvd_train.script.pytorch.bit_sum import bits
from hvd_train.script.pytorch.buffers import Buffers
from hvd_train.script.pytorch.gradient_memory import GradientMemory
from hvd_train.script.pytorch.manual_gradients import ManualGradients
from hvd_train.script.pytorch.options import rate_of
from hvd_train.script.pytorch.pass_flags import PassFlags
from hvd_train.script.pytorch.residuals import GradientUse, Residuals
from hvd_train.script.pytorch.running_statistics import RunningStatistics
from hvd_train.script.pytorch.same_work import SameWorkWarning
from hvd_train.script.pytorch.summed_gradients import SummedGradients
from hvd_train.script.shared.dataloader import passes
from hvd_train.script.shared.slow_rank import SlowRankReport
from hvd_train.script.shared.weight_check import WeightCheck
from hvd_train.script.shared.world import NamedTransfers
from hvd_train.update.exchange import Exchange
from hvd_train.update.overlap import Overlap

DIFFER_FIX = (
    "a rank that decides by its own loss or data comes to differ: decide by ht.sum, which all ranks get alike, and "
    "keep what a layer gathers from its data in a buffer"
)
HAND_FIX = "gradients of torch.autograd.grad and torch.func.grad are of this rank alone: set p.grad before the step"


class Reducer:
    """The mean of gradients, running statistics and flags over the ranks, in flat buckets.

    A gradient is a view of its bucket from its first exchange on, as long as the user does not set it to None. Every
    bucket is exchanged after every backward pass. A mean is equal on all ranks, so averaging it again does not change
    it, and several passes before a step accumulate the mean of their sums. A parameter without a gradient on some ranks
    counts as zero there; without one on any rank it keeps None. ``average`` False: sums.

    ``tensors[i]`` is the i-th exchanged tensor: the flags, the statistics, then the parameters.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        running_stats: Sequence[tuple[torch.nn.Module, str]],
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
        slow: SlowRankReport | None = None,
    ) -> None:
        self.reducing, self.unreduced = True, False  # False in no_sync; whether there are gradients not yet reduced
        self.failed = False  # an error ended the last pass
        self.begun = False  # a backward pass is running
        self.stepping = False  # during a step, which may call backward() itself
        self.frozen: Any = None  # unfreeze.Frozen of the same model
        self.model_reducers = [self]  # and those of unfrozen parameters; the first has statistics and buffers
        self.number: float = number
        self.passes = self.steps = 0
        self._communicator, self._buffers, self._slow = communicator, buffers, slow
        self.average, self._lossy, self._overlap = average, lossy, overlap
        self._early = False  # whether buckets are sent within this pass
        self._mean, self._weight = 1.0 / communicator.size, 1.0
        self._part_weight = 0.0  # of the gradients accumulated in no_sync; 0 without any
        self._weighs_parts = False
        self._in_parts = False  # whether gradients were accumulated in no_sync since the last exchange
        self._statistics_weight = 1.0
        self._nonfinite = False  # in this pass; a compressor would hide it
        self._of_closure: set[float] = set()  # this rank's weights within the closure of a step
        self._by_hand = False  # whether gradients were ever set by hand, on any rank
        self._replaced = False  # whether a step used gradients that were set after their exchange
        self._names, self._parameters = list(parameters), list(parameters.values())
        self._running_stats = RunningStatistics(running_stats)
        first = self._parameters[0]
        self._flags = PassFlags(len(parameters), len(buffers or ()), first)
        # Buckets are planned from the last tensor to the first, so flags and statistics are sent last.
        extra_tensors = [self._flags.tensor, *self._running_stats.tensors]
        self._tensors: list[torch.Tensor] = [*extra_tensors, *self._parameters]
        self._first = len(extra_tensors)  # number of the first parameter
        self._numbered = list(enumerate(self._parameters, self._first))
        self.index = {id(p): i for i, p in self._numbered}
        ops = TorchOps(first.device)
        specs = [TensorSpec(str(i), tuple(x.shape), ops.dtype(x)) for i, x in enumerate(self._tensors)]
        named: Any = NamedTransfers(communicator, number)
        whole = range(self._first)  # statistics and flags are never compressed
        self._exchange = Exchange(specs, PyTorchFrontEnd.packing, compressor, named, ops, whole=whole)
        state = [tuple(map(ops.from_numpy, arrays)) for arrays in self._exchange.init_state()]
        self._memory = GradientMemory(self._tensors, self._exchange.buckets)
        self._residuals = Residuals(self._exchange.buckets, [spec.size for spec in specs], state)
        self._use = GradientUse(self._residuals, self._tensors, self._memory)
        self._summed = SummedGradients(self._tensors, self._memory)
        name = f"model{self.number}.by hand"
        self._manual = ManualGradients(self._tensors, self._first, self._memory, communicator, name, average=average)
        self._same_work = SameWorkWarning(communicator)
        self._overlapped = Overlap(self._exchange, self._start)  # flags never arrive, so their bucket is sent last
        self._left: dict[int, int] = {}  # versions after the last exchange, in an uneven batch
        self._model = model
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []  # in the order of their first steps
        self._check = WeightCheck(communicator, every, self._checksums, self._settings, DIFFER_FIX)
        if model:  # the first reducer, also for parameters unfrozen later
            self._check.follow(number, lambda: self.passes > 0 and not self._replaced, HAND_FIX)
        self._checked, self._asked = 0, passes.asked()  # passes at the last comparison
        backward.watch_checkpoints()
        if lossy:
            loss_scale.follow(self)
        self._hooks: set[int] = set()  # ids of this reducer's hooks on accumulated gradients
        self._hook_parameters()

    def _hook_parameters(self) -> None:
        for i, parameter in self._numbered:
            arrived = parameter.register_post_accumulate_grad_hook(eager(lambda _, i=i: self._arrived(i)))
            self._hooks.add(arrived.id)
            if not self.average:
                hook = torch.utils.hooks.unserializable_hook(eager(lambda _, i=i: self._summed.before(i)))
                parameter.register_hook(hook)
            if self._lossy:
                use = eager(lambda _: self._use.before_backward(self.stepping))
                hook = torch.utils.hooks.unserializable_hook(use)
                parameter.register_hook(hook)

    # ---- a backward pass: gradients arrive

    @torch.no_grad()
    def _arrived(self, i: int) -> None:
        """Handle gradient ``i``, to which backward has just added; a hook of autograd."""
        self.unreduced = True  # also if the backward pass fails
        if not self.average:
            self._summed.arrived(i)
        if not self.reducing:
            self._in_parts = True
            if self.average:
                passes.accumulated()
            return
        self.reached()
        gradient: Any = self._tensors[i].grad
        if gradient is None:
            what = "a hook of yours has set the gradient to None before the ranks have joined it"
            fix = "call step() and zero_grad() when backward() has returned"
            raise ConfigError(what, where=self._name(i), fix=fix, common=True)
        if gradient.requires_grad:
            what = "backward(create_graph=True) keeps a graph of this rank's gradient alone"
            fix = "take the gradients for a penalty from torch.autograd.grad(..., create_graph=True)"
            raise ConfigError(what, where=self._name(i), fix=fix, common=True)
        if self._early and (b := self._overlapped.arrived(i)) is not None:
            for k in self._exchange.buckets[b]:  # later gradients must not change the bucket in flight
                self._tensors[k].grad = None

    def weigh_parts(self) -> None:
        """Weigh from now on batches that are accumulated in no_sync each by its own numbers of samples."""
        # Registered only with the first no_sync, because it costs each parameter a call in each backward pass.
        if self.average and not self._weighs_parts:
            self._weighs_parts = True
            for p in self._parameters:
                p.register_hook(torch.utils.hooks.unserializable_hook(eager(lambda _: self._next_part())))

    @torch.no_grad()
    def _next_part(self) -> None:
        """Before a gradient is added: scale those of earlier batches for the weight of the current one.

        An exchange multiplies the whole sum by the weight of its last batch.
        """
        weight = passes.weight_of_part()
        if self.unreduced and self._part_weight not in (0.0, weight):
            for p in self._parameters:
                if p.grad is not None:
                    p.grad.mul_(self._part_weight / weight)
        self._part_weight = weight

    def reached(self) -> None:
        """Begin a pass for all reducers of the model.

        Another rank's pass may reach other parameters, and statistics change in any pass.
        """
        backward.enter()
        if not self.begun:
            for reducer in self.model_reducers:
                reducer.begin()

    def begin(self) -> None:
        """Begin a pass of this reducer."""
        self.begun, self._nonfinite = True, False
        self._begin_weights()
        self._overlapped.begin()
        backward.register(self)
        if self.frozen:
            self.frozen.arrived()

    def _begin_weights(self) -> None:
        """Take the weights if buckets may be sent within the pass.

        Not if ranks compare lengths for them: they may make unequal numbers of passes in an uneven batch.
        """
        self._early = self._overlap and not passes.gathers() and not self._hooked_later()
        if self._early:
            self._take_weights()

    def _hooked_later(self) -> bool:
        """Return whether hooks of the script run after this reducer's: they may change a gradient that is sent."""
        hooks = (p._post_accumulate_grad_hooks for p in self._parameters)
        return any(next(reversed(one)) not in self._hooks for one in hooks if one)

    def _take_weights(self) -> None:
        """Set the weights of this rank's gradients and of its changes of running statistics."""
        self._weight = passes.averaged() if self.average else 1.0
        self._of_closure.add(self._weight)
        # Changes by several batches have no common weight.
        self._statistics_weight = 1.0 if self._in_parts else passes.weight()

    def _name(self, i: int) -> str:
        return self._names[i - self._first]

    # ---- buckets are sent

    def _start(self, b: int) -> Any:
        """Write the bucket's members to its flat tensor, weighted and divided by the world's size, and send it."""
        first, members, memory = self._first, self._exchange.buckets[b], self._memory
        gradients = {i: self._tensors[i].grad for i in members if i >= first}
        factor = self._mean * self._weight if self.average else 1.0
        again = {i: self._factor(i, factor) for i, g in gradients.items() if g is memory.views[i]}
        others = [i for i in gradients if i not in again]
        # After ``p.grad.data = x`` a view is elsewhere, and it is unknown who holds the bucket's memory. The layout may
        # change, too: ``model.to(memory_format=torch.channels_last)``.
        if not all(map(memory.in_place, members)) or memory.is_held(b, others):
            memory.renew(b)
        if self._same_work.left:
            self._same_work.add(sum(int(bits(g)) for g in gradients.values() if g is not None))
        for i in members:
            if i < first:
                self._write_extra(i)
        for i, gradient in gradients.items():
            view = memory.views[i]
            if gradient is None:
                view.zero_()
            elif gradient.is_sparse:
                fix = "make its layer with sparse=False"
                raise ConfigError("its gradient is sparse", where=self._name(i), fix=fix, common=True)
            elif gradient.dtype is not view.dtype or gradient.device != view.device:
                what = f"it is {gradient.dtype} on {gradient.device} now, and was {view.dtype} on {view.device}"
                fix = "call model.to(...), model.double() and the like before ht.distribute"
                raise ConfigError(what, where=self._name(i), fix=fix, common=True)
            elif gradient.shape != view.shape:
                what = f"it has shape {tuple(gradient.shape)} now, and had {tuple(view.shape)} in ht.distribute"
                fix = "make the model with its new shapes anew, load its weights, and call ht.distribute again"
                raise ConfigError(what, where=self._name(i), fix=fix, common=True)
            else:
                torch.mul(gradient, again.get(i, factor), out=view)
                if gradient is not view:
                    self._tensors[i].grad = view
        return self._send(b)

    def _factor(self, i: int, factor: float) -> float:
        """Return the factor for gradient ``i``, which is in the memory of the last one."""
        return factor if self.average else self._summed.factor(i, self._mean)

    def _write_extra(self, i: int) -> None:
        view = self._memory.views[i]
        if i:
            self._running_stats.write_change(i - 1, view, self._mean * self._statistics_weight)
        else:
            torch.mul(self._flags.tensor, self._mean, out=view)

    def _send(self, b: int) -> Any:
        flat = self._memory.flats[b]
        if self._lossy and not torch.isfinite(flat).all():  # a compressor would hide it and keep it in the residual
            self._nonfinite = True
            flat.nan_to_num_(0.0, 0.0, 0.0)
        if self._nonfinite and b == self._overlapped.bucket[0]:
            self._flags.mark_nonfinite(self._memory.views[0], self._mean)
        return self._exchange.start(b, flat, self._residuals.state[b])

    # ---- the end of a pass

    def finish(self) -> None:
        """End a backward pass: send the remaining buckets, and set gradients to the ranks' mean."""
        self.begun = False
        self._end()

    def adopt(self) -> None:
        """End a pass that began before this reducer existed, or that only other ranks make."""
        self._overlapped.begin()
        if self._weighs_parts:
            self._next_part()
        self._begin_weights()
        self._end()

    @torch.no_grad()
    def abandon(self) -> None:
        """End a pass that failed on this rank, for which the others wait. Raises unless it failed on all ranks."""
        self.begun, self.failed = False, True
        for b in self._memory.flats:
            if b not in self._overlapped.started:
                self._memory.renew(b)  # existing gradients stay unchanged
        self._end(failed=True)

    @torch.no_grad()
    def _end(self, failed: bool = False) -> None:
        views, flats = self._memory.views, self._memory.flats
        if not self._early:
            self._take_weights()
        self._running_stats.look_up()
        early = {i for b in self._overlapped.started for i in self._exchange.buckets[b]}
        late = {i: g for i in early if (g := self._tensors[i].grad) is not None}
        missing = [k for k, (i, p) in enumerate(self._numbered) if p.grad is None and i not in early]
        self.passes += 1
        changed = self._buffers.changed(self.passes, self._check.every) if self._buffers else []
        check = passes.asked() != self._asked
        self._flags.write(missing, bool(late), failed, check, self.average and passes.needs_lengths(), changed)
        if failed:
            views[0].copy_(self._flags.tensor * self._mean)
        last = self._overlapped.bucket[0]  # the flags'
        gradients, state = self._overlapped.finish(last, self._send if failed else None)
        for b, gradient in enumerate(gradients):
            # Compressed exchanges return new tensors; gradients must stay views of the flat one.
            if gradient.data_ptr() != flats[b].data_ptr():
                flats[b].copy_(gradient)
        # All ranks read the same sums, so they all take the same branches below.
        summary = self._flags.summary(views[0])
        # The pass is discarded: gradients of the failed rank are incomplete.
        if summary.failed:
            self._check_failed(failed)
            return
        self._running_stats.add_mean_changes([views[i] for i in range(1, self._first)])
        if summary.nonfinite:
            for flat in flats.values():  # so that all ranks see it and no residual keeps it
                flat.fill_(torch.nan)
        elif self._lossy:
            self._residuals.passed(state)
        self._nonfinite = False
        nowhere = self._flags.absent_everywhere(views[0], missing)
        if summary.late:
            self._once_more(late, set(nowhere))
        else:
            if self.average:  # a sum has no weights, and says nothing of the next mean
                passes.agree_on_lengths(bool(summary.lengths))
            self._end_exchanged(set(nowhere), summary.buffers, bool(summary.check))

    def _end_exchanged(self, nowhere: Collection[int], changed: list[float], check: bool) -> None:
        """Assign the reduced gradients; ``nowhere``: parameters without a gradient on any rank."""
        views = self._memory.views
        for k, (i, p) in enumerate(self._numbered):
            if k not in nowhere and p.grad is not views[i]:
                p.grad = views[i]
        if not self.average:
            self._summed.pass_ended(self._numbered)
        if self._lossy:
            self._use.note([self._first + k for k in nowhere])
        if self._buffers:
            self._buffers.share(changed)
        self.unreduced = self.failed = self._in_parts = False
        self._left = {i: views[i]._version for i, _ in self._numbered} if passes.uneven() else {}
        if self._same_work.left:
            self._same_work.pass_ended()
        self._after_exchange(check)

    def _once_more(self, late: Mapping[int, torch.Tensor], nowhere: Collection[int]) -> None:
        """Exchange again, because a gradient came after its bucket was sent; switch overlap off from now on."""
        self._overlap = self._early = False
        for k, (i, p) in enumerate(self._numbered):
            view = self._memory.views[i]
            if k in nowhere:
                continue
            # ``view`` is the ranks' mean (or sum) of what was sent. Averaging the mean again does not change it; a sum
            # is divided by the number of ranks first, so that summing restores it.
            if i in late:
                view = view * self._mean + late[i] if not self.average else view + late[i]
                p.grad = view
            else:
                p.grad = view if self.average else view * self._mean
        self._end()

    def _check_failed(self, here: bool) -> None:
        """Raise CommunicationError if the pass failed on some ranks, but not on all."""
        # One byte per rank: 1 if the pass failed.
        everyone = self._communicator.allgather_bytes(bytes([here]))
        ranks = [rank for rank, part in enumerate(everyone) if part[0]]
        if len(ranks) < len(everyone):
            what = "an error ended backward() on this rank alone, so the ranks' steps no longer match"
            fix = "let the script end, and mend the error: take smaller batches if memory ran out"
            raise CommunicationError(what, where="backward()", fix=fix, common=True, ranks=ranks)

    def changed(self) -> bool:
        """Return whether the script has changed gradients since their last exchange, in an uneven batch."""
        left = ((self._tensors[i].grad, self._memory.views[i], version) for i, version in self._left.items())
        return any(g is not None and (g is not view or view._version != version) for g, view, version in left)

    def loaded(self, model: torch.nn.Module) -> None:
        """Handle a load of ``model`` on all ranks: its statistics are the new common ones."""
        with torch.no_grad():
            self._running_stats.take_loaded(model)

    # ---- steps

    @torch.no_grad()
    def reduce_manual(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Average the gradients that the script has set itself, before a step."""
        present = [self.index[id(p)] for p in parameters if p.grad is not None]
        members = self._manual.set_by_script(present)
        if not self.average:
            self._summed.check_cleared(present)
        # Once gradients were set by hand, a rank may have none where others have some.
        if not members and self.passes and not self._by_hand:
            return
        if not self.average:
            self._summed.check_replaced(members)
        self._weight = passes.averaged() if self.average else 1.0
        factor = self._mean * self._weight if self.average else 1.0
        lengths = self.average and passes.needs_lengths()
        exchanged, check, lengths = self._manual.reduce(members, factor, passes.asked() != self._asked, lengths)
        if exchanged:
            self._by_hand = True
            self.passes += 1
            if self.average:
                passes.agree_on_lengths(lengths)
            self._after_exchange(check)

    def note_replaced(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Note gradients that the script has set within a step, in a hook: they may differ between ranks."""
        self._replaced = self._replaced or self._manual.replaced([self.index[id(p)] for p in parameters])

    def used(self, optimizer: torch.optim.Optimizer, parameters: Collection[torch.nn.Parameter]) -> None:
        """Record that ``optimizer`` has used the gradients of ``parameters`` in a step."""
        self.steps += 1
        self._manual.used()
        if all(optimizer is not known() for known in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))
        if self.average and not self._lossy:
            return
        members = {self.index[id(p)] for p in parameters}
        self._summed.used(members)
        if self._lossy:
            self._use.used(members)

    def is_stepped_by(self, optimizers: Collection[int]) -> bool:
        """Return whether one of ``optimizers`` (ids) has used gradients of this reducer."""
        return any(id(known()) in optimizers for known in self._optimizers)

    def rescale(self, factor: float) -> None:
        """Scale the residuals for a loss that is ``factor`` times as large from now on."""
        self._residuals.rescale(factor)

    def begin_closure(self) -> None:
        """Begin a closure, whose loss is needed over all ranks."""
        self._of_closure = set()

    def global_loss(self, loss: float, total: Callable[[float], float]) -> float:
        """Return the loss over all ranks' samples. ``total`` sums a number over the ranks."""
        # The ranks' weights differ in the same batches, so all of them see several, or none does.
        if len(self._of_closure) > 1:
            what = "the closure adds up losses of even and uneven batches, in which a rank has different weights"
            fix = "set drop_last=True, or divide sums by ht.sum of the samples, with ht.distribute(average=False)"
            raise ConfigError(what, where="LBFGS", fix=fix, common=True)
        return total(loss * self._weight) * self._mean if self.average else total(loss)

    @torch.no_grad()
    def average_statistics(self) -> None:
        """Average the running statistics of forward passes that no backward pass followed. All ranks call it."""
        communicator, name = self._communicator, f"model{self.number}.statistics"
        self._running_stats.average(
            lambda flat: communicator.synchronize(communicator.allreduce_async(flat, name)), communicator.size
        )

    def share_buffers(self) -> None:
        """Share buffers that changed since the last backward pass, also through ``.data``. All ranks call it."""
        if self._buffers:
            communicator, name = self._communicator, f"model{self.number}.buffers"
            flags = torch.tensor(self._buffers.changed(self.passes, self._check.every, look=True), dtype=torch.float64)
            summed = communicator.synchronize(communicator.allreduce_async(flags, name))
            self._buffers.share(summed.tolist())

    def _after_exchange(self, check: bool) -> None:
        """Record an exchange of gradients. ``check``: whether any rank requests a comparison of weights."""
        passes.exchanged()
        if self._slow:
            self._slow.stepped()
        if check or self._check.due(self.passes - 1, self.passes):
            self.compare()

    def compare(self) -> None:
        """Compare the ranks' weights, if there was a pass since the last comparison; all ranks call it."""
        self._asked = passes.asked()
        if self.passes != self._checked and self._check.every:
            self._checked = self.passes
            self._check.compare(f"backward pass {self.passes} of the model")

    def _checksums(self) -> dict[str, int]:
        weights = dict(zip(self._names, self._parameters, strict=True))
        if self._model:  # also frozen and replaced parameters
            weights |= self._model.named_parameters()
        # Summed on the device and read at once, to synchronize with a GPU only once.
        totals = torch.stack([bits(p).to(self._flags.tensor.device) for p in weights.values()]).tolist()
        return dict(zip(weights, totals, strict=True))

    def _settings(self) -> dict[str, str]:
        settings = {"optimizer steps": str(self.steps), **passes.orders()}
        optimizers = [optimizer for known in self._optimizers if (optimizer := known()) is not None]
        for k, optimizer in enumerate(optimizers):
            for g, group in enumerate(optimizer.param_groups):
                name = type(optimizer).__name__ + f" {k}" * (len(optimizers) > 1)
                name += f", group {g}" * (len(optimizer.param_groups) > 1)
                settings[f"learning rate of {name}"] = rate_of(group)
        return settings
