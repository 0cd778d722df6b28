"""Training without a schedule: the recursion of Defazio et al. and their package, in NumPy and in both frameworks."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from hvd_train.config import OptimConfig, load_config
from hvd_train.config.optimizers import OPTIMIZERS
from hvd_train.errors import ConfigError
from hvd_train.update.averaged_update import AveragedUpdate
from hvd_train.update.schedule_free import OFFSET, ScheduleFree
from tests.frontends.test_contract import ALL, FRAMEWORKS, batch, opened, same, stepped, weights
from tests.numpy_frontend import NumpyOps

OPTIONS = {
    "sgd": OptimConfig(name="schedule_free_sgd", weight_decay=0.01),
    "adamw": OptimConfig(name="schedule_free_adamw", betas=[0.95, 0.99], weight_decay=0.1),
}
# A warm-up, a drop, and a step of rate 0, whose mean moves by its share as that of any other.
RATES = (0.02, 0.05, 0.1, 0.1, 0.04, 0.0, 0.04, 0.07)


def reference(options, y, gradients, rates):
    """(y, x) after all steps, as the package schedulefree has it: y.lerp_(z, c); y += r (beta (1 - c) - 1) u."""
    z, v, total, beta = y.copy(), np.zeros_like(y), 0.0, options.betas[0]
    for k, (g, r) in enumerate(zip(gradients, rates, strict=True)):
        largest = max(rates[: k + 1])
        total += largest**2
        c = largest**2 / total
        if options.name.endswith("adamw"):
            v = options.betas[1] * v + (1 - options.betas[1]) * g * g
            g = g / (np.sqrt(v / (1 - options.betas[1] ** (k + 1))) + options.eps)
        u = g + options.weight_decay * y
        y = y + c * (z - y) + r * (beta * (1 - c) - 1) * u
        z = z - r * u
    return y, y + (1 - 1 / beta) * (z - y)


class Moved:
    """An optimizer of one flat bucket."""

    def __init__(self, framework, options, y):
        self.framework, self.options, self.row, self.t = framework, options, OPTIMIZERS[options.name], 0
        if framework == "numpy":
            self.ops, self.y = NumpyOps(), y.copy()
            self.slots = [np.zeros_like(y) for _ in self.row.slots]
        elif framework == "pytorch":
            import torch

            from hvd_train.frontends.pytorch.ops import TorchOps
            from hvd_train.frontends.pytorch.optimizers import make_kernel

            self.ops, self.y, self.steps = TorchOps(torch.device("cpu")), torch.tensor(y), [torch.zeros(())]
            self.kernel = make_kernel(options, self.ops)
            self.slots = [torch.zeros_like(self.y) for _ in self.kernel.slots]
        else:
            pytest.importorskip("torch")  # torch before TensorFlow, as the ranks load them
            import tensorflow as tf

            from hvd_train.frontends.tensorflow.ops import TensorFlowOps
            from hvd_train.frontends.tensorflow.optimizers import make_kernel

            self.ops, self.y, self.kernel = TensorFlowOps(), tf.Variable(y), make_kernel(options)
            self.slots = [tf.Variable(tf.zeros_like(self.y)) for _ in self.kernel.slots]

    def step(self, gradients, rate):
        self.t += 1
        if self.framework == "numpy":
            t = np.float64(self.t)
            loss, *self.slots = self.row.formula(self.y, gradients[0], self.slots, t, rate, self.options, self.ops)
            self.y = self.y - loss
        elif self.framework == "pytorch":
            self.kernel([self.y], gradients, [[slot] for slot in self.slots], self.steps, rate)
        else:
            import tensorflow as tf

            self.kernel(self.y, gradients[0], self.slots, tf.constant(self.t, tf.int64), rate)

    def slot(self, name, bucket):
        x = self.slots[self.row.slots.index(name)]
        return x.value() if self.framework == "tensorflow" else x

    def read(self):
        return [self.weights(0)]

    def weights(self, bucket):
        return self.y.value() if self.framework == "tensorflow" else self.y


@pytest.mark.parametrize("framework", ALL)
@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_the_reference(framework, name):
    rng = np.random.default_rng(0)
    y, gradients = rng.normal(size=101), rng.normal(size=(len(RATES), 101))
    inner = Moved(framework, OPTIONS[name], y)
    update = SimpleNamespace(frontend=inner, optimizer=inner, update_weights=inner.step, owned=inner)
    made = ScheduleFree(update, beta=OPTIONS[name].betas[0])
    for g, rate in zip(gradients, RATES, strict=True):
        made.step([inner.ops.from_numpy(g)], rate)
    for found, expected in zip(
        (inner.weights(0), made.global_weights()[0]), reference(OPTIONS[name], y, gradients, RATES), strict=True
    ):
        np.testing.assert_allclose(inner.ops.to_numpy(found), expected, rtol=1e-10, atol=1e-12)


def test_a_step_of_rate_0_at_the_start_moves_nothing_and_a_factor_on_the_rate_leaves_the_mean_as_it_is():
    y, g = np.ones(5), np.full(5, 0.5)
    inner = Moved("numpy", OPTIONS["sgd"], y)
    inner.step([g], np.array([0.0, 0.0, 1.0]))
    assert (inner.y == y).all() and not inner.slots[0].any()
    several = [Moved("numpy", OPTIONS["sgd"], y) for _ in range(2)]
    several[0].step([g], np.array([0.1, 0.25, 1.0]) * 3)
    several[1].step([g], np.array([0.3, 0.25, 1.0]))
    np.testing.assert_allclose(several[0].y, several[1].y, rtol=1e-14)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_training_goes_on_with_the_bits_that_it_had(framework):
    frontend = opened(framework, optim={"name": "schedule_free_sgd", "lr": 0.1})
    update = AveragedUpdate(frontend.update, partial(ScheduleFree, beta=0.9), frontend)
    stepped(frontend, [batch(k) for k in range(3)])
    before, buckets = weights(frontend), range(len(update.buckets))
    expected = [
        y - (1 / 0.9 - 1) * frontend.update.optimizer.slot(OFFSET, b) for b, y in enumerate(frontend.flat_weights())
    ]
    expected = [frontend.ops.to_numpy(x) for x in expected]
    update.take_global_weights()
    assert update.has_global_weights and not same(weights(frontend), before)
    for b in buckets:
        np.testing.assert_allclose(frontend.ops.to_numpy(frontend.flat_weights()[b]), expected[b], rtol=1e-14)
    update.take_local_weights()
    assert same(weights(frontend), before) and not update.has_global_weights


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["optim.betas=[0, 0.9]"], "optim.betas: schedule_free_sgd needs a first one > 0"),
        (
            ["optim.momentum=0.9"],
            "optim.momentum: belongs to name: sgd or lars or rmsprop or muon, not schedule_free_sgd",
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused(keys, words):
    with pytest.raises(ConfigError) as raised:
        load_config(None, ["optim.name=schedule_free_sgd", *keys])
    assert words in str(raised.value)
