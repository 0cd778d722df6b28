"""A framework is a record: one that no file of hvd_train names trains, is evaluated and is verified."""

from __future__ import annotations

import gc
import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hvd_train.config import FrontEndConfig, explain, load_config
from hvd_train.data.catalog import open_data
from hvd_train.errors import ConfigError
from hvd_train.frameworks import FRAMEWORKS, fast_import
from hvd_train.frontends.serial import Serial
from hvd_train.launch.start import environment
from hvd_train.protocol import Groups
from hvd_train.verify.compare_worlds import verify
from tests import numpy_frontend, numpy_ranks
from tests.launching import needs_horovod
from tests.limits import SECONDS

ROOT = Path(__file__).parents[2]
MPIRUN = Path(sys.executable).with_name("mpirun")
SETS = ["framework=numpy", "model.name=softmax", "data.name=digits", "global_batch_size=96", "precision=64"]


def test_an_unknown_framework_is_refused_and_a_known_one_explained(monkeypatch):
    with pytest.raises(ConfigError, match="must be 'pytorch', 'tensorflow' or 'jax', not \"numpy\""):
        load_config(None, SETS)
    monkeypatch.setitem(FRAMEWORKS, "numpy", numpy_ranks.NUMPY)
    assert load_config(None, SETS).framework == "numpy"
    with pytest.raises(
        ConfigError, match="must be 'pytorch', 'tensorflow', 'jax' or 'numpy', not \"nmpy\"; did you mean 'numpy'"
    ):
        load_config(None, ["framework=nmpy"])
    assert ("framework", "pytorch|tensorflow|jax|numpy") in {row[:2] for row in explain()}


def run(*words, ranks=1):
    """Run the command line where neither Horovod nor another framework can be imported; return what it prints."""
    mpirun = [MPIRUN, "--oversubscribe", "-np", str(ranks)] if ranks > 1 else []
    line = [*mpirun, sys.executable, "-m", numpy_ranks.__name__, *map(str, words)]
    kept = {"cwd": ROOT, "env": environment(), "capture_output": True, "text": True}
    done = subprocess.run(line, timeout=SECONDS, check=False, **kept)
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    return done.stdout


def fit(folder, epochs, *words, ranks=1):
    sets = [*SETS, "optim.lr=0.1", "optim.momentum=0.9", f"max_epochs={epochs}", "tensorboard=false"]
    run("fit", *(word for one in sets for word in ("--set", one)), "--run-dir", folder, *words, ranks=ranks)
    return json.loads((folder / "summary.json").read_text())


def held_out_labels():
    config = load_config(None, SETS[1:])
    val = open_data(config.data, config.task).parts["val"]
    _, (labels,) = (list(named.values()) for named in val.fetch(np.arange(len(val))))
    return labels


def test_numpy_trains_evaluates_predicts_and_resumes_by_the_command_line(tmp_path):
    summary = fit(tmp_path / "whole", 8)
    assert summary["framework"] == "numpy" and summary["val_accuracy"] > 0.8
    found = json.loads(run("eval", "--run-dir", tmp_path / "whole").splitlines()[-1])
    assert (found["loss"], found["accuracy"]) == (summary["val_loss"], summary["val_accuracy"])
    run("predict", "--run-dir", tmp_path / "whole", "-o", tmp_path / "logits.npy")
    labels = held_out_labels()
    right = np.load(tmp_path / "logits.npy").argmax(1) == labels
    assert right.sum() == pytest.approx(summary["val_accuracy"] * len(labels), rel=1e-12)
    fit(tmp_path / "left", 3)
    again = fit(tmp_path / "left", 8, "--resume", "auto")
    assert again["weights_sha256"] == summary["weights_sha256"], "a run that goes on is the run"


@pytest.mark.parametrize("key", ["optim.name=adam", "optim.sharded=true", "precision=bf16-mixed", "task.loss=mse"])
def test_what_numpy_has_not_is_refused(monkeypatch, key):
    monkeypatch.setitem(FRAMEWORKS, "numpy", numpy_ranks.NUMPY)
    with pytest.raises(ConfigError, match=key.partition("=")[0]):
        numpy_frontend.open_frontend(FrontEndConfig.of(load_config(None, [*SETS, key])), Groups.of(Serial()), None)


@pytest.mark.skipif(not MPIRUN.exists(), reason="there is no MPI")
def test_two_ranks_of_numpy_train_as_one(tmp_path):
    one, two = (fit(tmp_path / str(ranks), 2, ranks=ranks) for ranks in (1, 2))
    assert (one["world_size"], two["world_size"]) == (1, 2)
    assert two["val_loss"] == pytest.approx(one["val_loss"], rel=1e-12)


def test_two_ranks_of_numpy_are_verified(monkeypatch, capfd):
    needs_horovod()
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
