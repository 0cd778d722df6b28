"""``hvd-train verify -- python train.py``: scripts of one's own that train as one process pass, others are named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hvd_train.launch.start import environment
from hvd_train.verify.script import verify_script
from tests.limits import SECONDS

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"


def verdict(out: str) -> tuple[str, list[str]]:
    return out, [line for line in out.splitlines() if line.startswith(("equal", "DIFFERENT", "verdict", "note"))]


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """(exit code, all that was printed, its verdict) of a script in a folder of its own."""

    def call(*program: str, steps: int = 6, size: int = 2, **options):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
        code = verify_script(["python", str(SCRIPTS / program[0]), *program[1:]], size, steps, **options)
        out, lines = verdict(capfd.readouterr().out)
        return code, out, lines

    return call


def test_a_script_is_equal_in_64_bits(tmp_path, run):
    """Beyond the end of an epoch, whose last batch is uneven; in a weighted order, with synchronized batch norm."""
    code, out, lines = run(
        "train_torch.py", "weighted", "norm", "joined", size=3, steps=5, report=tmp_path / "proof.html"
    )
    assert code == 0, out
    assert lines[-2:] == ["equal", "verdict: equal"] and "trained to the end" not in out
    assert "note: dropout is off: masks depend on the rank" in lines and "note: torch.autocast is off" in lines
    assert "weights/0.weight" in out and "gradient/4.bias" in out and "1 rank" in out
    assert not (tmp_path / "last.ckpt").exists()
    assert "data:image/png;base64," in (tmp_path / "proof.html").read_text()


def test_a_loss_that_is_summed_over_ranks_is_compared_as_it_is(run):
    """It was taken for a mean over ranks, and differed."""
    code, out, lines = run("train_torch.py", "summed", steps=5)
    assert code == 0 and lines[-1] == "verdict: equal", out


def test_a_fault_of_a_script_is_named(run):
    code, out, lines = run("train_torch.py", "divided")
    assert code == 1, out
    assert any(line.startswith("DIFFERENT: the loss of step 1") or "gradient of step 1 is 0.5 times" in line
               for line in out.splitlines()), out  # fmt: skip
    assert "the gradient of step 1 is 0.5 times that of 1 rank" in out


def test_noise_is_named_as_the_cause(run):
    code, out, lines = run("train_torch.py", "noise")
    assert code == 1, out
    assert any(line.startswith("note: the script draws from torch's generator in its steps") for line in lines)


def test_the_advice_for_a_script_is_one_for_scripts(run):
    """It was a key of the configuration, which a script does not have."""
    code, out, lines = run("train_torch.py", "norm")
    assert code == 1 and lines[-2].startswith("DIFFERENT: unsynchronized batch norm: the loss of step 1 is "), out
    assert "equal weights and samples; ht.distribute(model, optimizer, sync_batchnorm=True) makes it" in out


LONG = pytest.mark.long("fit is equal in every run, and loops in tests/script/keras, which differ here in every run")


@pytest.mark.parametrize("way", ["fit", pytest.param("loop", marks=LONG)])
def test_a_keras_script_is_equal(run, way):
    code, out, lines = run("train_keras.py", way)
    assert code == 0, out
    assert lines[-2:] == ["equal", "verdict: equal"]
    assert "weights/sequential/dense/kernel" in out and "trained to the end" not in out


def test_a_keras_loop_that_depends_on_the_rank_differs(run):
    code, out, lines = run("train_keras.py", "loop", "rank")
    assert code == 1 and any(line.startswith("DIFFERENT: after 6 steps weights/sequential/") for line in lines), out


def test_mistakes_are_one_line(tmp_path):
    def refused(*words: str) -> tuple[int, str]:
        line = [sys.executable, "-m", "hvd_train", "verify", "-np", "2", *words]
        env = environment() | {"PYTHONPATH": str(ROOT)}
        run = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
        return run.returncode, run.stderr

    (tmp_path / "idle.py").write_text("print('nothing')\n")
    code, text = refused("--launcher", "mpirun", "--", "python", "idle.py")
    assert code == 2 and text.count("\n") == 1 and "did not come to the end of a step on each rank" in text
    code, text = refused("--set", "optim.lr=1", "--", "python", "idle.py")
    assert code == 2 and "a script has no configuration" in text
