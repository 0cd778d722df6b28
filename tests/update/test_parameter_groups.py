"""``optim.groups``: which weights a pattern sets, the numbers of torch's parameter groups, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

import hvd_train
from hvd_train.checkpoint.store import load, newest
from hvd_train.config import OptimConfig, load_config
from hvd_train.errors import ConfigError
from hvd_train.protocol import Packing, TensorSpec
from hvd_train.update.buckets import plan
from hvd_train.update.parameter_groups import ParameterGroups, rule_of

SHAPES = {"body.1.kernel": (6, 5), "body.1.bias": (5,), "head.kernel": (5, 3), "head.bias": (3,)}
SPECS = [TensorSpec(name, shape, "float64") for name, shape in SHAPES.items()]
rng = np.random.default_rng(0)
X = rng.normal(size=(90, 6)).astype(np.float32)
Y = X[:, :3].argmax(1)
DATA = (X[:60], Y[:60]), (X[60:], Y[60:])


def optim(*groups, **keys):
    return OptimConfig.model_validate({"lr": 0.1, "weight_decay": 0.01, **keys, "groups": list(groups)})


def test_later_groups_win_key_by_key():
    options = optim(
        {"match": "*", "freeze": True, "until_epoch": 4},
        {"match": "head.*", "lr": 0.2, "freeze": False},
        {"match": "*.bias", "weight_decay": 0},
        {"match": "body/?/bias", "lr": 0.05},
    )
    rules = {name: rule_of(options, name) for name in SHAPES}
    assert [(r.factor, r.weight_decay, r.since) for r in rules.values()] == [
        (1, 0.01, 4),
        (0.5, 0, 4),
        (2, 0.01, 0),
        (2, 0, 0),
    ]
    groups = ParameterGroups(options, SPECS)
    assert groups.frozen(0) == groups.frozen(3) == ["body.1.kernel", "body.1.bias"] and groups.frozen(4) == []
    assert [groups.phase(epoch) for epoch in range(6)] == [0, 0, 0, 0, 4, 4]
    assert groups.table() == [
        "optim.groups:",
        "  *            4 tensors of 53 weights: frozen for 4 epochs",
        "  head.*       2 tensors of 18 weights: lr 0.2, not frozen",
        "  *.bias       2 tensors of 8 weights: weight_decay 0",
        "  body/?/bias  1 tensor of 5 weights: lr 0.05",
        "  trained at the start: 2 tensors of 18 weights, head.kernel, head.bias",
    ]


def test_one_optimizer_without_groups():
    rule = rule_of(optim(), "head.bias")
    assert rule.factor == 1 and rule.options(optim()) == optim()
    assert ParameterGroups(optim(), SPECS).table() == []


@pytest.mark.parametrize("small", [0, 4])
def test_the_buckets_of_a_rule_do_not_depend_on_others(small):
    """So that residuals of a bucket stay when more weights are trained."""
    names = [spec.name for spec in SPECS]
    rules = ["late", "late", "early", "early"]
    first = {
        tuple(names[2:][i] for i in members) for members in plan(SPECS[2:], Packing(200, 400), small, (), rules[2:])
    }
    later = {tuple(names[i] for i in members) for members in plan(SPECS, Packing(200, 400), small, (), rules)}
    assert first < later
    assert sorted(name for members in later for name in members) == sorted(names)


REFUSED = {
    "haed.*": (
        [{"match": "haed.*", "lr": 1.0}],
        "'haed.*' matches no weight; optim.groups.0.match; is it 'head'? there are body.1",
    ),
    "all frozen": ([{"match": "*", "freeze": True, "until_epoch": 2}], "every weight is frozen at the start"),
}


@pytest.mark.parametrize(("groups", "message"), REFUSED.values(), ids=REFUSED)
def test_groups_that_do_not_fit_the_model_are_refused(groups, message):
    with pytest.raises(ConfigError) as caught:
        ParameterGroups(optim(*groups), SPECS)
    assert message in str(caught.value) and "\n" not in str(caught.value)


WRONG = {
    '[{match: "a"}]': "optim.groups.0.match: 'a' sets nothing: give lr, weight_decay or freeze",
    "[{lr: 0.1}]": "optim.groups.0.match: give a pattern of names",
    '[{match: "a", lr: 0}]': "optim.groups.0.lr: must be > 0.0, not 0",
    '[{match: "a", lr: 0.1, until_epoch: 2}]': "optim.groups.0.until_epoch: belongs to freeze: true",
    '[{match: "a", freeze: true, lr: 0.1}]': "optim.groups.0.freeze: frozen weights have no lr and no weight_decay",
    '[{match: "a", frozen: true}]': "optim.groups.0.frozen: unknown key; did you mean 'optim.groups.0.freeze'?",
}


@pytest.mark.parametrize(("value", "message"), WRONG.items(), ids=WRONG)
def test_a_group_that_says_nothing_or_too_much_is_refused(value, message):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [f"optim.groups={value}"])
    assert message in str(caught.value) and "\n" not in str(caught.value)


GROUPS = [
    {"match": "0.*", "lr": 0.02, "freeze": True, "until_epoch": 2},
    {"match": "*.bias", "weight_decay": 0},
    {"match": "2.*", "lr": 0.05},
    {"match": "1.*", "freeze": True},
]


def trained(folder, framework, epochs=6, built=None, resume=None, **keys):
    pytest.importorskip("torch")
    optimizer = {"lr": 0.03, "weight_decay": 0.1, "schedule": "exponential", "gamma": 0.8, "groups": GROUPS}
    optimizer |= keys.pop("optim", {})
    allowed = keys.pop("allow_change", ())
    config = {"framework": framework, "precision": "64", "tensorboard": False, "run_dir": str(folder)}
    config |= {"global_batch_size": 60, "max_epochs": epochs, "gradient_clip_val": 0.7, "optim": optimizer}
    hvd_train.fit(config | keys, model=built, data=DATA, resume=resume, allow_change=allowed)
    return newest(folder / "checkpoints", print).tree


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_the_numbers_are_those_of_torch(tmp_path, name, capsys):
    """A rate and a decay for each group, a schedule over all, one norm of what is trained, weights added later."""
    torch = pytest.importorskip("torch")

    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 5), torch.nn.Linear(5, 5), torch.nn.Linear(5, 3)]
    model = torch.nn.Sequential(*layers).double()
    first = {n: p.detach().clone() for n, p in model.named_parameters()}
    momentum = {"momentum": 0.9} if name == "sgd" else {}
    tree = trained(tmp_path / "run", "pytorch", built=model, optim={"name": name, **momentum})
    out = capsys.readouterr().out
    assert "  0.*     2 tensors of 35 weights: lr 0.02, frozen for 2 epochs\n" in out
    assert "epoch 3: 4 tensors of 6 are trained from here on\n" in out
    assert not [key for key in tree if key.startswith("slots/") and "/1." in key], "frozen weights have no slots"

    parameters = {n: p.clone().requires_grad_() for n, p in first.items()}
    groups = [
        {"params": [parameters[f"2.{n}"]], "lr": 0.05, "weight_decay": d} for n, d in (("weight", 0.1), ("bias", 0))
    ]
    kind = torch.optim.SGD if name == "sgd" else torch.optim.AdamW
    optimizer = kind(groups, lr=0.03, **momentum)
    x, y = torch.tensor(DATA[0][0]).double(), torch.tensor(DATA[0][1])
    for epoch in range(6):
        if epoch == 2:
            for n, decay in (("weight", 0.1), ("bias", 0)):
                optimizer.add_param_group(
                    {"params": [parameters[f"0.{n}"]], "lr": 0.02 * 0.8**2, "weight_decay": decay}
                )
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(torch.func.functional_call(model, parameters, x), y)
        loss.backward()
        moved = [p for group in optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(moved, 0.7)
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.8
    for n, p in parameters.items():
        here = tree[f"weights/{n}"]
        assert np.abs(here - p.detach().numpy()).max() < 1e-12, n
        assert (here == first[n].numpy()).all() == n.startswith("1.")


ZOO = [
    {"match": "fc1.*", "lr": 0.02, "freeze": True, "until_epoch": 2},
    {"match": "*.bias", "weight_decay": 0},
    {"match": "fc3/*", "lr": 0.05},
    {"match": "fc2.*", "freeze": True},
]


@pytest.mark.parametrize("name", ["adam", "lamb"])
def test_both_frameworks_train_alike_and_go_on_to_the_same_bits(tmp_path, name):
    """Left before, at and behind the epoch in which more weights are trained."""
    keys = {"model": {"name": "mlp", "hidden": [5, 4]}, "optim": {"name": name, "groups": ZOO}}
    keys |= {"global_batch_size": 25, "exchange": {"compression": "int8"}}
    trees = {f: trained(tmp_path / f, f, 4, **keys) for f in ("pytorch", "tensorflow")}
    one, other = trees.values()
    assert one.keys() == other.keys() >= {"slots/step", "slots/step_from_epoch_2"}
    assert (one["slots/step"], one["slots/step_from_epoch_2"]) == (12, 6)
    assert all(np.abs(one[key] - other[key]).max() < 1e-9 for key in one)
    # Keras' runs go on in tests/ranks.
    left = tmp_path / "left"
    trained(left, "pytorch", **keys | {"max_steps": 4, "epochs": 4})
    for steps in (6, 8):
        trained(left, "pytorch", resume="last", **keys | {"max_steps": steps, "epochs": 4})
    tree = trained(left, "pytorch", 4, resume="last", **keys)
    assert all((tree[key] == one[key]).all() for key in tree)
    summaries = [json.loads((at / "summary.json").read_text()) for at in (left, tmp_path / "pytorch")]
    assert summaries[0]["weights_sha256"] == summaries[1]["weights_sha256"]


def test_a_mean_of_epochs_goes_on_where_more_weights_are_trained(tmp_path):
    """It took the weights of the third epoch twice, where a tensor was not in the mean of the checkpoint."""
    keys = {"model": {"name": "mlp", "hidden": [5, 4]}, "swa": {"epochs": 3}, "checkpoint": {"save_top_k": 9}}
    frozen = [{"match": "fc1.*", "freeze": True}]
    trained(tmp_path, "pytorch", 4, optim={"groups": frozen}, **keys)
    second, third = (load(tmp_path / "checkpoints" / f"step-0000000{step}").model for step in (2, 3))
    more = {"resume": "step-00000003", "allow_change": ["optim.groups"]}
    tree = trained(tmp_path, "pytorch", 4, optim={"groups": [{"match": "fc1.bias", "freeze": True}]}, **keys, **more)
    for name in ("fc1.kernel", "fc2.kernel", "fc3.bias"):
        last = tree[f"exchange/training_weights/{name}"]
        expected = (second[f"weights/{name}"] + third[f"weights/{name}"] + last) / 3
        np.testing.assert_allclose(tree[f"weights/{name}"], expected, rtol=1e-12, atol=1e-15)
