"""Optimizer kernels: torch's fused classes bit for bit, and over a part of a bucket what they are over all of it."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_train.config import OptimConfig
from tests.frontends.test_contract import FRAMEWORKS

OPTIONS = {
    "sgd": OptimConfig(name="sgd", weight_decay=0.01),
    "momentum": OptimConfig(name="sgd", momentum=0.9, weight_decay=0.01),
    "nesterov": OptimConfig(name="sgd", momentum=0.9, nesterov=True),
    "adam": OptimConfig(name="adam", weight_decay=0.01),
    "adamw": OptimConfig(name="adamw", weight_decay=0.01),
}
RATES = (0.1, 0.03, 0.2)


def drawn(dtype, length=1003):
    """(weights, a gradient for each step)."""
    rng = np.random.default_rng(0)
    return rng.normal(size=length).astype(dtype), [rng.normal(size=length).astype(dtype) for _ in RATES]


def moved_by_pytorch(options, weight, gradients):
    import torch

    from hvd_train.frontends.pytorch.ops import TorchOps
    from hvd_train.frontends.pytorch.optimizers import KERNELS

    kernel, w = KERNELS[options.name](options, TorchOps(torch.device("cpu"))), torch.tensor(weight)
    slots, steps = [[torch.zeros_like(w)] for _ in kernel.slots], [torch.zeros(())]
    for g, rate in zip(gradients, RATES, strict=True):
        kernel([w], [torch.tensor(g)], slots, steps, rate)
    return w.numpy(), [slot.numpy() for (slot,) in slots]


def moved_by_tensorflow(options, weight, gradients):
    pytest.importorskip("torch")  # torch before TensorFlow, as the ranks load them
    import tensorflow as tf

    from hvd_train.frontends.tensorflow.optimizers import KERNELS

    kernel, w = KERNELS[options.name](options), tf.Variable(weight)
    slots = [tf.Variable(tf.zeros_like(w)) for _ in kernel.slots]
    for step, (g, rate) in enumerate(zip(gradients, RATES, strict=True), 1):
        kernel(w, tf.constant(g), slots, tf.constant(step, tf.int64), tf.constant(rate, w.dtype))
    return w.numpy(), [slot.numpy() for slot in slots]


MOVED = {"pytorch": moved_by_pytorch, "tensorflow": moved_by_tensorflow}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", OPTIONS)
def test_pytorch_kernels_have_the_bits_of_torchs_fused_optimizers(name, dtype):
    import torch

    o = OPTIONS[name]
    weight, gradients = drawn(dtype)
    p = torch.nn.Parameter(torch.tensor(weight))
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[o.name]
    keys = {"momentum": o.momentum, "nesterov": o.nesterov} if o.name == "sgd" else {"betas": o.betas, "eps": o.eps}
    optimizer = kind([p], lr=0.1, weight_decay=o.weight_decay, fused=True, **keys)
    for g, rate in zip(gradients, RATES, strict=True):
        p.grad = torch.tensor(g)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    assert (moved_by_pytorch(o, weight, gradients)[0] == p.detach().numpy()).all()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_part_of_a_bucket_moves_as_the_whole_does(framework, name):
    weight, gradients = drawn("float64")
    whole, slots = MOVED[framework](OPTIONS[name], weight, gradients)
    cut = slice(250, 700)
    part, part_slots = MOVED[framework](OPTIONS[name], weight[cut], [g[cut] for g in gradients])
    for a, b in zip([part, *part_slots], [whole, *slots], strict=True):  # fused kernels round a vector's tail otherwise
        np.testing.assert_allclose(a, b[cut], rtol=1e-14, atol=1e-17)
