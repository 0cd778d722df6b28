"""Own losses, metrics, inputs and outputs: both launchers give what one rank gives, and PyTorch what Keras gives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_train.launch.start import environment
from tests.limits import SECONDS

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
AGAIN = pytest.mark.long("PyTorch runs under this launcher in every run")
# No numbers of the training.
FACTS = {"framework", "model", "world_size", "samples_per_second", "weights_sha256", "time"}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """(framework, launcher) -> {work: its summary's numbers}."""
    done: dict[tuple[str, str], dict[str, dict]] = {}

    def get(framework: str, launcher: str = "") -> dict[str, dict]:
        if (framework, launcher) not in done:
            folder = tmp_path_factory.mktemp(f"{framework}-{launcher}")
            before = [str(BIN / launcher), "-np", "2"] if launcher else []
            line = [*before, sys.executable, "-m", "tests.api.own_work", framework, str(folder)]
            run = subprocess.run(
                line, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=SECONDS, check=False
            )
            assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
            told = json.loads((folder / "found.json").read_text())
            assert all(one["world_size"] == 1 + bool(launcher) for one in told.values())
            done[framework, launcher] = {
                work: {key: x for key, x in one.items() if key not in FACTS} for work, one in told.items()
            }
        return done[framework, launcher]

    return get


def same(one, other):
    assert {*one} == {"regression", "two_by_two"}
    for work, numbers in one.items():
        assert numbers == pytest.approx(other[work], rel=1e-9), work


def test_both_frameworks_learn_the_same(results):
    one = results("pytorch")
    same(one, results("tensorflow"))
    regression, other = one["regression"], one["two_by_two"]
    assert regression["val_loss"] < 0.5 < regression["val_hit"] and regression["val_found_above"] > 0.7
    assert 0.7 < regression["val_Correlation"] < 1
    assert other["val_loss"] == pytest.approx(other["val_value_loss"] + other["val_kind_loss"])
    assert {"val_value_hit", "val_kind_accuracy", "val_kind_f1"} < {*other}


@pytest.mark.parametrize(
    ("framework", "launcher"),
    [
        ("pytorch", "horovodrun"),
        ("pytorch", "mpirun"),
        ("tensorflow", "horovodrun"),
        pytest.param("tensorflow", "mpirun", marks=AGAIN),
    ],
)
def test_two_ranks_are_one(results, framework, launcher):
    same(results(framework), results(framework, launcher))
