"""A torch optimizer of the user on parameters and gradients that are views of flat buckets."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from hvd_train.config import OptimConfig
from hvd_train.errors import ConfigError
from hvd_train.frontends.named_arrays import TensorLayout
from hvd_train.frontends.pytorch.buckets import Flat
from hvd_train.frontends.pytorch.ops import TorchOps
from hvd_train.frontends.pytorch.optimizers import FlatOptimizer, FlatWeights, array_of
from hvd_train.frontends.user_optimizer import build_optimizer

PREFIX = "slots/torch"
STEPS = f"{PREFIX}/steps"


class UserOptimizer(FlatWeights):
    """``optim.name: package.module:function``. The schedule sets the first group's rate; the others keep their ratio.

    A checkpoint has its state by parameter name, in torch's shapes: ``slots/torch/PARAMETER/STATE``.
    """

    def __init__(self, options: OptimConfig, flats: list[Flat], layouts: Mapping[str, TensorLayout]) -> None:
        self._flats, self._home = flats, flats[0].weight.device
        self._where = f"optim.name: {options.name}"
        moved = {n: p for flat in flats for n, p in zip(flat.names, flat.parameters, strict=True)}
        # In the model's order, which the user's function may rely on; buckets begin with the model's last parameters.
        self._parameters = {n: moved[n] for n in layouts if n in moved}
        names = [layouts[n].name for n in self._parameters]
        self.optimizer = build_optimizer(options, list(self._parameters.values()), names, torch.optim.Optimizer)
        groups = self.optimizer.param_groups
        known = {id(p) for p in self._parameters.values()}
        if strange := [p for group in groups for p in group["params"] if id(p) not in known]:
            what = f"the optimizer moves {len(strange)} tensors that are not among the parameters"
            raise ConfigError(
                what, where=self._where, fix="give it the parameters that the function gets, or some of them"
            )
        if "lr" not in groups[0] or any(isinstance(group["lr"], torch.Tensor) for group in groups):
            what = "the optimizer has no learning rate that is a number"
            raise ConfigError(what, where=self._where, fix="give it lr as a number, which optim.schedule then sets")
        if _wants_closure(self.optimizer):
            what = f"{type(self.optimizer).__name__} computes the loss several times a step (closure)"
            raise ConfigError(what, where=self._where, fix="take an optimizer whose step needs no closure")
        first = groups[0]["lr"] or 1.0
        self._factors = [group["lr"] / first for group in groups]
        self._steps = 0
        # {parameter: {state: tensor}} that the optimizer's constructor makes, as Adagrad's does.
        self._first = {p: {key: _copied(x) for key, x in state.items()} for p, state in self.optimizer.state.items()}
        # {parameter: {state: a tensor of its shape and type}}.
        self._kinds = self._try()

    def _try(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the state that a step would make, as zeros. Optimizer and weights do not change."""
        for name, x in vars(self.optimizer).items():
            if isinstance(x, torch.optim.Optimizer) and x.state is not self.optimizer.state:
                self._refuse(f"'{name}' is an optimizer with slots and rates of its own")
        before = [flat.weight.clone() for flat in self._flats]
        options = [_options(group) for group in self.optimizer.param_groups]
        attributes = _attributes(self.optimizer)
        for p in self._parameters.values():
            p.grad = torch.zeros_like(p)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        try:
            self.optimizer.step()
        except Exception as error:
            what = f"the optimizer's step failed: {type(error).__name__}: {' '.join(str(error).split())}"
            raise ConfigError(what, where=self._where) from error
        kinds: dict[str, dict[str, torch.Tensor]] = {}
        for name, p in self._parameters.items():
            state = {key: x for key, x in self.optimizer.state.get(p, {}).items() if x is not None}
            for key, x in state.items():
                if not isinstance(x, torch.Tensor):
                    self._refuse(f"'{key}' of {name} is a {type(x).__name__}")
            kinds[name] = {key: torch.zeros_like(x) for key, x in state.items()}
            p.grad = None
        lost = self.optimizer.state.keys() - set(self._parameters.values())
        for group, old in zip(self.optimizer.param_groups, options, strict=True):
            changed = [key for key, x in _options(group).items() if key != "lr" and old.get(key) != x]
            if changed:
                self._refuse(f"'{changed[0]}' of its groups changes with the steps")
            group["lr"] = old["lr"]
        if lost:
            self._refuse("it keeps state that belongs to no parameter")
        if _attributes(self.optimizer) != attributes:
            self._refuse("its attributes change with the steps")
        for flat, weight in zip(self._flats, before, strict=True):
            flat.take_back()
            flat.weight.copy_(weight)
        self._begin()
        return kinds

    def _begin(self) -> None:
        """Give the optimizer the state that it has before its first step."""
        self.optimizer.state.clear()
        for p, state in self._first.items():
            self.optimizer.state[p] = {key: _copied(x) for key, x in state.items()}

    def _refuse(self, what: str) -> None:
        what = (
            f"the slots of {type(self.optimizer).__name__} are not tensors of its parameters, so no checkpoint: {what}"
        )
        raise ConfigError(what, where=self._where, fix="keep tensors in state[parameter], as torch's optimizers do")

    @torch.no_grad()
    def step(self, gradients: Sequence[torch.Tensor], learning_rate: float) -> None:
        for flat, gradient in zip(self._flats, gradients, strict=True):
            for p, g in zip(flat.parameters, flat.views(gradient), strict=True):
                p.grad = g
        for group, factor in zip(self.optimizer.param_groups, self._factors, strict=True):
            group["lr"] = learning_rate * factor
        if not self._steps:  # the checkpoint is from before the first step, which makes the state
            self._begin()
        self.optimizer.step()
        for flat in self._flats:
            flat.take_back()
        self._steps += 1

    # ---- state

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (key, tensor of the state); zeros before the first step, which makes the state."""
        for name, p in self._parameters.items():
            state = self.optimizer.state.get(p, {})
            for key, zeros in self._kinds[name].items():
                yield f"{PREFIX}/{name}/{key}", state.get(key, zeros)

    def views(self) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
        yield STEPS, lambda: np.array(self._steps, np.int64)
        for key, x in self._tensors():
            yield key, partial(array_of, x)

    def load(self, tree: Mapping[str, np.ndarray]) -> None:
        """Assign slots by these names; others do not change."""
        self._steps = int(tree.get(STEPS, self._steps))
        for name, p in self._parameters.items():
            for key, zeros in self._kinds[name].items():
                array = tree.get(f"{PREFIX}/{name}/{key}")
                if array is not None:
                    state = self.optimizer.state[p]
                    state[key] = state.get(key, zeros.clone())
                    state[key].copy_(torch.from_numpy(np.asarray(array)))


def _wants_closure(optimizer: torch.optim.Optimizer) -> bool:
    parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: x for key, x in group.items() if key not in ("params", "param_names")}


def _copied(x: Any) -> Any:
    return x.clone() if isinstance(x, torch.Tensor) else x


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the attributes that may change during training: numbers, strings, arrays, lists and dicts of these."""
    known = ("param_groups", "state", "defaults")
    return {n: _described(x) for n, x in vars(optimizer).items() if n not in known and not n.startswith("_opt")}


def _described(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return tuple(x.shape), x.detach().cpu().double().numpy().tobytes()
    if isinstance(x, np.ndarray):
        return x.shape, x.tobytes()
    if isinstance(x, dict):
        return [(id(key) if isinstance(key, torch.Tensor) else repr(key), _described(y)) for key, y in x.items()]
    if isinstance(x, list | tuple):
        return [_described(value) for value in x]
    return repr(x) if isinstance(x, int | float | str | bool) else None


def flat_optimizer(
    options: OptimConfig, flats: list[Flat], layouts: dict[str, TensorLayout], ops: TorchOps
) -> FlatOptimizer | UserOptimizer:
    """Make the optimizer that ``optim.name`` names."""
    if options.is_users:
        return UserOptimizer(options, flats, layouts)
    return FlatOptimizer(options, flats, layouts, ops)
