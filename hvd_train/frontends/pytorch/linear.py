"""Large linear layers on AMD's processors: float32 matrix products by oneDNN instead of MKL.

PyTorch takes MKL's, which on these processors run without AVX-512: a product of 64 x 2048 and 2048 x 2048 numbers takes
2.0 times as long (AMD EPYC, one core, torch 2.13).
"""

from __future__ import annotations

import copyreg
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch

CPUINFO = Path("/proc/cpuinfo")
SMALLEST = 4_000_000  # multiplications of a layer: below, what a call costs is more than what it gains
WEIGHTS = 1 << 14  # of a layer that is looked at: 200 layers of 64 x 64 lost 2 % of their speed by the question alone


@cache
def helps() -> bool:
    """Return whether oneDNN's products are faster here than PyTorch's own."""
    try:
        amd = re.search(r"^vendor_id\s*: AuthenticAMD$", CPUINFO.read_text(), re.MULTILINE)
    except OSError:
        return False
    there = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return bool(amd) and there and torch.backends.cpu.get_cpu_capability() == "AVX512"


def prepare(model: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Let the model's linear layers of 32 bits on a CPU take oneDNN's products."""
    if device.type == "cpu" and dtype == torch.float32 and helps():
        for layer in model.modules():
            if type(layer) is torch.nn.Linear and layer.weight.numel() >= WEIGHTS:
                layer.__class__ = Linear


class Linear(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.out_features * input.numel() < SMALLEST or not _plain(input, self.weight):
            return super().forward(input)
        # In two axes, as of more oneDNN gives a view, which operations in place (ReLU(inplace=True)) may not change.
        product = _Product.apply(input.reshape(-1, self.in_features), self.weight, self.bias)
        return product.view(*input.shape[:-1], self.out_features)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy the layer as a torch.nn.Linear."""
        return copyreg._reconstructor, (torch.nn.Linear, object, None), self.__dict__  # type: ignore[attr-defined]


def _plain(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether this is an ordinary float32 pass: not traced, no autocast, torch.func or forward-mode gradient."""
    if x.dtype != torch.float32 or weight.dtype != torch.float32 or type(x) is not torch.Tensor:
        return False
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active()
    return not traced and not torch.is_autocast_enabled("cpu") and torch.autograd.forward_ad._current_level < 0


def _times(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return the product of x (n, k) and the transposed weight (m, k), plus the bias (m,), as (n, m)."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.with_bias = bias is not None
        return _times(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        # Within autograd.grad(create_graph=True) PyTorch's own products are taken, whose gradients it knows.
        times = torch.nn.functional.linear if torch.is_grad_enabled() else _times
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            times(gradient, weight.t()) if of_x else None,
            times(gradient.t(), x.t()) if of_weight else None,
            gradient.sum(0) if of_bias and ctx.with_bias else None,
        )
