"""Layer-wise optimizers on flat buckets: norms belong to tensors, so these see each bucket's views."""

from __future__ import annotations

import torch

from hvd_train.core import optimizers as formulas


class _Layerwise(torch.optim.Optimizer):
    """Slots lie flat, as the buckets do, and are made at once."""

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
