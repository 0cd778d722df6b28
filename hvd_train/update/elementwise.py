"""Elementwise optimizers, once for every framework, with the formulas of torch.optim.

A formula takes a weight, its gradient and slots (state tensors, all of one shape), the step ``t`` (from 1, float64)
and the learning rate. It returns what to subtract from the weight, then the new slots. ``o`` has the keys of ``optim``.
Weight decay is an L2 term of the gradient, except for adamw, lion and schedule_free_adamw, where it is decoupled.
PyTorch and TensorFlow have kernels for sgd, adam and adamw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hvd_train.config import OptimConfig
from hvd_train.protocol import Ops, Tensor

Slots = Sequence[Tensor]


def sgd(w: Tensor, g: Tensor, slots: Slots, t: Tensor, rate: Tensor, o: OptimConfig, ops: Ops) -> tuple[Tensor, ...]:
    """m = momentum m + g; w -= rate m, or with Nesterov momentum rate (g + momentum m)."""
    g = _decayed(w, g, o)
    if not o.momentum:
        return (rate * g,)
    m = o.momentum * slots[0] + g
    return rate * (g + o.momentum * m if o.nesterov else m), m


def adam(w: Tensor, g: Tensor, slots: Slots, t: Tensor, rate: Tensor, o: OptimConfig, ops: Ops) -> tuple[Tensor, ...]:
    """m, v = running means of g and g^2; w -= rate m' / (sqrt(v') + eps), bias-corrected (Kingma and Ba 2015)."""
    return _adam(_decayed(w, g, o), slots, t, rate, o, ops)


def adamw(w: Tensor, g: Tensor, slots: Slots, t: Tensor, rate: Tensor, o: OptimConfig, ops: Ops) -> tuple[Tensor, ...]:
    """Adam, and w -= rate decay w (Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization")."""
    loss, *means = _adam(g, slots, t, rate, o, ops)
    return loss + rate * o.weight_decay * w, *means


def _adam(g: Tensor, slots: Slots, t: Tensor, rate: Tensor, o: OptimConfig, ops: Ops) -> tuple[Tensor, ...]:
    m = o.betas[0] * slots[0] + (1 - o.betas[0]) * g
    v = o.betas[1] * slots[1] + (1 - o.betas[1]) * g * g
    return rate * m / _number(1 - o.betas[0] ** t, g, ops) / _root(v, o.betas[1], t, o, ops), m, v


def rmsprop(
    w: Tensor, g: Tensor, slots: Slots, t: Tensor, rate: Tensor, o: OptimConfig, ops: Ops
) -> tuple[Tensor, ...]:
    """v = alpha v + (1 - alpha) g^2; w -= rate g / (sqrt(v) + eps), or with momentum m = momentum m + that quotient.

    Tieleman and Hinton 2012, lecture 6.5 of "Neural Networks for Machine Learning".
    """
    g = _decayed(w, g, o)
    v = o.alpha * slots[0] + (1 - o.alpha) * g * g
    u = g / (v**0.5 + o.eps)
    if not o.momentum:
        return rate * u, v
    m = o.momentum * slots[1] + u
    return rate * m, v, m


def adagrad(
    w: Tensor, g: Tensor, slots: Slots, t: Tensor, rate: Tensor, o: OptimConfig, ops: Ops
) -> tuple[Tensor, ...]:
    """s += g^2; w -= rate g / (sqrt(s) + eps) (Duchi, Hazan and Singer 2011)."""
    g = _decayed(w, g, o)
    s = slots[0] + g * g
    return rate * g / (s**0.5 + o.eps), s


# NAdam's momentum at step t is beta1 (1 - 0.96^(DECAY t) / 2).
DECAY = 0.004


def nadam(w: Tensor, g: Tensor, slots: Slots, t: Tensor, rate: Tensor, o: OptimConfig, ops: Ops) -> tuple[Tensor, ...]:
    """Adam with Nesterov momentum (Dozat 2016, "Incorporating Nesterov Momentum into Adam")."""
    g, (beta1, beta2) = _decayed(w, g, o), o.betas
    m = beta1 * slots[0] + (1 - beta1) * g
    v = beta2 * slots[1] + (1 - beta2) * g * g
    now, following = (beta1 * (1 - 0.5 * 0.96 ** (DECAY * at)) for at in (t, t + 1))
    product = beta1**t * _growth(t, ops)  # of the momenta up to this step
    share, share_of_next = (
        _number((1 - now) / (1 - product), g, ops),
        _number(following / (1 - product * following), g, ops),
    )
    return rate * (share * g + share_of_next * m) / _root(v, beta2, t, o, ops), m, v


def _growth(t: Tensor, ops: Ops) -> Tensor:
    """Return the product of 1 - q^i / 2 over i = 1 ... t, q = 0.96^DECAY, in 64 bits.

    Its logarithm is -sum over k of (sum over i of q^(i k)) / (2^k k), where the inner sum is geometric. So the
    product need not be stored from step to step.
    """
    k = np.arange(1, 55)  # 2^-55 is below the last bit
    weights = ops.from_numpy(-(0.5**k) / k * _power(k) / (1 - _power(k)))
    parts = weights * (1 - ops.from_numpy(_power(k)) ** t)
    return math.e ** ops.sum(parts, 0)


def _power(k: np.ndarray) -> np.ndarray:
    return 0.96 ** (DECAY * k)


def radam(w: Tensor, g: Tensor, slots: Slots, t: Tensor, rate: Tensor, o: OptimConfig, ops: Ops) -> tuple[Tensor, ...]:
    """Adam without second moments in the first, noisy steps (Liu et al. 2020, "On the Variance of ...")."""
    g, (beta1, beta2) = _decayed(w, g, o), o.betas
    m = beta1 * slots[0] + (1 - beta1) * g
    v = beta2 * slots[1] + (1 - beta2) * g * g
    most = 2 / (1 - beta2) - 1
    length = most - 2 * t * beta2**t / (1 - beta2**t)  # steps that the mean of squares effectively covers
    known = length > 5
    length = ops.where(known, length, 6.0)
    rectified = ((length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length)) ** 0.5
    # As in torch: eps is added before bias correction.
    factor = _number(ops.where(known, rectified, 0.0) * (1 - beta2**t) ** 0.5, g, ops)
    plain = _number(1 - ops.cast(known, "float64"), g, ops)
    return rate * _number(1 / (1 - beta1**t), g, ops) * m * (factor / (v**0.5 + o.eps) + plain), m, v


def lion(w: Tensor, g: Tensor, slots: Slots, t: Tensor, rate: Tensor, o: OptimConfig, ops: Ops) -> tuple[Tensor, ...]:
    """w -= rate (sign(beta1 m + (1 - beta1) g) + decay w); m = beta2 m + (1 - beta2) g (Chen et al. 2023)."""
    (m,) = slots
    u = o.betas[0] * m + (1 - o.betas[0]) * g
    sign = ops.cast(u > 0, ops.dtype(g)) - ops.cast(u < 0, ops.dtype(g))
    return rate * (sign + o.weight_decay * w), o.betas[1] * m + (1 - o.betas[1]) * g


def schedule_free_sgd(
    w: Tensor, g: Tensor, slots: Slots, t: Tensor, rate: Tensor, o: OptimConfig, ops: Ops
) -> tuple[Tensor, ...]:
    """z -= rate g; the model holds y. ScheduleFree (update/schedule_free.py) explains both, and passes ``rate``."""
    return _between(_decayed(w, g, o), slots[0], rate, o, ops)


def schedule_free_adamw(
    w: Tensor, g: Tensor, slots: Slots, t: Tensor, rate: Tensor, o: OptimConfig, ops: Ops
) -> tuple[Tensor, ...]:
    """z -= rate (g / (sqrt(v') + eps) + decay y), v' = the bias-corrected mean of g^2."""
    v = o.betas[1] * slots[1] + (1 - o.betas[1]) * g * g
    u = _decayed(w, g / _root(v, o.betas[1], t, o, ops), o)
    return *_between(u, slots[0], rate, o, ops), v


def _between(u: Tensor, d: Tensor, rate: Tensor, o: OptimConfig, ops: Ops) -> tuple[Tensor, Tensor]:
    """Return the decrease of y, and d = z - y, where z -= r u, x = (1 - c) x + c z, y = (1 - beta) z + beta x.

    ``rate`` is (r, c, 1) times the parameter group's factor on r. From these three equations follow
    y += c d - r (1 - beta (1 - c)) u and d = (1 - c) (d - beta r u), so d begins with zeros.
    """
    r, c, beta = rate[0], rate[1] / rate[2], o.betas[0]
    return r * (1 - beta * (1 - c)) * u - c * d, (1 - c) * (d - beta * r * u)


def _decayed(w: Tensor, g: Tensor, o: OptimConfig) -> Tensor:
    return g + o.weight_decay * w if o.weight_decay else g


def _root(v: Tensor, beta: float, t: Tensor, o: OptimConfig, ops: Ops) -> Tensor:
    """Return the square root of the bias-corrected mean of squares, plus eps."""
    return (v / _number(1 - beta**t, v, ops)) ** 0.5 + o.eps


def _number(x: Tensor, like: Tensor, ops: Ops) -> Tensor:
    """Cast a float64 number to the type of ``like``. (1 - beta^t would cancel in 32 bits.)"""
    return ops.cast(x, ops.dtype(like))
