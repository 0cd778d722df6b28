"""Local training of a PyTorch script: ``ht.distribute(model, optimizer, mode="outer")``, or ``"streaming"``.

``state_dict`` and ``ht.save`` contain the global weights; within ``ht.global_weights`` the model holds them.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from hvd_train.config import ExchangeConfig
from hvd_train.errors import ConfigError
from hvd_train.frontends.base import started_at_once
from hvd_train.frontends.pytorch.eager import eager
from hvd_train.frontends.pytorch.model import PyTorchFrontEnd
from hvd_train.frontends.pytorch.ops import TorchOps
from hvd_train.protocol import Communicator
from hvd_train.script.pytorch import state_bytes
from hvd_train.script.pytorch.frames import is_running
from hvd_train.script.pytorch.options import rate_of
from hvd_train.script.shared.dataloader import passes
from hvd_train.script.shared.local_training import LocalTraining, ScriptWeights, Variable, named
from hvd_train.script.shared.weight_check import WeightCheck

WHERE = "ht.distribute"
# Keys of an optimizer's ``state_dict``: the outer optimizer's state; in a file also the slots of ranks 1, 2, ...
STATE, OTHERS = "outer", "other_ranks"
DIFFER_FIX = "load weights on all ranks, and let no rank decide by its loss or its data alone"


class LocalModel(LocalTraining):
    """Local training of a model and its optimizer; hooks count steps and put the global weights into state dicts."""

    def __init__(
        self,
        model: torch.nn.Module,
        places: Sequence[tuple[torch.nn.Module, str]],
        optimizer: torch.optim.Optimizer,
        options: ExchangeConfig,
        communicator: Communicator,
        *,
        number: int,
        every: int,
    ) -> None:
        """``places``: (layer, name) of the running statistics."""
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._model, self._known = model, {id(p) for p in parameters.values()}
        self._optimizer, self._checked, self._told_of_plain = optimizer, 0, False
        self._frame: Any = None  # of the running step
        self._within_step = 0  # steps within it
        ops = TorchOps(next(iter(parameters.values())).device)
        weights = ScriptWeights(
            [Variable(name, p.detach, partial(_copy, p)) for name, p in parameters.items()],
            ops,
            PyTorchFrontEnd.packing,
            named(communicator, number),
            started_at_once,
        )
        statistics = [
            Variable(f"{k}.{name}", partial(getattr, layer, name), partial(_set, layer, name))
            for k, (layer, name) in enumerate(places)
        ]
        super().__init__(weights, statistics, options, communicator, WHERE)
        self._check = WeightCheck(communicator, every, self.checksums, self._settings, DIFFER_FIX)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.register_state_dict_post_hook(self._add_state)
        optimizer.register_load_state_dict_pre_hook(self._take_state)
        model.register_state_dict_post_hook(_ModelHook(self, self._put_global))
        model.register_load_state_dict_pre_hook(_ModelHook(self, self._before_load))
        model.register_load_state_dict_post_hook(_ModelHook(self, self._loaded))

    # ---- a step

    def trains(self, parameters: Collection[int]) -> bool:
        """Return whether any of these (by ``id``) are trained."""
        return not self._known.isdisjoint(parameters)

    @eager
    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if is_running(self._frame):
            self._within_step += 1
            return
        # A failed step may have left these set.
        self._frame, self._within_step = sys._getframe(1), 0
        self.begin_step()
        late = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        late = [p for p in late if id(p) not in self._known]
        if late:
            what = f"a parameter of shape {tuple(late[0].shape)} is trained since ht.distribute, and never synchronized"
            fix = "set requires_grad before ht.distribute"
            raise ConfigError(what, where=self.where, fix=fix, common=True)

    @eager
    def _after_step(self, *_: Any) -> None:
        if self._within_step:
            self._within_step -= 1
            return
        self._frame = None
        passes.exchanged()
        self.stepped()

    def _after_sync(self) -> None:
        super()._after_sync()
        if self._check.due(self._checked, self.taken):
            self._check.compare(f"step {self.taken} of the model")
        self._checked = self.taken

    def _settings(self) -> dict[str, str]:
        groups = self._optimizer.param_groups
        return {f"learning rate of group {g}": rate_of(group) for g, group in enumerate(groups)}

    # ---- state

    def _put_global(self, module: torch.nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """Replace the entries of a model's ``state_dict`` by copies of the global weights and statistics."""
        if self.within or not self.update.diverged:
            return
        self.warn_if_never_synchronized()
        with self.global_weights():
            tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
            for name, x in tensors:
                if prefix + name in state:
                    state[prefix + name] = x.detach().clone()

    def _before_load(self, *_: Any) -> None:
        """Load the global weights, because weights that are not in the file must be equal on all ranks."""
        self.check_load()
        self.take_global()

    def _loaded(self, *_: Any) -> None:
        self.begin_round()

    def _add_state(self, _: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        state[STATE] = {name: torch.from_numpy(np.array(x)) for name, x in self.state().items()}

    def _take_state(self, _: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        outer = {name: x.cpu().numpy() for name, x in state.get(STATE, {}).items()}
        missing = {name: np.zeros_like(x) for name, x in self.state().items() if name not in outer}
        if missing:
            self.warn_of_plain_state()
        self.load(missing | outer)
        others, rank = state.get(OTHERS, []), self._communicator.rank
        if rank and len(others) == self._communicator.size - 1:  # else all ranks continue with rank 0's slots
            state = state | {"state": others[rank - 1]}
        return {key: value for key, value in state.items() if key not in (STATE, OTHERS)}

    def warn_of_plain_state(self) -> None:
        """Warn once that a loaded optimizer state lacks what local training adds to it."""
        if self._told_of_plain or self._communicator.rank or not self.state():
            return
        self._told_of_plain = True
        what = "the loaded optimizer state is not of local training: the outer momentum begins with zeros"
        fix = "to resume, load the optimizer from a file that ht.save or state_dict() made after ht.distribute"
        warnings.warn(f"{what}, and all ranks with the same state; {self.where}; {fix}", stacklevel=2)

    def state_on_rank_0(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the state, on rank 0 with the slots of all ranks; all ranks call it."""
        # The name appears in the error if a rank does not call it.
        self._communicator.allgather_bytes(b"", "state_of_local_training_which_all_ranks_must_save")
        state = optimizer.state_dict()
        parts = self._communicator.gather_bytes(state_bytes.pack(state["state"]) if self._communicator.rank else b"")
        return state | {OTHERS: [state_bytes.unpack(part) for part in parts[1:]]}


class _ModelHook:
    """A hook of the model, which does nothing in deep copies of it."""

    def __init__(self, training: LocalModel, work: Callable[..., None]) -> None:
        self._training, self._work = training, work

    def __call__(self, module: torch.nn.Module, *arguments: Any) -> None:
        if module is self._training._model:
            self._work(module, *arguments)

    def __deepcopy__(self, _: Any) -> _ModelHook:
        return self

    def __reduce__(self) -> Any:
        if self._training.update.diverged and not self._training.within:
            what = "the pickled model would have this rank's weights"
            fix = "save model.state_dict(), or pickle within ht.global_weights(model)"
            raise ConfigError(what, where=self._training.where, fix=fix)
        return _unhooked, ()


def _nothing(*_: Any) -> None:
    """Replace the hooks in a pickled model."""


def _unhooked() -> Callable[..., None]:
    return _nothing


@torch.no_grad()
def _copy(p: torch.nn.Parameter, x: torch.Tensor) -> None:
    p.copy_(x)


def _set(layer: torch.nn.Module, name: str, x: torch.Tensor) -> None:
    getattr(layer, name).data.copy_(x)  # a retained graph may hold the tensor
