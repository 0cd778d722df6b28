"""``hvd-train verify`` on launched ranks: what is right passes, each planted fault is found and named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_train.config import load_config, resolved_yaml
from hvd_train.errors import ConfigError
from hvd_train.launch.start import environment, launch
from hvd_train.verify import compare_worlds
from hvd_train.verify.compare_worlds import verify
from hvd_train.verify.difference import Runs, findings
from hvd_train.verify.record import Record
from tests.limits import SECONDS

ROOT = Path(__file__).parents[2]
FRAMEWORKS = ["pytorch", "tensorflow"]
ZOO = {"pytorch": "pt_models", "tensorflow": "tf_models"}
OWN = {"pytorch": "tests.own_models:pytorch_norm", "tensorflow": "tests.own_models:keras_norm"}
# 1 438 samples in batches of 479: ranks have uneven parts, and the fourth step has one sample
KEYS = {"model.name": "{zoo}.mlp:build", "data.name": "digits", "global_batch_size": 479, "precision": 64}
FAULTS = {
    "missing_allreduce": "the gradient of step 1 differs between ranks (rank 1 against rank 0): no exchange",
    "overlapping_shard": "samples of step 1: 1 seen twice",
    "learning_rate": "the learning rate of step 1 is 2 times that of 1 rank of {framework} (0.2 against 0.1)",
    "batch_norm_apart": "unsynchronized batch norm: the loss of step 1 is ",
    "sum_for_average": "the gradient of step 1 is 2 times that of 1 rank of {framework}",
    "first_weight": "the ranks start with different weights: rank 1 against rank 0, first in weights/fc1.bias",
}
OF_BOTH = ("batch_norm_apart", "missing_allreduce", "first_weight")  # what finds the others lies in the core


CORE = pytest.mark.long("what finds it lies in the core, and PyTorch's runs in every run")


def config(framework, **keys):
    settings = {"framework": framework, "optim.lr": 0.1, "optim.momentum": 0.9} | KEYS | keys
    return load_config(None, [f"{key}={str(x).format(zoo=ZOO[framework])}" for key, x in settings.items()])


def verdict(capfd):
    """(comparisons, each with its lines; the last line but one)."""
    out, errors = capfd.readouterr()
    lines = [line for line in out.splitlines() if line.startswith(("equal", "DIFFERENT", "verdict"))]
    assert lines, f"no comparison: {out}{errors}"
    return out, lines


def test_both_frameworks_are_equal_and_drawn(tmp_path, capfd):
    """Delayed gradients are those of one rank, too."""
    page = tmp_path / "proof.html"
    keys = {"model.name": "mlp", "precision": 32, "optim.warmup_steps": 3}
    keys |= {"optim.name": "adam", "optim.momentum": 0, "optim.lr": 0.01}
    settings = config("pytorch", **keys, **{"exchange.mode": "delayed", "exchange.delay": 2})
    assert verify(settings, 2, 6, report=page) == 0
    out, lines = verdict(capfd)
    assert lines == ["equal"] * 3 + ["verdict: equal"] and "under_way/gradient2/fc1.kernel" in out
    assert "1 rank of tensorflow against 1 rank of pytorch" in out and "in 64 bits  in 32" in out
    text = page.read_text()
    assert "data:image/png;base64," in text and "http" not in text.replace("http://www.w3.org", "")
    assert all(word in text for word in ("weights/fc1.kernel", "gradient/fc2.bias", "2 ranks of tensorflow", "1e-09"))
    with pytest.raises(ConfigError, match="the first 2 steps of a training apply nothing.*--steps 3 or more"):
        verify(settings, 2, 2)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_planted_faults_are_named(tmp_path, monkeypatch, framework):
    """All of them in one world of two ranks, and in one of one rank, which no fault touches."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # where the ranks find the module
    faults = {name: FAULTS[name] for name in (FAULTS if framework == "pytorch" else OF_BOTH)}
    for size in (2, 1):
        (folder := tmp_path / str(size)).mkdir()
        for fault in faults:
            keys = {"model.name": OWN[framework], "sync_batchnorm": "true"} if fault == "batch_norm_apart" else {}
            for name, plan in compare_worlds._plans(config(framework, **keys), framework, 2, 3, folder).items():
                (folder / f"{fault}-{name}.yaml").write_text(resolved_yaml(plan))
        assert launch(size, "auto", ["record", str(folder)], False, "tests.verify.faults") == 0

    def runs(fault, size):
        records = (Record.read(tmp_path / str(size) / f"{fault}-{name}", size) for name in ("64", "gradient"))
        return Runs(f"1 rank of {framework}", *records)

    for fault, told in faults.items():
        found = findings(runs(fault, 1), runs(fault, 2))
        assert found and found[0].startswith(told.format(framework=framework)), (fault, found)


@pytest.mark.parametrize("framework", ["pytorch", pytest.param("tensorflow", marks=CORE)])
def test_batch_norm_of_ones_own_without_synchronization(capfd, framework):
    keys = {"model.name": OWN[framework]}
    assert verify(config(framework, **keys), 2, 3) == 1
    out, lines = verdict(capfd)
    assert lines[0].startswith("DIFFERENT: unsynchronized batch norm: ") and "sync_batchnorm: true" in lines[0]
    assert lines[-1] == "verdict: 1 of 1 comparisons differ"
    assert verify(config(framework, **keys, sync_batchnorm="true"), 2, 3) == 0, "and with it, all is equal"


WITHOUT = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, *rest):
        return None if name.split(".")[0] in {packages} else super().find_spec(name, *rest)

sys.meta_path = [Without if finder is PathFinder else finder for finder in sys.meta_path]
"""


@pytest.mark.parametrize(
    ("framework", "other", "packages"),
    [
        ("pytorch", "tensorflow", ("tensorflow", "keras")),
        pytest.param("tensorflow", "pytorch", ("torch",), marks=CORE),
    ],
)
def test_without_the_other_framework(tmp_path, framework, other, packages):
    """The ranks of one framework are compared, where the other cannot be imported in any process."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT.format(packages=packages))
    sets = [f"framework={framework}", "model.name=mlp", "data.name=digits", "batch_size=99", "precision=64"]
    line = [sys.executable, "-m", "hvd_train", "verify", "-np", "2", "--steps", "2"]
    line += [word for one in sets for word in ("--set", one)]
    env = {**environment(), "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    run = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert run.returncode == 0 and not run.stderr, run.stdout + run.stderr
    assert f"note: {other} is not installed: only the ranks are compared\n" in run.stdout
    assert f"2 ranks of {framework} against 1 rank of {framework}" in run.stdout
    assert f"1 rank of {other}" not in run.stdout and "\nverdict: equal\n" in run.stdout
    line[line.index(sets[0])] = f"framework={other}"
    run = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert run.returncode == 2 and run.stderr.startswith(f"error[rank 0]: {other} is not installed; "), run.stderr
    assert run.stderr.count("\n") == 1


def test_a_world_that_fails_hands_its_code_on(capfd):
    assert verify(config("pytorch", **{"data.name": "tests.own_models:two_samples"}), 3, 3) == 3
    assert "error: a data set of 2 samples for 3 ranks" in capfd.readouterr().err.replace("[rank 0]", "")
