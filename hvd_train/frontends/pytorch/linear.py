"""Faster linear layers on AMD's processors: oneDNN computes the float32 products of large ones, instead of MKL.

PyTorch takes MKL's, which on these processors run without AVX-512: a product of 64 x 2048 and 2048 x 2048 numbers takes
2.0 times as long (AMD EPYC, one core, torch 2.13).
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

STANDS_IN_FOR = "torch.nn.modules.linear"  # an error within is one of the user's layer, see config/user_code
CPUINFO = Path("/proc/cpuinfo")
SMALLEST = 4_000_000  # multiplications of a layer: below, what a call costs is more than what it gains
WEIGHTS = 1 << 14  # of a layer that is looked at: 200 layers of 64 x 64 lost 2 % of their speed by more questions


@cache
def helps() -> bool:
    """Return whether oneDNN's products are faster here than PyTorch's own."""
    try:
        amd = re.search(r"^vendor_id\s*: AuthenticAMD$", CPUINFO.read_text(), re.MULTILINE)
    except OSError:
        return False
    there = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return bool(amd) and there and torch.backends.cpu.get_cpu_capability() == "AVX512"


def take() -> None:
    """Let the linear layers of this process take oneDNN's products, where these are faster.

    The class has another ``forward`` from now on, so that layers, their copies and their pickles stay PyTorch's.
    """
    if helps():
        torch.nn.Linear.forward = forward


def forward(self: torch.nn.Linear, input: torch.Tensor) -> torch.Tensor:
    if torch.jit.is_scripting():
        return linear(input, self.weight, self.bias)
    if self.in_features * self.out_features < WEIGHTS:
        return linear(input, self.weight, self.bias)
    return _of_large_layer(self, input)


def _of_large_layer(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    weight, bias = layer.weight, layer.bias
    if not _plain(x, weight) or layer.out_features * x.numel() < SMALLEST:
        return linear(x, weight, bias)
    # In two axes, as of more oneDNN gives a view, which operations in place (ReLU(inplace=True)) may not change.
    product = _Product.apply(x.reshape(-1, layer.in_features), weight, bias)
    return product.view(*x.shape[:-1], layer.out_features)


def _plain(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether this is float32 on a CPU, without tracing, autocast, torch.func and forward-mode gradients."""
    if type(x) is not torch.Tensor or type(weight) not in (torch.nn.Parameter, torch.Tensor):
        return False
    if not all(t.dtype == torch.float32 and t.is_cpu and t.layout == torch.strided for t in (x, weight)):
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
