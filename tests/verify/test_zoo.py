"""``hvd-train verify`` passes for every model of the zoo: 2 ranks as one, and PyTorch as Keras, to 1e-9."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_train.config import load_config
from hvd_train.verify.compare import verify

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


@pytest.mark.long("networks and gradients of all are compared in tests/frontends, worlds of most in tests/ranks")
@pytest.mark.parametrize("name", ZOO)
def test_verify_passes(name, capfd):
    model, data, keys = ZOO[name]
    base = {"model": {"name": name, **model}, "data": data, "precision": "64", "global_batch_size": 21}
    base |= {"optim": {"lr": 0.02, "momentum": 0.9}} | keys
    assert verify(load_config(base=base), 2, 4) == 0, capfd.readouterr().out
    assert capfd.readouterr().out.count("\nequal\n") == 3
