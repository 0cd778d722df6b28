"""``hvd-train verify`` passes for every model of the zoo and for all kinds of tasks: 2 ranks as one, and PyTorch as
Keras, to 1e-9."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from hvd_train.config import DataConfig, TaskConfig, load_config
from hvd_train.data.catalog import open_data
from hvd_train.verify.compare_worlds import verify

ROOT = Path(__file__).parents[2]
DIGITS, TEXT = {"name": "digits"}, {"path": str(ROOT / "LICENSE")}
NORM = {"sync_batchnorm": True}
# model: its options, data and what else it wants; sizes are small, what they are made of is whole
ZOO = {
    "mlp": ({"hidden": [24]}, DIGITS, {}),
    "cnn": ({"hidden": 50}, DIGITS | {"image_size": 28}, {}),
    "thin": ({"depth": 6, "width": 5}, DIGITS, {}),
    "resnet": ({"width": 4, "blocks": [1, 1]}, DIGITS, NORM),
    "resnet50": ({"width": 2, "blocks": [1, 1, 1, 2]}, DIGITS | {"image_size": 32}, NORM),
    "pyramidnet": ({"width": 3, "blocks": [2, 1, 1], "alpha": 7}, DIGITS | {"image_size": 12}, NORM),
    "autoencoder": ({}, DIGITS | {"target": "inputs"}, {"task": {"loss": "mse", "metrics": ["mae"]}}),
    "gpt": ({"width": 16, "depth": 2, "heads": 2}, TEXT | {"name": "text", "sequence_length": 16}, {}),
    "text_classifier": (
        {"width": 16, "depth": 2, "heads": 2, "dropout": 0.0, "vocabulary_size": 256},
        {"name": "tests.verify.test_zoo:paragraphs", "lengths": {"max_length": 60, "truncate": True, "block": 42}},
        {"optim": {"name": "adamw", "eps": 1e-6}},
    ),
    "bert": (
        {"width": 16, "depth": 2, "heads": 2, "dropout": 0.0},
        TEXT | {"name": "masked_text", "sequence_length": 24, "vocabulary_size": 300},
        # Keys' biases have no gradient but rounding, which Adam's usual eps of 1e-8 would make a step of 1e-9.
        {
            "task": {"loss": {"words": "cross_entropy", "next": "cross_entropy"}},
            "optim": {"name": "adamw", "eps": 1e-6},
        },
    ),
}


def test_none_is_forgotten():
    for zoo in ("pt_models", "tf_models"):
        assert {path.stem for path in (ROOT / zoo).glob("*.py")} - {"__init__"} == {*ZOO}


def check(name, model, data, keys, capfd, verdicts=3):
    base = {"model": {"name": name, **model}, "data": data, "precision": "64", "global_batch_size": 21}
    base |= {"optim": {"lr": 0.02, "momentum": 0.9}} | keys
    assert verify(load_config(base=base), 2, 4) == 0, capfd.readouterr().out
    assert capfd.readouterr().out.count("\nequal\n") == verdicts


@pytest.mark.long("networks and gradients of all are compared in tests/frontends, worlds of most in tests/ranks")
@pytest.mark.parametrize("name", ZOO)
def test_verify_passes(name, capfd):
    check(name, *ZOO[name], capfd)


def paragraphs():
    """The bytes of the paragraphs of a licence, and whether they name it."""
    texts = [text for text in (ROOT / "LICENSE").read_bytes().split(b"\n\n") if text.strip()]
    part = (
        {"tokens": [np.frombuffer(x, np.uint8).astype(np.int32) for x in texts]},
        [int(b"License" in x) for x in texts],
    )
    return part, part


# ---- tasks; these functions are the same in both frameworks


def known(outputs, labels):
    """A masked loss: what lies above 200 nobody knows."""
    return (outputs[:, 0] - labels) ** 2 / 1000, labels < 200


def found_above(outputs, labels):
    """A ratio whose denominator follows from the outputs."""
    return labels > 150, outputs[:, 0] > 150


class Spread:
    """Of the errors: sums with a result."""

    def __call__(self, outputs, labels):
        error = (outputs[:, 0] - labels)[:, None]
        join = import_module(type(error).__module__.partition(".")[0]).concat
        return join([error * 0 + 1, error, error**2], 1)

    def result(self, sums):
        count, first, second = sums
        return (second / count - (first / count) ** 2) ** 0.5


def diabetes(kind):
    """The real ones, their labels as the task wants them."""
    data = open_data(DataConfig(name="diabetes"), TaskConfig(loss="mse"))
    return tuple(
        (x, (y > 140).astype(np.int64 if kind == "classes" else np.float32) if kind != "numbers" else y)
        for part in (data.train, data.val)
        for (x,), (y,) in [[given.values() for given in part.fetch(np.arange(len(part)))]]
    )


HERE = "tests.verify.test_zoo"
TASKS = {
    "huber": ("numbers", {"loss": "huber", "metrics": ["mse", "mae", "rmse", "r2"]}),
    "bce": ("binary", {"loss": "bce", "metrics": ["accuracy", "f1", "auc"]}),
    "classes": ("classes", {"loss": "cross_entropy", "metrics": ["accuracy", "f1", "auc"]}),
    "own": ("numbers", {"loss": f"{HERE}:known", "metrics": [f"{HERE}:found_above", f"{HERE}:Spread", "mae", "r2"]}),
}


AGAIN = pytest.mark.long("the own task in PyTorch runs each time")


@pytest.mark.parametrize(
    ("name", "framework"),
    [
        ("own", "pytorch"),
        pytest.param("own", "tensorflow", marks=AGAIN),
        *(pytest.param(name, "pytorch", marks=AGAIN) for name in TASKS if name != "own"),
    ],
)
def test_verify_passes_for_every_kind_of_task(name, framework, capfd):
    """Functions of one's own belong to one framework, in which N ranks are compared with one."""
    kind, task = TASKS[name]
    data = {"name": f"{HERE}:diabetes", "options": {"kind": kind}}
    keys = {"task": task, "optim": {"name": "adam", "lr": 0.02}, "framework": framework}
    check("mlp", {"hidden": [24]}, data, keys, capfd, verdicts=1 if name == "own" else 3)
