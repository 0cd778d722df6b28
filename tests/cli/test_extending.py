"""The worked examples of the guide's page extending: the diffs are applied to a copy of the package, which trains."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hvd_train
from hvd_train.cli import guide
from hvd_train.launch.launchers import installed

PACKAGE = Path(hvd_train.__file__).parent
ROOT = Path(__file__).parents[2]
SECONDS = 300

A_METRIC = """
import numpy as np
from sklearn.metrics import explained_variance_score

import hvd_train
from hvd_train.config import Config, TaskConfig
from hvd_train.protocol import Field, Sample
from hvd_train.task.task import Task
from tests.numpy_frontend import NumpyOps

rng = np.random.default_rng(0)
y = rng.normal(5, 2, size=(40, 3))
z = y + rng.normal(1, 1, size=y.shape)
fields = Sample({}, {"label": Field((3,), "float32")})
task = Task(TaskConfig(loss="mse", metrics=["explained_variance"]), fields, NumpyOps())
sums = sum(task(z[rows], {"label": y[rows]}, np.ones(len(rows)))[1] for rows in np.array_split(np.arange(40), 3))
wanted = explained_variance_score(y.ravel(), z.ravel())
assert abs(task.results(sums)["explained_variance"] - wanted) < 1e-12

keys = {"model": {"name": "mlp"}, "data": {"name": "diabetes"}, "max_steps": 5, "run_dir": "run", "tensorboard": False}
keys |= {"task": {"loss": "mse", "metrics": ["explained_variance"]}}
keys |= {"checkpoint": {"monitor": "val_explained_variance"}}
config = Config.model_validate(keys)
assert config.mode_of(config.checkpoint) == "max"
print(hvd_train.fit(keys).val_explained_variance)
"""
A_COMPRESSOR = """
import numpy as np

from hvd_train.compression import make
from hvd_train.compression.table import COMPRESSORS
from hvd_train.config import load_config
from hvd_train.mode_comparison.ways import standard, way
from hvd_train.script.shared.world import exchange_options
from tests.numpy_frontend import NumpyOps

gradient, residual = np.random.default_rng(0).normal(size=(2, 100))
rounds = make("sign").rounds(gradient, (residual,), NumpyOps())
(sent,) = next(rounds).tensors
try:
    rounds.send((sent,))
except StopIteration as done:
    decoded, (left,) = done.value
np.testing.assert_allclose(gradient + residual, decoded + left, rtol=1e-12)
assert load_config(None, ["exchange.compression=sign"]).exchange.compression == "sign"
assert way("outer+sign").compression == "sign" and "sign" not in standard()
assert exchange_options("ht.distribute", "sign", {}).compression == "sign"
"""
AN_OPTIMIZER = """
import numpy as np

import hvd_train
from hvd_train.config import load_config
from hvd_train.errors import ConfigError

optim = {"name": "signum", "momentum": 0.9, "weight_decay": 0.1, "lr": 0.01}
keys = {"model": {"name": "mlp", "hidden": [8]}, "data": {"name": "digits"}, "max_steps": 5, "precision": 64}
keys |= {"optim": optim, "tensorboard": False, "framework": FRAMEWORK, "run_dir": FRAMEWORK}
print(hvd_train.fit(keys).val_loss)
for name, words in (("lamb", "belongs to name: sgd or lars or rmsprop or signum or muon, not lamb"), ("signum", "")):
    try:
        load_config(None, [f"optim.name={name}", "optim.momentum=0.5"])
    except ConfigError as error:
        assert words and words in str(error), error
    else:
        assert not words
"""
AN_UPDATE = """
from hvd_train.errors import ConfigError
from hvd_train.mode_comparison.ways import standard, way
from hvd_train.script.shared.world import exchange_options

assert "doubling" in standard() and way("doubling").exact == "no"
try:
    exchange_options("ht.distribute", "none", {}, mode="doubling")
except ConfigError as error:
    assert "mode='doubling' works only with hvd-train fit" in str(error)
"""
# A mode that scripts may have: the file, the row, and what they are for.
A_FILE = "from hvd_train.update.outer import Outer\n\n\nclass Plain(Outer):\n    pass\n"
A_ROW = """    "plain": ModeSpec(
        "plain:Plain", _OUTER, deltas=True, interval="outer_steps", result="all", scripts=_IN_SCRIPTS
    ),
"""
A_MODE_OF_SCRIPTS = """
import numpy as np

from hvd_train.script.shared.world import exchange_options
from tests.rank_threads import run_ranks
from tests.script.test_local_training import Script


def work(communicator, mode):
    script = Script(communicator, mode=mode)
    script.steps(7)
    script.local.synchronize()
    return script.w


assert exchange_options("ht.distribute", "none", {"outer_steps": 3}, mode="plain").outer_steps == 3
plain, outer = (run_ranks(2, lambda communicator, mode=mode: work(communicator, mode)) for mode in ("plain", "outer"))
assert np.array_equal(plain, outer)
"""
# The program of the launcher: it calls the MPI that is there.
IBRUN = """#!/bin/sh
shift; ranks=$1; shift
exec MPIRUN --quiet -np $ranks --bind-to none --map-by slot:oversubscribe "$@"
"""
SECTIONS = ("A metric", "A compressor", "An optimizer", "An update", "A tracker", "A launcher")


def diff_of(section: str) -> str:
    """Return the diff in a section of the page."""
    text = re.split(r"^## ", guide.page("extending"), flags=re.MULTILINE)
    (part,) = (part for part in text if part.startswith(f"{section}\n"))
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)
    return diff


@pytest.mark.parametrize("section", SECTIONS)
def test_one_file_and_one_row_are_all_that_it_takes(section):
    diff = diff_of(section)
    assert len(re.findall(r"^diff --git", diff, re.MULTILINE)) == 2
    assert len(re.findall(r"^--- /dev/null", diff, re.MULTILINE)) == 1
    assert not re.findall(r"^-(?!-)", diff, re.MULTILINE), "nothing that is there changes"


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the package with all diffs of the page."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(PACKAGE, folder / "hvd_train", ignore=shutil.ignore_patterns("__pycache__"))
    for section in SECTIONS:
        words = ["git", "apply", "-"]
        subprocess.run(words, cwd=folder, input=diff_of(section), text=True, check=True, timeout=SECONDS)
    (folder / "hvd_train/update/plain.py").write_text(A_FILE)
    table = folder / "hvd_train/config/modes.py"
    table.write_text(table.read_text().replace("MODES = {\n", f"MODES = {{\n{A_ROW}"))
    return folder


def run(copy, *words, **variables):
    """Run Python with the copy of the package."""
    env = os.environ | {"PYTHONPATH": f"{copy}:{ROOT}"} | variables
    line = [sys.executable, *words]
    done = subprocess.run(line, cwd=copy, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_the_examples_are_what_they_say(copy):
    run(copy, "-c", "\n".join((A_METRIC, A_COMPRESSOR, AN_UPDATE, A_MODE_OF_SCRIPTS)))


def test_the_optimizer_is_the_same_in_both_frameworks(copy):
    losses = [run(copy, "-c", f"FRAMEWORK = {name!r}\n{AN_OPTIMIZER}")[-1] for name in ("pytorch", "tensorflow")]
    assert float(losses[0]) == pytest.approx(float(losses[1]), rel=1e-9)


RUNS = {
    "gradients": ["exchange.compression=sign", "optim.name=signum", "optim.momentum=0.9", "loggers=[losses]"],
    "weights": ["exchange.mode=doubling"],
}


@pytest.mark.skipif(not installed.mpi_built(), reason="Horovod was built without MPI")
@pytest.mark.parametrize("name", RUNS)
def test_ranks_train_with_the_examples(copy, name):
    (copy / "bin").mkdir(exist_ok=True)
    program = copy / "bin" / "ibrun"
    program.write_text(IBRUN.replace("MPIRUN", str(installed.find_tool("mpirun"))))
    program.chmod(0o755)
    sets = ["data.name=digits", "model.name=mlp", "model.hidden=[8]", "max_steps=10", "tensorboard=false"]
    sets += ["precision=64", "check_val_every_n_epoch=9", f"run_dir={name}", *RUNS[name]]
    words = [word for one in sets for word in ("--set", one)]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    path = f"{program.parent}:{os.environ['PATH']}"
    run(copy, "-m", "hvd_train", "fit", "-np", "2", "--launcher", "ibrun", *words, PATH=path, **root)
    summary = json.loads((copy / name / "summary.json").read_text())
    assert summary["steps"] == 10 and summary["world_size"] == 2
    if "loggers=[losses]" in sets:
        step, loss = (copy / name / "losses.txt").read_text().split()
        assert int(step) == 10 and float(loss) == summary["val_loss"]
