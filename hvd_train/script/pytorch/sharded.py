"""Sharding of a user's optimizer: each rank keeps the slots of its part of the weights (ZeRO, stage 1).

All ranks still have whole gradients, so a script may change them before the step. During ``optimizer.step()`` the
groups hold flat pieces of the parameters, which share their memory; then the ranks gather the weights. At all other
times the groups hold the user's parameters, and ``state_dict`` returns whole slots.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar

import torch

from hvd_train.errors import ConfigError
from hvd_train.frontends.pytorch.eager import eager
from hvd_train.frontends.pytorch.model import PyTorchFrontEnd
from hvd_train.frontends.pytorch.ops import TorchOps
from hvd_train.protocol import Communicator, TensorSpec
from hvd_train.script.pytorch import state_bytes
from hvd_train.script.pytorch.elementwise import lists_by_parameter
from hvd_train.script.pytorch.frames import is_running
from hvd_train.update.buckets import plan
from hvd_train.update.sharded import part_sizes, pieces

WHERE = "ht.distribute(sharded=True)"


def flat(x: torch.Tensor) -> torch.Tensor:
    """View a dense tensor as (n,), in memory order."""
    return x.detach().as_strided((x.numel(),), (1,))


@dataclass
class Piece:
    """The entries [first, last) of a parameter's memory that this rank updates."""

    parameter: torch.nn.Parameter
    first: int
    last: int
    layout: tuple[Any, ...]
    tensor: torch.nn.Parameter  # (last - first,), a view of the parameter, under which the optimizer keeps slots

    @classmethod
    def of(cls, parameter: torch.nn.Parameter, first: int, last: int) -> Piece:
        return cls(parameter, first, last, layout_of(parameter), torch.nn.Parameter(flat(parameter)[first:last]))

    def check(self) -> None:
        """Raise ConfigError if the parameter's type, device or memory layout has changed."""
        if layout_of(self.parameter) != self.layout:
            what = f"a parameter of shape {tuple(self.parameter.shape)} has changed its type, device or memory format"
            fix = "call model.to(...) before ht.distribute"
            raise ConfigError(what, where=WHERE, fix=fix, common=True)

    def refresh(self) -> torch.nn.Parameter:
        """Point the piece to the parameter's current memory and gradient; return its tensor."""
        p = self.parameter
        gradient: Any = p.grad
        if gradient.stride() != p.stride():
            gradient = torch.empty_like(p).copy_(gradient)
        self.tensor.data = flat(p)[self.first : self.last]
        self.tensor.grad = flat(gradient)[self.first : self.last]
        return self.tensor

    def part_of(self, slot: torch.Tensor) -> torch.Tensor:
        """Copy this piece of a slot, (last - first,)."""
        laid = slot
        if slot.stride() != self.parameter.stride():
            laid = torch.empty_like(self.parameter, dtype=slot.dtype, requires_grad=False).copy_(slot)
        return flat(laid)[self.first : self.last].clone()


def layout_of(p: torch.Tensor) -> tuple[Any, ...]:
    """Return the properties that must not change while an optimizer is sharded."""
    return p.dtype, p.device, p.shape, p.stride()


@dataclass
class Bucket:
    """Parameters whose new values are gathered together."""

    name: str
    pieces: list[Piece]

    def part(self) -> torch.Tensor:
        """Return this rank's part of the bucket, (n,)."""
        moved = [flat(piece.parameter)[piece.first : piece.last] for piece in self.pieces if piece.last > piece.first]
        return moved[0] if len(moved) == 1 else torch.cat(moved or [flat(self.pieces[0].parameter)[:0]])

    def take(self, weights: torch.Tensor) -> None:
        """Set the parameters from the whole bucket, (n,)."""
        parts = torch.split(weights, [piece.parameter.numel() for piece in self.pieces])
        torch._foreach_copy_([flat(piece.parameter) for piece in self.pieces], list(parts))


class PieceState(defaultdict):
    """An optimizer's state by piece. Raises ConfigError for a whole parameter, whose state this rank does not have.

    A plain defaultdict would return a new, empty state, and changes by a script would have no effect.
    """

    def __init__(self, pieces: Mapping[int, Piece], state: Mapping[Any, Any]) -> None:
        super().__init__(dict, state)
        self._of_parameters = pieces

    def _check(self, key: Any) -> None:
        if id(key) in self._of_parameters:
            what = f"optimizer.state of a parameter of shape {tuple(key.shape)}: this rank has at most a part of it"
            fix = "change what optimizer.state_dict() gives on all ranks, and load it with load_state_dict"
            fix += "; or loop over optimizer.state.values(), the pieces"
            raise ConfigError(what, where=WHERE, fix=fix, common=True)

    def __getitem__(self, key: Any) -> Any:
        self._check(key)
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._check(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        self._check(key)
        super().__delitem__(key)

    def __contains__(self, key: Any) -> bool:
        self._check(key)
        return super().__contains__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self._check(key)
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        self._check(key)
        return super().pop(key, *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        self._check(key)
        return super().setdefault(key, default)

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())


class ShardedStep:
    """The sharding of one optimizer's steps and state. ``numbers``: names of its state that are not slots."""

    _count: ClassVar = count()

    def __init__(self, optimizer: torch.optim.Optimizer, communicator: Communicator, numbers: frozenset[str]) -> None:
        self._communicator, self._numbers = communicator, numbers
        self._number = next(self._count)  # equal on all ranks, which distribute in the same order
        self._pieces: dict[int, Piece] = {}  # by parameter's id
        self._buckets: list[Bucket] = []
        self._depth = 0  # of nested steps (super().step())
        self._frame: Any = None  # of the outermost step
        # The user's lists of each group, while groups hold pieces, and the places of these pieces in them.
        self._groups: list[dict[str, list[Any]]] = []
        self._places: list[list[int]] = []
        self._moved: set[int] = set()  # ids of parameters that the step updates
        self._state: Any = None  # this rank's, while ``state_dict`` reads whole slots
        self._everywhere = True  # whether ``state_dict`` has whole slots on all ranks, or only on rank 0
        self._before = optimizer.register_step_pre_hook(self._enter)
        self._after = optimizer.register_step_post_hook(self._leave)
        optimizer.register_state_dict_pre_hook(self._gather_slots)
        optimizer.register_state_dict_post_hook(self._part_again)
        optimizer.register_load_state_dict_post_hook(self._divide)
        self._divide(optimizer)

    # ---- the division of entries among ranks

    def _plan(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide new parameters, group by group, so that every rank has a part of each group."""
        rank, size = self._communicator.rank, self._communicator.size
        for group in optimizer.param_groups:
            new = [p for p in group["params"] if id(p) not in self._pieces]
            for p in new:
                if torch.empty_like(p).stride() != p.stride():
                    what = f"a parameter of shape {tuple(p.shape)} is not contiguous in memory"
                    raise ConfigError(what, where=WHERE, fix="make it contiguous before ht.distribute", common=True)
            specs = [TensorSpec(str(k), tuple(p.shape), TorchOps(p.device).dtype(p)) for k, p in enumerate(new)]
            for members in plan(specs, PyTorchFrontEnd.packing):
                sizes = [specs[k].size for k in members]
                parts = part_sizes(sum(sizes), size)
                bounds = pieces(sizes, sum(parts[:rank]), sum(parts[: rank + 1]))
                made = [Piece.of(new[k], *edges) for k, edges in zip(members, bounds, strict=True)]
                self._pieces.update({id(piece.parameter): piece for piece in made})
                self._buckets.append(Bucket(f"optimizer{self._number}.weights{len(self._buckets)}", made))

    # ---- a step

    def place_hooks(self, optimizer: torch.optim.Optimizer) -> None:
        """Run our hooks last before a step and first after it, so that the user's hooks see whole parameters."""
        optimizer._optimizer_step_pre_hooks.move_to_end(self._before.id)
        optimizer._optimizer_step_post_hooks.move_to_end(self._after.id, last=False)

    @eager
    def _enter(self, optimizer: torch.optim.Optimizer, arguments: tuple, keywords: dict[str, Any]) -> Any:
        if self._depth and not is_running(self._frame):
            # Its groups still hold pieces with old gradients, so later steps would be wrong.
            what = "an error has ended the last optimizer.step(), which may have updated a part of the weights"
            raise ConfigError(what, where=WHERE, fix="end the script, and resume from its last checkpoint")
        self._depth += 1
        if self._depth > 1:
            return None
        self._frame, self._moved = sys._getframe(1), set()
        self._plan(optimizer)
        if not isinstance(optimizer.state, PieceState):
            self._divide(optimizer)  # the script has replaced it
        closure = keywords.get("closure", arguments[1] if len(arguments) > 1 else None)
        if closure is None:
            self._put_pieces(optimizer)
            return None
        whole = self._around(optimizer, closure)
        if "closure" in keywords:
            return arguments, keywords | {"closure": whole}
        return (arguments[0], whole, *arguments[2:]), keywords

    def _around(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap a closure, which needs the user's parameters in the groups; afterwards the groups hold pieces again."""

        def whole_closure() -> Any:
            self._take_back(optimizer)
            try:
                return closure()
            except BaseException:
                self._depth = 0
                raise
            finally:
                if self._depth:
                    self._put_pieces(optimizer)

        return whole_closure

    @torch.no_grad()
    def _put_pieces(self, optimizer: torch.optim.Optimizer) -> None:
        held = [
            {"params": list(group["params"]), **{key: group[key] for key in lists_by_parameter(optimizer, group)}}
            for group in optimizer.param_groups
        ]
        for piece in self._pieces.values():  # also for empty pieces, so that all ranks raise
            piece.check()
        self._groups, self._places = held, []
        for group, whole in zip(optimizer.param_groups, held, strict=True):
            mine = [(k, self._pieces[id(p)]) for k, p in enumerate(whole["params"]) if p.grad is not None]
            self._moved.update(id(piece.parameter) for _, piece in mine)
            there = [(k, piece.refresh()) for k, piece in mine if piece.last > piece.first]
            for key, values in whole.items():
                group[key] = [tensor if key == "params" else values[k] for k, tensor in there]
            self._places.append([k for k, _ in there])

    def _take_back(self, optimizer: torch.optim.Optimizer) -> None:
        for group, held, places in zip(optimizer.param_groups, self._groups, self._places, strict=False):
            # A reference to a gradient's memory would make the next exchange allocate new memory.
            for tensor in group["params"]:
                tensor.grad = None
            for key, values in held.items():
                if key != "params":  # the step may have changed them
                    for k, value in zip(places, group[key], strict=False):
                        values[k] = value
            group.update(held)
        self._groups = []

    @property
    def stepping(self) -> bool:
        """Return whether a step is running."""
        return self._depth > 0

    @eager
    def _leave(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._depth -= 1
        if not self._depth:
            self._frame = None
            if not self._groups:
                fix = "call optimizer.step() without a closure"
                raise ConfigError("the step did not call its closure", where=WHERE, fix=fix, common=True)
            self._take_back(optimizer)
            self._gather()

    @torch.no_grad()
    def _gather(self) -> None:
        """Gather the updated weights. One bucket is in flight while the one before is copied."""
        under_way: tuple[Bucket, Any] | None = None
        for bucket in self._buckets:
            # A frozen parameter may still have a gradient, and torch's optimizers then update it.
            if not any(p.requires_grad or id(p) in self._moved for p in (piece.parameter for piece in bucket.pieces)):
                continue
            handle = self._communicator.allgather_async(bucket.part(), bucket.name)
            self._receive(under_way)
            under_way = bucket, handle
        self._receive(under_way)

    def _receive(self, under_way: tuple[Bucket, Any] | None) -> None:
        if under_way:
            bucket, handle = under_way
            bucket.take(self._communicator.synchronize(handle))

    # ---- state

    def state_on_rank_0(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the state, with whole slots only on rank 0; all ranks call it."""
        self._everywhere = False
        try:
            return optimizer.state_dict()
        finally:
            self._everywhere = True

    @torch.no_grad()
    def _divide(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace whole slots by this rank's pieces."""
        self._plan(optimizer)
        divided: dict[Any, Any] = {}
        for key, state in optimizer.state.items():
            if id(key) not in self._pieces:
                divided[key] = state
            elif (piece := self._pieces[id(key)]).last > piece.first:
                divided[piece.tensor] = {
                    name: piece.part_of(x) if self._is_slot(name, x) and x.shape == key.shape else x
                    for name, x in state.items()
                }
        optimizer.state = PieceState(self._pieces, divided)

    def _is_slot(self, name: str, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and name not in self._numbers

    def _gather_slots(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace pieces by whole slots, for ``state_dict``; all ranks call it."""
        # The name appears in the error if a rank does not call it.
        self._communicator.allgather_bytes(b"", "slots_of_a_sharded_optimizer_which_all_ranks_must_save")
        tensors = [p for group in optimizer.param_groups for p in group["params"]]
        local = {
            k: optimizer.state[piece.tensor]
            for k, p in enumerate(tensors)
            if (piece := self._pieces.get(id(p))) and piece.tensor in optimizer.state
        }
        parts = [state_bytes.unpack(data) for data in self._communicator.gather_bytes(state_bytes.pack(local))]
        whole = {k: self._whole(p, [part[k] for part in parts if k in part]) for k, p in enumerate(tensors)}
        whole = {k: state for k, state in whole.items() if state}
        if self._everywhere:
            data = self._communicator.broadcast_bytes(state_bytes.pack(whole) if parts else b"")
            whole = whole or state_bytes.unpack(data)
        others = {key: x for key, x in optimizer.state.items() if not isinstance(key, torch.Tensor)}
        self._state, optimizer.state = optimizer.state, defaultdict(dict, others)
        for k, state in whole.items():
            optimizer.state[tensors[k]] = state

    def _whole(self, p: torch.Tensor, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Join the state of ``p`` from its pieces, in rank order."""
        return dict(self._joined(p, parts)) if parts else {}

    def _joined(self, p: torch.Tensor, parts: Sequence[dict[str, Any]]) -> Iterator[tuple[str, Any]]:
        for name, x in parts[0].items():
            slots = [part[name] for part in parts] if self._is_slot(name, x) else []
            if sum(slot.numel() for slot in slots) == p.numel():
                whole = torch.empty_like(p, dtype=x.dtype, device="cpu", requires_grad=False)
                flat(whole).copy_(torch.cat([slot.reshape(-1) for slot in slots]))
                yield name, whole
            else:
                yield name, x

    def _part_again(self, optimizer: torch.optim.Optimizer, _: Any) -> None:
        optimizer.state, self._state = self._state, None
