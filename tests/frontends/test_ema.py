"""The mean of the weights in both frameworks is that of torch's AveragedModel and of Keras' use_ema."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import hvd_train
from hvd_train.errors import ConfigError
from hvd_train.update.averaged_update import AveragedUpdate
from hvd_train.update.ema import ExponentialMean
from hvd_train.update.replicated import TRAINING
from tests.frontends.test_contract import FRAMEWORKS, batch, opened, same, stepped, weights
from tests.frontends.test_initial_weights import run as train
from tests.update.test_parameter_groups import DATA

DECAY, STEPS = 0.9, 6


def trained(framework, every=1):
    """(the front-end after STEPS steps; a mean from the weights of the first on; the weights after each)."""
    frontend, seen = opened(framework), []
    update = AveragedUpdate(frontend.update, partial(ExponentialMean, decay=DECAY, every=every), frontend)
    for k in range(STEPS):
        stepped(frontend, [batch(k)])
        frontend.run_queued()
        seen.append(weights(frontend))
        if k == 0:  # torch and Keras begin with the weights after the first step
            update.average.begin_average()
    return frontend, update, seen


def by_torch(seen):
    import torch
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model = torch.nn.ParameterList([torch.nn.Parameter(torch.tensor(x)) for x in seen[0].values()])
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for state in seen:
        with torch.no_grad():
            for p, x in zip(model, state.values(), strict=True):
                p.copy_(torch.tensor(x))
        averaged.update_parameters(model)
    return dict(zip(seen[0], [p.detach().numpy() for p in averaged.module], strict=True))


def by_keras(seen):
    pytest.importorskip("torch")  # torch before TensorFlow, as the ranks load them
    import keras

    variables = [keras.Variable(np.zeros_like(x), dtype="float64") for x in seen[0].values()]
    optimizer = keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=DECAY)
    optimizer.build(variables)
    for state in seen:
        # Each step takes a variable where the training had it.
        optimizer.apply([v - x for v, x in zip(variables, state.values(), strict=True)], variables)
    optimizer.finalize_variable_values(variables)
    return dict(zip(seen[0], [v.numpy() for v in variables], strict=True))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_mean_is_that_of_torch_and_keras(framework):
    frontend, update, seen = trained(framework)
    update.take_global_weights()
    mean = weights(frontend)
    for other in (by_torch(seen), by_keras(seen)):
        for key, x in other.items():
            np.testing.assert_allclose(mean[key], x, rtol=1e-11, atol=1e-14)
    update.take_local_weights()
    assert same(weights(frontend), seen[-1]), "training goes on with the bits that it had"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_mean_takes_every_third_step(framework):
    frontend, update, seen = trained(framework, every=3)
    update.take_global_weights()
    for key, x in weights(frontend).items():
        # It began anew after step 1, and the count of steps went on: it took those of 3 and 6.
        mean = seen[0][key] + 0.1 * (seen[2][key] - seen[0][key])
        np.testing.assert_allclose(x, mean + 0.1 * (seen[5][key] - mean), rtol=1e-11, atol=1e-14)


FROZEN = [{"match": "fc2.*", "freeze": True}]
CHANGED = {
    "other frozen weights": {"ema": {"decay": 0.9}, "optim": {"lr": 1e-300}},
    "outer": {"exchange": {"mode": "outer", "outer_steps": 2}, "optim": {"lr": 1e-300, "groups": FROZEN}},
    "async": {"exchange": {"mode": "async", "async_steps": 9}, "optim": {"lr": 1e-300, "groups": FROZEN}},
}


@pytest.mark.parametrize("then", CHANGED.values(), ids=CHANGED)
def test_a_changed_run_goes_on_with_the_weights_of_the_training(tmp_path, then):
    """Not with their mean, for which the checkpoint stands."""
    keys = {"ema": {"decay": 0.9}, "optim": {"lr": 0.3, "groups": FROZEN}}
    before = train(tmp_path / "run", global_batch_size=20, **keys)
    allowed = ["ema", "exchange", "optim"]
    tree = train(tmp_path / "run", resume="last", allow_change=allowed, global_batch_size=20, max_epochs=2, **then)
    for name in ("fc1.kernel", "fc1.bias"):
        training = before[TRAINING + name]
        assert (training != before[f"weights/{name}"]).any()
        assert (tree.get(TRAINING + name, tree[f"weights/{name}"]) == training).all()


@pytest.mark.parametrize(
    ("framework", "sharded", "ema"),
    [
        ("pytorch", False, {"ema": {"decay": 0.9}}),
        ("pytorch", True, {}),
        ("tensorflow", True, {"ema": {"decay": 0.9}}),
        ("tensorflow", False, {}),
    ],
)
def test_weights_that_are_frozen_from_now_on_stay_as_the_training_had_them(tmp_path, framework, sharded, ema):
    """The others were trained beside these, and not beside their mean; with or without a mean from now on."""
    keys = {"framework": framework, "global_batch_size": 20}
    before = train(tmp_path / "run", optim={"lr": 0.3, "sharded": sharded}, ema={"decay": 0.9}, **keys)
    optim = {"lr": 0.3, "sharded": sharded, "groups": [{"match": "fc1.*", "freeze": True}]}
    allowed = ["ema", "optim.groups"]
    tree = train(tmp_path / "run", resume="last", allow_change=allowed, max_epochs=2, optim=optim, **keys, **ema)
    for name in ("fc1.kernel", "fc1.bias"):
        assert (before[TRAINING + name] != before[f"weights/{name}"]).any()
        assert (tree[f"weights/{name}"] == before[TRAINING + name]).all() and TRAINING + name not in tree
    assert (tree["weights/fc2.kernel"] != before[TRAINING + "fc2.kernel"]).any()


@pytest.mark.parametrize("keys", [{"ema": {}}, {"swa": {"epochs": 1}}, {"optim": {"name": "schedule_free_sgd"}}])
def test_averages_of_parts_of_constrained_weights_are_refused(tmp_path, keys):
    """A constraint looks at whole columns; an average of a part would be that of weights before it."""
    import keras

    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, kernel_constraint="max_norm")])
    config = {"framework": "tensorflow", "tensorboard": False, "run_dir": str(tmp_path), "max_epochs": 1} | keys
    config["optim"] = {"sharded": True} | keys.get("optim", {})
    with pytest.raises(ConfigError, match=r"kernel has a constraint.*; optim\.sharded; "):
        hvd_train.fit(config, model=model, data=DATA)
