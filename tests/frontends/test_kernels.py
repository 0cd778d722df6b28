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
FUSED = dict(OPTIONS)
# Of which torch has a class, with the arguments that it takes.
CLASSES = {
    "momentum": (OPTIONS["momentum"], "SGD", {"momentum": 0.9}),
    "nesterov": (OPTIONS["nesterov"], "SGD", {"momentum": 0.9, "nesterov": True}),
    "adam": (OptimConfig(name="adam", eps=0.01, betas=[0.8, 0.95]), "Adam", {"eps": 0.01, "betas": (0.8, 0.95)}),
    "adamw": (OptimConfig(name="adamw", eps=1e-3, weight_decay=0.1), "AdamW", {"eps": 1e-3}),
    "rmsprop": (OptimConfig(name="rmsprop", alpha=0.9, weight_decay=0.01), "RMSprop", {"alpha": 0.9, "eps": 1e-8}),
    "rmsprop momentum": (OptimConfig(name="rmsprop", momentum=0.8), "RMSprop", {"alpha": 0.99, "momentum": 0.8}),
    "adagrad": (OptimConfig(name="adagrad", eps=1e-10, weight_decay=0.01), "Adagrad", {"eps": 1e-10}),
    "nadam": (OptimConfig(name="nadam", weight_decay=0.01), "NAdam", {}),
    "radam": (OptimConfig(name="radam", betas=[0.8, 0.9], weight_decay=0.01), "RAdam", {"betas": (0.8, 0.9)}),
}
OPTIONS |= {name: options for name, (options, _, _) in CLASSES.items()}
OPTIONS["lion"] = OptimConfig(name="lion", betas=[0.9, 0.99], weight_decay=0.01)
RATES = (0.1, 0.03, 0.2)


def drawn(dtype, length=1003, steps=3):
    """(weights, a gradient for each step)."""
    rng = np.random.default_rng(0)
    return rng.normal(size=length).astype(dtype), [rng.normal(size=length).astype(dtype) for _ in range(steps)]


def moved_by_pytorch(options, weight, gradients, rates=RATES):
    import torch

    from hvd_train.frontends.pytorch.ops import TorchOps
    from hvd_train.frontends.pytorch.optimizers import make_kernel

    kernel, w = make_kernel(options, TorchOps(torch.device("cpu"))), torch.tensor(weight)
    slots, steps = [[torch.zeros_like(w)] for _ in kernel.slots], [torch.zeros(())]
    for g, rate in zip(gradients, rates, strict=True):
        kernel([w], [torch.tensor(g)], slots, steps, rate)
    return w.numpy(), [slot.numpy() for (slot,) in slots]


def moved_by_tensorflow(options, weight, gradients, rates=RATES):
    pytest.importorskip("torch")  # torch before TensorFlow, as the ranks load them
    import tensorflow as tf

    from hvd_train.frontends.tensorflow.optimizers import make_kernel

    kernel, w = make_kernel(options), tf.Variable(weight)
    slots = [tf.Variable(tf.zeros_like(w)) for _ in kernel.slots]
    for step, (g, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        kernel(w, tf.constant(g), slots, tf.constant(step, tf.int64), tf.constant(rate, w.dtype))
    return w.numpy(), [slot.numpy() for slot in slots]


MOVED = {"pytorch": moved_by_pytorch, "tensorflow": moved_by_tensorflow}


MANY = tuple(0.01 * (1 + k % 3) for k in range(30))


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", CLASSES)
def test_formulas_are_those_of_torchs_classes(framework, name):
    """Over 30 steps: radam changes its formula after some, and nadam's momentum grows."""
    import torch

    options, kind, keys = CLASSES[name]
    weight, gradients = drawn("float64", 101, len(MANY))
    p = torch.nn.Parameter(torch.tensor(weight))
    optimizer = getattr(torch.optim, kind)([p], lr=0.1, weight_decay=options.weight_decay, **keys)
    for g, rate in zip(gradients, MANY, strict=True):
        p.grad = torch.tensor(g)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    moved, _ = MOVED[framework](options, weight, gradients, MANY)
    # torch keeps the product of nadam's momenta in 32 bits.
    limits = {"rtol": 1e-6, "atol": 1e-8} if name == "nadam" else {"rtol": 1e-11, "atol": 1e-13}
    np.testing.assert_allclose(moved, p.detach().numpy(), **limits)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_nadam_is_that_of_its_paper(framework):
    weight, gradients = drawn("float64", 101, len(MANY))
    w, m, v, product = weight.copy(), 0.0, 0.0, 1.0
    for t, (g, rate) in enumerate(zip(gradients, MANY, strict=True), 1):
        now, following = (0.9 * (1 - 0.5 * 0.96 ** (0.004 * at)) for at in (t, t + 1))
        product *= now
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        mean = (1 - now) * g / (1 - product) + following * m / (1 - product * following)
        w -= rate * mean / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    moved, _ = MOVED[framework](OptimConfig(name="nadam"), weight, gradients, MANY)
    np.testing.assert_allclose(moved, w, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_lion_is_that_of_its_paper(framework):
    weight, gradients = drawn("float64", 101)
    w, m = weight.copy(), np.zeros_like(weight)
    for g, rate in zip(gradients, RATES, strict=True):
        w -= rate * (np.sign(0.9 * m + 0.1 * g) + 0.01 * w)
        m = 0.99 * m + 0.01 * g
    moved, (slot,) = MOVED[framework](OPTIONS["lion"], weight, gradients)
    np.testing.assert_allclose(moved, w, rtol=1e-13)
    np.testing.assert_allclose(slot, m, rtol=1e-13, atol=1e-16)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", FUSED)
def test_pytorch_kernels_have_the_bits_of_torchs_fused_optimizers(name, dtype):
    import torch

    o = FUSED[name]
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
