"""The test whether an optimizer is elementwise: a copy of it steps on whole tensors and on their parts."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvd_train.errors import ConfigError
from hvd_train.script.shared.elementwise import SCALES, SHAPES, STEPS

TOLERANCE = 1e-11  # in float64, relative and of weights and slots near 0
FIX = "leave sharded=True out, or take an elementwise optimizer, such as SGD, Adam, AdamW, RMSprop or Adagrad"
ALL = range(len(SHAPES))
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)

trying: list[torch.optim.Optimizer] = []  # copies under test, whose steps do not count


def numbers_of(optimizer: torch.optim.Optimizer, where: str) -> frozenset[str]:
    """Return the names of state that is one number per tensor, such as Adam's ``step``; other state is slots.

    Raises ConfigError if a step on parts of tensors differs from a step on whole tensors.
    """
    kind = type(optimizer).__name__
    _check_attributes(optimizer, kind, where)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    device = parameters[0].device if parameters else torch.device("cpu")
    # The whole tensor, then the flat parts of the first and of the second rank.
    cuts = [lambda x: x, lambda x: x.reshape(-1)[: x.numel() // 2], lambda x: x.reshape(-1)[x.numel() // 2 :]]
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            whole, *parts = [_trained(optimizer, part_of, device) for part_of in cuts]
            rests = [_trained(optimizer, cuts[0], device, kept) for kept in (ALL[1:], ALL[:-1])]
    except Exception as error:
        what = f"{kind} cannot be divided: a step on parts of tensors fails ({' '.join(str(error).split())})"
        raise ConfigError(what, where=where, fix=FIX) from error
    # ``whole``: {"weight": ..., name: ...} for each tensor; a part has the same names.
    numbers = frozenset(name for state in whole for name, x in state.items() if not _is_slot(x, state["weight"]))
    for state, *of_parts in zip(whole, *parts, strict=True):
        for name, x in state.items():
            if any(part.keys() != state.keys() for part in of_parts) or not _same(x, [p[name] for p in of_parts]):
                what = f"{kind} cannot be divided: a step on parts of tensors differs from the whole ('{name}')"
                raise ConfigError(f"{what}, so its formula is not elementwise", where=where, fix=FIX)
    # A rank has no part of some tensors, so that others have another place in their group.
    for kept, rest in zip((ALL[1:], ALL[:-1]), rests, strict=True):
        same_ones = [state for k, state in enumerate(whole) if k % len(ALL) in kept]
        for state, other in zip(same_ones, rest, strict=True):
            if state.keys() != other.keys() or not all(_same(x, [other[name]]) for name, x in state.items()):
                what = f"{kind} cannot be divided: a step on a tensor depends on its place in the group"
                raise ConfigError(what, where=where, fix=FIX)
    return numbers


def lists_by_parameter(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> list[str]:
    """Return the keys of a group's lists that hold a value for each of its parameters, as ``param_names`` does."""
    count = len(group["params"])
    lists = [key for key, value in group.items() if isinstance(value, list) and key != "params" and len(value) == count]
    return [key for key in lists if key not in optimizer.defaults]


def _check_attributes(optimizer: torch.optim.Optimizer, kind: str, where: str) -> None:
    """Raise ConfigError for optimizers with other attributes than groups and slots, such as wrappers, or with extra
    methods, such as ``eval`` of schedule-free ones: outside a step the slots are not under the user's parameters."""
    known = vars(torch.optim.SGD([torch.zeros(1)], lr=0.1)).keys() | {"step"}  # which a scheduler sets
    for name, value in vars(optimizer).items():
        if name not in known and not _is_plain(value):
            what = f"{kind} cannot be divided: it keeps '{name}' ({type(value).__name__}) beside its groups and slots"
            raise ConfigError(what, where=where, fix=FIX)
    if not type(optimizer).__module__.startswith("torch.optim."):
        methods = [name for name in dir(optimizer) if not name.startswith("_") and not hasattr(torch.optim.SGD, name)]
        if called := [name for name in methods if callable(getattr(optimizer, name))]:
            what = f"{kind} cannot be divided: its method '{called[0]}' may need whole slots"
            raise ConfigError(what, where=where, fix=FIX)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return all(map(_is_plain, value)) if isinstance(value, list | tuple) else isinstance(value, PLAIN)


def _trained(
    optimizer: torch.optim.Optimizer,
    part_of: Callable[[torch.Tensor], torch.Tensor],
    device: torch.device,
    kept: Sequence[int] = ALL,
) -> list[dict[str, Any]]:
    """Take a few steps with a copy of the optimizer on parts of tensors; return {name: value} for each tensor.

    ``kept``: the numbers of the tensors that each group has.
    """
    clone, groups = object.__new__(type(optimizer)), list[dict[str, Any]]()
    weights: list[tuple[int, torch.Tensor]] = []  # with their numbers over all groups
    state: defaultdict[Any, dict] = defaultdict(dict)
    for group in optimizer.param_groups:
        known = next((p for p in group["params"] if p.dim() and p in optimizer.state), None)
        options = {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
        for name in lists_by_parameter(optimizer, group):
            options[name] = [options[name][k % len(group["params"])] for k in kept]
        if "lr" in options:  # a warm-up may begin with 0, which would hide all differences
            options["lr"] = torch.full_like(options["lr"], 0.01) if isinstance(options["lr"], torch.Tensor) else 0.01
        shapes = [(k, SHAPES[k]) for k in kept]
        tensors = [torch.nn.Parameter(part_of(_numbers(shape, k, device)).clone()) for k, shape in shapes]
        if known is not None:
            state.update({x: _like(optimizer.state[known], known, x) for x in tensors})
        groups.append(options | {"params": tensors})
        weights += [((len(groups) - 1) * len(SHAPES) + k, x) for (k, _), x in zip(shapes, tensors, strict=True)]
    for name, value in vars(optimizer).items():
        hooks = isinstance(value, OrderedDict) and name.startswith("_optimizer_")
        if name not in ("state", "param_groups", "step"):
            clone.__dict__[name] = OrderedDict() if hooks else copy.deepcopy(value)
    clone.__dict__.update(state=state, param_groups=groups)
    trying.append(clone)
    try:
        for step in range(STEPS):
            for k, x in weights:
                gradient = _numbers(SHAPES[k % len(SHAPES)], 7 * step + k + 3, device) * SCALES[step % len(SCALES)]
                x.grad = part_of(gradient).clone()
            type(clone).step(clone)
    finally:
        trying.remove(clone)
    return [{"weight": x.detach(), **clone.state.get(x, {})} for _, x in weights]


def _numbers(shape: tuple[int, ...], seed: int, device: torch.device) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(1.0, count + 1, dtype=torch.float64, device=device) * (seed + 1.5)).reshape(shape)


def _like(state: dict[str, Any], known: torch.Tensor, x: torch.Tensor) -> dict[str, Any]:
    """Make state for ``x`` from that of ``known``: slots filled with their first entry, and its numbers."""
    slots = {name: v for name, v in state.items() if _is_slot(v, known)}
    filled = {name: torch.full_like(x, v.flatten()[0].item(), dtype=v.dtype) for name, v in slots.items()}
    return copy.deepcopy({name: v for name, v in state.items() if name not in slots}) | filled


def _is_slot(value: Any, weight: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == weight.shape


def _same(whole: Any, parts: list[Any]) -> bool:
    """Return whether ``parts`` join to ``whole``, or all equal it if it is a number."""
    if not isinstance(whole, torch.Tensor):
        return _is_plain(whole) and all(part == whole for part in parts)
    if whole.numel() == 1:
        return all(torch.equal(part, whole) for part in parts)
    joined = torch.cat([part.reshape(-1) for part in parts])
    return joined.shape == (whole.numel(),) and torch.allclose(
        joined, whole.reshape(-1), rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True
    )
