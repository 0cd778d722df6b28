"""JAX beyond the contract of all front-ends: its models are PyTorch's, and what it has not is refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from hvd_train.cli.models import listing
from hvd_train.errors import ConfigError
from hvd_train.frameworks import JAX
from hvd_train.protocol import Field, Sample
from hvd_train.session import Session
from tests.environments import run_pytest_with
from tests.frontends.test_contract import batch, built, close, everything, opened, sample_of, stepped

VOCABULARY, LENGTH = 11, 6
TOKENS = Field((LENGTH,), "int64", classes=VOCABULARY)


def tokens(seed):
    rng, one = np.random.default_rng(seed), batch(seed)
    x, y = (rng.integers(0, VOCABULARY, (len(one.weights), LENGTH)) for _ in range(2))
    return replace(one, inputs={"input": x}, labels={"label": y})


def gpt(framework, **keys):
    pytest.importorskip("jax")
    model = {"name": "gpt", "width": 8, "depth": 2, "heads": 2} | keys
    return built(framework, Sample({"input": TOKENS}, {"label": TOKENS}), model=model, optim={"momentum": 0.9})


def test_the_gpt_is_pytorchs():
    fronts = [gpt(framework) for framework in ("pytorch", "jax")]
    np.testing.assert_allclose(*(f.predict(f.to_device(tokens(9))) for f in fronts), rtol=1e-10, atol=1e-12)
    close(*(everything(stepped(f, [tokens(k) for k in range(3)])) for f in fronts), rtol=1e-9)


def test_dropout_draws_by_the_seed_and_can_be_switched_off():
    fronts = [gpt("jax", dropout=0.5) for _ in range(4)]
    for frontend in fronts[2:]:
        frontend.without_dropout()
    sums = [
        f.ops.to_numpy(f.train_step(f.to_device(tokens(0)), 1.0, seed, 0.1))[0]
        for f, seed in zip(fronts, (2**62 + 5, 6, 5, 6), strict=True)
    ]
    assert sums[0] != sums[1] and sums[2] == sums[3]
    again = gpt("jax", dropout=0.5)
    assert again.ops.to_numpy(again.train_step(again.to_device(tokens(0)), 1.0, 2**62 + 5, 0.1))[0] == sums[0]


@pytest.mark.parametrize(
    "keys",
    [
        {"model": {"name": "tests.own_models:pytorch_dropout"}},
        {"optim": {"name": "tests.own_models:anything"}},
        {"precision": "bf16-mixed"},
        {"optim": {"sharded": True}},
        {"exchange": {"overlap": True}},
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_what_jax_has_not_is_refused(keys):
    with pytest.raises(ConfigError, match=f"jax does not have this; {next(iter(keys))}.*take framework: pytorch"):
        built_with(keys)


def test_lengths_and_several_inputs_are_refused():
    field = Field((4,), "float32")
    for inputs in ({"input": replace(field, ragged=True)}, {"a": field, "b": field}):
        with pytest.raises(ConfigError, match="jax does not have this"):
            built_with({}, Sample(inputs, {"label": Field((), "int64", classes=3)}))


def built_with(keys, sample=None):
    pytest.importorskip("jax")
    return built("jax", sample or sample_of((4, 3, 1), 3), connect=False, **keys)


def test_whole_numbers_do_not_become_fractions():
    pytest.importorskip("jax")
    with pytest.raises(ConfigError, match="the model does not take its inputs .*; whole numbers stay whole"):
        built("jax", Sample({"input": TOKENS}, {"label": Field((), "int64", classes=3)}), model={"name": "mlp"})


def test_other_records_are_refused():
    with pytest.raises(ConfigError, match="jax has no pipeline stages; parallel.pipeline"):
        JAX.stages_module()
    with pytest.raises(ConfigError, match="jax takes one device; parallel.devices_per_rank"):
        JAX.multi_device_module()


def test_without_jax_it_is_one_line(monkeypatch):
    def load(self, skip_unneeded=False):
        raise ModuleNotFoundError("No module named 'jax'", name="jax")

    monkeypatch.setattr(type(JAX), "load", load)
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(ConfigError, match="jax is not installed; framework: jax; pip install jax"):
        Session.prepare("jax")


def test_its_models_have_the_options_of_the_others():
    rows = {name: (options, frameworks) for name, options, frameworks, _ in listing()}
    assert rows["gpt"] == ("width=128, depth=4, heads=4, dropout=0.0", "pytorch, tensorflow, jax")
    assert rows["resnet"][1] == "pytorch, tensorflow"


@pytest.mark.parametrize(
    "optim",
    [{"name": "muon", "momentum": 0.9}, {"name": "schedule_free_adamw"}, {"name": "rmsprop", "momentum": 0.9}],
    ids=lambda o: o["name"],
)
def test_formulas_of_the_table_are_pytorchs(optim):
    """Also of the slots in an order that is not the alphabet's, which jit would change."""
    pytest.importorskip("jax")
    fronts = [opened(framework, optim=optim) for framework in ("pytorch", "jax")]
    rate = np.array([0.1, 0.5, 1.0]) if "free" in optim["name"] else 0.1
    for frontend in fronts:
        given = frontend.ops.from_numpy(rate) if "free" in optim["name"] else rate
        stepped(frontend, [batch(k) for k in range(3)], given)
    close(*map(everything, fronts), rtol=1e-9)


@pytest.mark.long("installs JAX into an environment of its own")
def test_with_jax(tmp_path):
    if find_spec("jax"):
        return  # the tests above ran with it
    files = [__file__, str(Path(__file__).with_name("test_contract.py"))]
    assert "could not import 'jax'" not in run_pytest_with(["jax"], tmp_path, *files, "-k", "jax")
