"""``optim.name: package.module:function``: the numbers of the framework's optimizer, its slots in checkpoints."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_train.config import load_config
from hvd_train.errors import ConfigError
from tests.update.test_parameter_groups import DATA, trained

OWN = "tests.own_optimizers:"
GROUPS: list = []


def run(folder, framework, name, epochs=5, resume=None, built=None, **keys):
    optim = {"name": OWN + name, "weight_decay": 0.0, "groups": GROUPS} | keys.pop("optim", {})
    keys = {"gradient_clip_val": 0.0} | ({} if built else {"model": {"name": "mlp", "hidden": [4]}}) | keys
    return trained(folder, framework, epochs, built, resume, optim=optim, **keys)


def first_weights(folder, framework, name):
    """Those of the zoo's model, by a run whose rate is too small to move them."""
    tree = run(folder, framework, name, epochs=1, optim={"lr": 1e-300})
    return {key.removeprefix("weights/"): x.copy() for key, x in tree.items() if key.startswith("weights/")}


def test_an_optimizer_of_torch_moves_as_the_built_in_one(tmp_path):
    here = run(tmp_path / "own", "pytorch", "torch_sgd")
    built_in = {"name": "sgd", "momentum": 0.9, "weight_decay": 0.01}
    there = run(tmp_path / "built in", "pytorch", "", optim=built_in)
    weights = [key for key in there if key.startswith("weights/")]
    assert all(np.abs(here[key] - there[key]).max() < 1e-14 for key in weights)
    slots = {key for key in here if key.startswith("slots/")}
    assert slots == {"slots/torch/steps"} | {
        f"slots/torch/layers.{k}.{name}/momentum_buffer" for k in (0, 1) for name in ("weight", "bias")
    }
    assert here["slots/torch/steps"] == 5


def test_groups_of_torch_keep_their_ratio_and_the_schedule_sets_the_rate(tmp_path):
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).double()
    parameters = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    tree = run(tmp_path, "pytorch", "torch_adadelta", built=model, optim={"lr": 0.5})
    kernels, biases = ([p for n, p in parameters.items() if n.endswith(kind)] for kind in ("weight", "bias"))
    groups = [{"params": kernels, "lr": 0.5}, {"params": biases, "lr": 1.0}]
    optimizer = torch.optim.Adadelta(groups, weight_decay=0.01)
    x, y = torch.tensor(DATA[0][0]).double(), torch.tensor(DATA[0][1])
    for _ in range(5):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(torch.func.functional_call(model, parameters, x), y).backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.8
    assert all(np.abs(tree[f"weights/{n}"] - p.detach().numpy()).max() < 1e-12 for n, p in parameters.items())


def test_the_parameters_come_in_the_order_of_the_model(tmp_path):
    """They came from the last layer to the first, so that ``parameters[:2]`` was the head."""
    first = first_weights(tmp_path / "first", "pytorch", "torch_first_layer")
    tree = run(tmp_path / "own", "pytorch", "torch_first_layer")
    moved = [name for name, x in first.items() if (tree[f"weights/{name}"] != x).any()]
    assert sorted(moved) == ["fc1.bias", "fc1.kernel"]


def test_an_optimizer_of_keras_moves_as_in_keras(tmp_path):
    first = first_weights(tmp_path / "first", "tensorflow", "keras_adadelta")
    tree = run(tmp_path / "own", "tensorflow", "keras_adadelta", optim={"lr": 0.5})
    import keras
    import tensorflow as tf

    variables = {name: keras.Variable(x, dtype="float64", name=name.replace(".", "_")) for name, x in first.items()}
    optimizer = keras.optimizers.Adadelta(0.5, clipnorm=0.3)
    x, y = tf.constant(DATA[0][0], tf.float64), tf.constant(DATA[0][1])
    for epoch in range(5):
        optimizer.learning_rate = 0.5 * 0.8**epoch
        with tf.GradientTape() as tape:
            hidden = tf.nn.relu(x @ variables["fc1.kernel"].value + variables["fc1.bias"].value)
            z = hidden @ variables["fc2.kernel"].value + variables["fc2.bias"].value
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, z))
        values = list(variables.values())
        optimizer.apply(tape.gradient(loss, [v.value for v in values]), values)
    for name, v in variables.items():
        assert np.abs(tree[f"weights/{name}"] - v.numpy()).max() < 1e-7, name  # Keras' rate has 32 bits


@pytest.mark.parametrize(
    ("framework", "name"),
    [("pytorch", "torch_adadelta"), ("pytorch", "torch_adagrad"), ("tensorflow", "keras_adadelta")],
)
def test_a_run_goes_on_to_the_same_bits_and_not_in_the_other_framework(tmp_path, framework, name):
    keys = {"global_batch_size": 25, "optim": {"lr": 0.5, "groups": [{"match": "fc1.bias", "freeze": True}]}}
    whole = run(tmp_path / "whole", framework, name, 3, **keys)
    run(tmp_path / "cut", framework, name, 3, max_steps=4, **keys)
    with pytest.raises(ConfigError, match="the slots of an optimizer of yours do not go from") as caught:
        other = "tensorflow" if framework == "pytorch" else "pytorch"
        run(tmp_path / "cut", other, name, 3, resume="last", allow_change=["framework"], **keys)
    assert "\n" not in str(caught.value)
    rest = run(tmp_path / "cut", framework, name, 3, resume="last", **keys)
    assert all((whole[key] == rest[key]).all() for key in whole) and whole.keys() == rest.keys()


REFUSED = {
    "torch_closure": "LBFGS computes the loss several times a step (closure)",
    "torch_fails": "the function failed: KeyError",
    "nothing": "the function gives int, not an optimizer",
    "missing": "has no function 'missing'",
    "torch_counting": "of Counting are not tensors of its parameters, so no checkpoint: its attributes change",
    "torch_numbers": "of Numbers are not tensors of its parameters, so no checkpoint: 'seen' of",
    "torch_slow_weights": "of Slow are not tensors of its parameters, so no checkpoint: its attributes change",
    "torch_clock": "of Clock are not tensors of its parameters, so no checkpoint: its attributes change",
    "torch_wrapper": "of Wrapper are not tensors of its parameters, so no checkpoint: 'inner' is an optimizer",
    "torch_groups": "of Groups are not tensors of its parameters, so no checkpoint: 'k' of its groups changes",
}


@pytest.mark.parametrize(("name", "message"), REFUSED.items(), ids=REFUSED)
def test_an_optimizer_that_no_checkpoint_can_hold_is_refused(tmp_path, name, message):
    with pytest.raises(ConfigError) as caught:
        run(tmp_path / "run", "pytorch", name)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert f"optim.name: {OWN}{name}" in str(caught.value)
    assert not (tmp_path / "run" / "config.yaml").exists()


KERAS = {
    "keras_schedule": "the optimizer's learning rate is a CosineDecay",
    "keras_wrapper": "'inner' of SGD is an optimizer with slots and rates of its own",
    "keras_variable": "'clock' of SGD is a variable that no checkpoint would have",
    "keras_mean": "use_ema of SGD would end with the weights and not with their mean; .*; set ema.decay instead",
    "keras_scale": "loss_scale_factor of SGD would divide gradients by 8.0, and the loss is not multiplied; .*; leave",
}


@pytest.mark.parametrize(("name", "message"), KERAS.items(), ids=KERAS)
def test_what_a_keras_optimizer_hides_is_refused(tmp_path, name, message):
    with pytest.raises(ConfigError, match=message) as caught:
        run(tmp_path, "tensorflow", name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("optim.momentum=0.9", "optim.momentum: belongs to built-in optimizers"),
        ("optim.betas=[0.5, 0.6]", "optim.betas: belongs to built-in optimizers"),
    ],
)
def test_keys_of_built_in_optimizers_are_refused(setting, key):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [f"optim.name={OWN}torch_sgd", setting])
    assert key in str(caught.value)
