"""PyTorch's optimizers, and layer-wise ones, over flat buckets."""

from __future__ import annotations

from typing import Any

import torch

from hvd_train.config import Config
from hvd_train.frontends.pytorch.buckets import Flat
from hvd_train.frontends.pytorch.ops import TorchOps
from hvd_train.update import optimizers as formulas


class _Layerwise(torch.optim.Optimizer):
    """An optimizer whose norms belong to tensors: it sees each bucket's views. Slots lie flat, as the buckets do."""

    slot_names: tuple[str, ...] = ()

    def __init__(self, options, flats, ops) -> None:
        super().__init__([flat.weight for flat in flats], {"lr": options.lr})
        self.options, self.flats, self.ops = options, flats, ops
        for flat in flats:
            self.state[flat.weight].update({slot: torch.zeros_like(flat.weight) for slot in self.slot_names})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for flat in self.flats:
            state = self.state[flat.weight]
            if "step" in state:
                state["step"] += 1
            flats = [flat.weight.data, flat.weight.grad, *(state[slot] for slot in self.slot_names)]
            for w, g, *slots in zip(*(flat.views(x) for x in flats), strict=True):
                step, *new = self.update(w, g, slots, state)
                w.sub_(step)
                for slot, value in zip(slots, new, strict=True):
                    slot.copy_(value)

    def update(self, w, g, slots, state) -> tuple[torch.Tensor, ...]:
        """(what the weight loses, new slots)."""
        raise NotImplementedError


class LARS(_Layerwise):
    slot_names = ("momentum_buffer",)

    def update(self, w, g, slots, state) -> tuple[torch.Tensor, ...]:
        (m,) = slots
        return formulas.lars(w, g, m, self.param_groups[0]["lr"], self.options, self.ops)


class LAMB(_Layerwise):
    slot_names = ("exp_avg", "exp_avg_sq")

    def __init__(self, options, flats, ops) -> None:
        super().__init__(options, flats, ops)
        for flat in flats:
            self.state[flat.weight]["step"] = torch.zeros((), dtype=torch.float32, device=flat.weight.device)

    def update(self, w, g, slots, state) -> tuple[torch.Tensor, ...]:
        m, v = slots
        t = state["step"].double()
        return formulas.lamb(w, g, m, v, t, self.param_groups[0]["lr"], self.options, self.ops)


LAYERWISE = {"lars": LARS, "lamb": LAMB}


def _spare_the_compiler() -> None:
    """torch's optimizers load torch's compiler only to switch it off for themselves: 75 MB and 1.3 s of every rank.

    Told that this is done, they do not. A torch that keeps the mark elsewhere loads it as before.
    """
    for method in vars(torch.optim.Optimizer).values():
        own = getattr(method, "__wrapped__", None)
        if own is not None and not hasattr(own, "__dynamo_disable"):
            own.__dict__["__dynamo_disable"] = own


def make_optimizer(config: Config, flats: list[Flat]) -> torch.optim.Optimizer:
    """torch's own optimizers are the reference formulas. Slots are made at once, so that every checkpoint has them."""
    _spare_the_compiler()
    o, weights = config.optim, [flat.weight for flat in flats]
    if o.name in LAYERWISE:
        return LAYERWISE[o.name](o, flats, TorchOps(weights[0].device))
    if o.name == "sgd":
        kind: type[torch.optim.Optimizer] = torch.optim.SGD
        options: dict[str, Any] = {"momentum": o.momentum, "nesterov": o.nesterov}
        slots = ["momentum_buffer"] if o.momentum else []
    else:
        kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[o.name]
        options, slots = {"betas": o.betas, "eps": o.eps}, ["exp_avg", "exp_avg_sq"]
    optimizer = kind(weights, lr=o.lr, weight_decay=o.weight_decay, fused=True, **options)
    for weight in weights:
        optimizer.state[weight].update({slot: torch.zeros_like(weight) for slot in slots})
        if o.name != "sgd":
            optimizer.state[weight]["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
    return optimizer


# torch's slot names -> neutral ones
SLOTS = {"momentum_buffer": "momentum", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
