"""LARS and LAMB in both frameworks: the same weights after 50 steps, and a resume that nobody notices."""

from __future__ import annotations

import pytest

from tests.frontends.test_contract import FRAMEWORKS, ROWS, ZOO, batch, close, everything, load, opened, same, stepped

OPTIMIZERS = {
    "lars": {"name": "lars", "momentum": 0.9, "weight_decay": 0.01, "trust_coefficient": 0.02},
    "lamb": {"name": "lamb", "weight_decay": 0.01},
}
RATES = {"lars": 1.0, "lamb": 0.01}
STEPS = 50


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_both_frameworks_agree_over_50_steps_with_warm_up(name):
    model, shape = ZOO["mlp image"]
    trees = []
    for framework in FRAMEWORKS:
        frontend = opened(framework, model, OPTIMIZERS[name], shape=shape)
        before = everything(frontend)
        for k in range(STEPS):
            rate = RATES[name] * min(1.0, (k + 1) / 10)
            frontend.train_step(frontend.to_device(batch(k % 5, shape=shape)), 1 / ROWS, k, rate)
        trees.append(everything(frontend))
    close(*trees, rtol=1e-9)
    assert all((trees[0][k] != before[k]).any() for k in before)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_weights_and_slots_are_all_there_is(framework, name):
    first = stepped(opened(framework, optim=OPTIMIZERS[name]), [batch(k) for k in range(3)], rate=RATES[name])
    slots = {key.split("/")[1] for key in everything(first) if key.startswith("slots/")}
    assert slots == {"lars": {"momentum"}, "lamb": {"exp_avg", "exp_avg_sq", "step"}}[name]
    second = opened(framework, optim=OPTIMIZERS[name])
    load(second, everything(first))
    rest = [batch(k) for k in range(3, 6)]
    assert same(everything(stepped(second, rest, rate=RATES[name])), everything(stepped(first, rest, rate=RATES[name])))
