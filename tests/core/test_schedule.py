"""The learning rate against its formulas, on a grid."""

from __future__ import annotations

import math

import pytest

from hvd_train.config import OptimConfig
from hvd_train.core.schedule import Schedule, scale

STEPS, TOTAL = 10, 57


def schedule(**keys):
    return Schedule(OptimConfig(lr=0.1, **keys), 64, STEPS, TOTAL)


@pytest.mark.parametrize(("rule", "factor"), [("none", 1), ("linear", 4), ("sqrt", 2)])
def test_scaling_by_the_global_batch(rule, factor):
    assert scale(OptimConfig(lr_scaling=rule, lr_reference_batch=64), 256) == factor
    assert Schedule(OptimConfig(lr=0.1, lr_scaling=rule, lr_reference_batch=64), 256, STEPS, TOTAL).rate(
        0
    ) == pytest.approx(0.1 * factor)


@pytest.mark.parametrize("kind", ["constant", "step", "cosine", "exponential"])
@pytest.mark.parametrize("warmup", [{}, {"warmup_steps": 7}, {"warmup_epochs": 0.5}, {"warmup_epochs": 2.0}])
def test_warmup_then_schedule(kind, warmup):
    s = schedule(schedule=kind, step_size=1.5, gamma=0.5, **warmup)
    w = warmup.get("warmup_steps") or round(warmup.get("warmup_epochs", 0) * STEPS)
    assert s.warmup_steps == w
    for step in range(w):
        assert s.rate(step) == pytest.approx(0.1 * (step + 1) / w)
    for step in range(w, TOTAL):
        t = step - w
        expected = {
            "constant": 0.1,
            "step": 0.1 * 0.5 ** (t // 15),
            "cosine": 0.1 * (1 + math.cos(math.pi * t / (TOTAL - w))) / 2,
            "exponential": 0.1 * 0.5 ** (t / STEPS),
        }[kind]
        assert s.rate(step) == pytest.approx(expected, rel=1e-12)


def test_never_below_the_lowest_rate():
    for kind in ("step", "cosine", "exponential"):
        s = schedule(schedule=kind, gamma=0.01, step_size=1, min_lr=0.02)
        assert min(s.rate(k) for k in range(TOTAL)) >= 0.02
    assert schedule(schedule="cosine", min_lr=0.02).rate(TOTAL + 5) == pytest.approx(0.02)


def test_a_longer_warmup_than_training():
    s = schedule(schedule="cosine", warmup_steps=100)
    assert all(0 < s.rate(k) <= 0.1 for k in range(TOTAL))
