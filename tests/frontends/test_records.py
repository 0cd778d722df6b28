"""A framework is a record: one that no file of hvd_train names trains, is evaluated and is verified."""

from __future__ import annotations

import gc
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_train.config import explain, load_config
from hvd_train.errors import ConfigError
from hvd_train.frameworks import FRAMEWORKS, fast_import
from hvd_train.verify.compare import verify
from tests.frontends import numpy_ranks
from tests.limits import SECONDS

ROOT = Path(__file__).parents[2]
SETS = ["framework=numpy", "model.name=softmax", "data.name=digits", "global_batch_size=96", "precision=64"]


def test_an_unknown_framework_is_refused_and_a_known_one_explained(monkeypatch):
    with pytest.raises(ConfigError, match="must be 'pytorch' or 'tensorflow', not \"numpy\""):
        load_config(None, SETS)
    monkeypatch.setitem(FRAMEWORKS, "numpy", numpy_ranks.NUMPY)
    assert load_config(None, SETS).framework == "numpy"
    with pytest.raises(
        ConfigError, match="must be 'pytorch', 'tensorflow' or 'numpy', not \"nmpy\"; did you mean 'numpy'"
    ):
        load_config(None, ["framework=nmpy"])
    assert ("framework", "pytorch|tensorflow|numpy") in {row[:2] for row in explain()}


def test_numpy_trains_and_is_evaluated_by_the_command_line(tmp_path):
    def run(*words):
        line = [sys.executable, "-m", numpy_ranks.__name__, *words]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
        return done.stdout

    sets = [*SETS, "optim.lr=0.5", "optim.momentum=0.9", "max_epochs=8", "tensorboard=false"]
    run("fit", *(word for one in sets for word in ("--set", one)), "--run-dir", str(tmp_path))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["framework"] == "numpy" and summary["val_accuracy"] > 0.8
    found = json.loads(run("eval", "--run-dir", str(tmp_path)).splitlines()[-1])
    assert (found["loss"], found["accuracy"]) == (summary["val_loss"], summary["val_accuracy"])


def test_two_ranks_of_numpy_are_verified(monkeypatch, capfd):
    monkeypatch.setitem(FRAMEWORKS, "numpy", numpy_ranks.NUMPY)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # where the ranks find this module
    assert verify(load_config(None, SETS), 2, 3, module=numpy_ranks.__name__) == 0
    out = capfd.readouterr().out
    assert "note: the model is in numpy alone: only the ranks are compared\n" in out
    assert "2 ranks of numpy against 1 rank of numpy\n" in out and "weights/w " in out and "\nverdict: equal\n" in out


def test_what_is_hidden_while_a_framework_loads_is_there_again(monkeypatch):
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    with pytest.raises(ImportError), fast_import(("wave", "json")):
        assert importlib.import_module("json") is json and not gc.isenabled()  # loaded already: nothing is hidden
        importlib.import_module("wave")
    assert gc.isenabled() and importlib.import_module("wave").Wave_read
