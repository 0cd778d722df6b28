"""The learning rate against its formulas, on a grid."""

from __future__ import annotations

import math

import pytest

from hvd_train.config import OptimConfig
from hvd_train.config.schedules import SCHEDULES
from hvd_train.core.learning_rate import FORMULAS, Schedule, scale
from hvd_train.errors import ConfigError

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
    options = {"step": {"step_size": 1.5, "gamma": 0.5}, "exponential": {"gamma": 0.5}}.get(kind, {})
    s = schedule(schedule=kind, **options, **warmup)
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
    for options in ({"schedule": "step", "gamma": 0.01, "step_size": 1}, {"schedule": "exponential", "gamma": 0.01}):
        s = schedule(**options, min_lr=0.02)
        assert min(s.rate(k) for k in range(TOTAL)) >= 0.02
    assert schedule(schedule="cosine", min_lr=0.02).rate(TOTAL + 5) == pytest.approx(0.02)


def test_a_rise_of_one_step_begins_at_the_top():
    s = Schedule(OptimConfig(lr=0.1, schedule="one_cycle", rise=0.1), 64, STEPS, 10)
    rates = [s.rate(k) for k in range(10)]
    assert rates[0] == 0.1 and rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("parts", [1, 3, 7, 24])  # tenths of an epoch
@pytest.mark.parametrize("per_epoch", [5, 10, 12, 30])
def test_a_fraction_of_an_epoch_ends_at_its_step(parts, per_epoch):
    """3 of 5 steps are 0.6, of which 0.1 goes 5.99... times: the drop came a step late."""
    every = parts / 10
    steps = [step for step in range(12 * per_epoch) if step * 10 % (parts * per_epoch) == 0]
    dropped = Schedule(OptimConfig(lr=1.0, schedule="step", step_size=every, gamma=0.5), 8, per_epoch, 12 * per_epoch)
    restarted = Schedule(OptimConfig(lr=1.0, schedule="cosine_restarts", period=every), 8, per_epoch, 12 * per_epoch)
    for step in steps:
        assert dropped.rate(step) == 0.5 ** (step * 10 // (parts * per_epoch)), step
        assert restarted.rate(step) == 1.0, step


def test_a_longer_warmup_than_training():
    s = schedule(schedule="cosine", warmup_steps=100)
    assert all(0 < s.rate(k) <= 0.1 for k in range(TOTAL))


TORCH = {
    "step": (dict(schedule="step", step_size=2, gamma=0.3), "StepLR", dict(step_size=2 * STEPS, gamma=0.3)),
    "multistep": (
        dict(schedule="multistep", milestones=[1, 2.5, 4], gamma=0.3),
        "MultiStepLR",
        dict(milestones=[10, 25, 40], gamma=0.3),
    ),
    "exponential": (
        dict(schedule="exponential", gamma=0.9, schedule_unit="steps"),
        "ExponentialLR",
        dict(gamma=0.9),
    ),
    "cosine": (dict(schedule="cosine", min_lr=0.02), "CosineAnnealingLR", dict(T_max=TOTAL, eta_min=0.02)),
    "cosine_restarts": (
        dict(schedule="cosine_restarts", period=7, period_factor=2, schedule_unit="steps", min_lr=0.01),
        "CosineAnnealingWarmRestarts",
        dict(T_0=7, T_mult=2, eta_min=0.01),
    ),
    "linear": (dict(schedule="linear"), "LinearLR", dict(start_factor=1, end_factor=0, total_iters=TOTAL)),
    "polynomial": (dict(schedule="polynomial", power=2.5), "PolynomialLR", dict(total_iters=TOTAL, power=2.5)),
    "one_cycle": (
        dict(schedule="one_cycle", rise=0.4, start_divisor=10, end_divisor=100),
        "OneCycleLR",
        dict(max_lr=0.1, total_steps=TOTAL, pct_start=0.4, div_factor=10, final_div_factor=100, cycle_momentum=False),
    ),
}


@pytest.mark.parametrize("name", TORCH)
def test_the_rates_are_those_of_torch(name):
    torch = pytest.importorskip("torch")

    ours, kind, options = TORCH[name]
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    theirs = getattr(torch.optim.lr_scheduler, kind)(optimizer, **options)
    rates = []
    for _ in range(TOTAL):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    assert [schedule(**ours).rate(k) for k in range(TOTAL)] == pytest.approx(rates, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("warmup", [0, 7])
def test_inverse_square_root_is_that_of_the_transformer(warmup):
    """Vaswani et al. 2017, equation 3, scaled to the base rate at the end of the warm-up."""
    s, w = schedule(schedule="inverse_sqrt", warmup_steps=warmup), max(warmup, 1)
    for step in range(TOTAL):
        n = step + 1
        assert s.rate(step) == pytest.approx(0.1 * math.sqrt(w) * min(n**-0.5, n * w**-1.5), rel=1e-12)


def test_every_name_has_a_formula():
    assert list(FORMULAS) == list(SCHEDULES)


@pytest.mark.parametrize("kind", sorted(SCHEDULES))
@pytest.mark.parametrize("total", [1, 2, 3, 57])
@pytest.mark.parametrize("unit", ["steps", "epochs"])
def test_every_schedule_gives_a_rate_for_every_step(kind, total, unit):
    options = {"milestones": [1.0, 3.0]} if kind == "multistep" else {}
    s = Schedule(OptimConfig(lr=0.1, schedule=kind, schedule_unit=unit, **options), 64, STEPS, total)
    rates = [s.rate(k) for k in range(total + 5)]
    assert all(0 <= rate <= 0.1 and math.isfinite(rate) for rate in rates), rates


def halves(step, steps_per_epoch):
    return 0.5 ** (step // steps_per_epoch)


def broken(step, total_steps):
    return 1 / (total_steps - step - 20)


@pytest.mark.parametrize("warmup", [0, 7])
def test_a_function_of_the_user_gives_the_factor(warmup):
    s = schedule(schedule=f"{__name__}:halves", warmup_steps=warmup)
    assert [s.rate(warmup + k) for k in (0, 9, 10, 25)] == pytest.approx([0.1, 0.1, 0.05, 0.025])


def test_a_function_that_fails_is_named():
    s = schedule(schedule=f"{__name__}:broken")
    with pytest.raises(ConfigError, match="the function gives -.* at step 40"):
        s.rate(40)
    with pytest.raises(ConfigError, match="failed at step 37: ZeroDivisionError") as raised:
        s.rate(37)
    assert raised.value.where == f"optim.schedule: {__name__}:broken" and "step=" in raised.value.fix
    with pytest.raises(ConfigError, match="has no function 'missing'"):
        schedule(schedule=f"{__name__}:missing").rate(0)


def test_what_lies_behind_the_end_is_noted():
    """57 steps of 10 an epoch are 5.7 epochs."""
    assert schedule(schedule="multistep", milestones=[2.0, 5.0]).notes() == []
    (note,) = schedule(schedule="multistep", milestones=[2.0, 6.0, 8.0]).notes()
    assert note == "note: optim.schedule multistep: epochs 6, 8 are not before the end of the training, 5.7"
    (note,) = schedule(schedule="step", schedule_unit="steps", step_size=60.0).notes()
    assert "steps 60" in note
    (note,) = schedule(warmup_steps=60).notes()
    assert note == "note: the warm-up takes 60 steps, and the training 57"
