"""The worked examples of the guide's page extending: each diff is applied to a copy of the package, which trains."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hvd_train
from hvd_train.cli import guide

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
AN_UPDATE = """
import json
import subprocess
import sys

sets = ["data.name=digits", "model.name=mlp", "model.hidden=[8]", "max_steps=10", "tensorboard=false", "precision=64"]
sets += ["exchange.mode=doubling", "check_val_every_n_epoch=9", "run_dir=run"]
words = [word for one in sets for word in ("--set", one)]
subprocess.run([sys.executable, "-m", "hvd_train", "fit", "-np", "2", *words], check=True, timeout=300)
summary = json.load(open("run/summary.json"))
assert summary["steps"] == 10 and summary["world_size"] == 2
"""
EXAMPLES = {"A metric": A_METRIC, "An update": AN_UPDATE}


def diff_of(section: str) -> str:
    """Return the diff in a section of the page."""
    text = re.split(r"^## ", guide.page("extending"), flags=re.MULTILINE)
    (part,) = (part for part in text if part.startswith(f"{section}\n"))
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)
    return diff


@pytest.mark.parametrize("section", EXAMPLES)
def test_the_diff_of_the_page_is_all_that_it_takes(tmp_path, section):
    diff = diff_of(section)
    assert len(re.findall(r"^diff --git", diff, re.MULTILINE)) == 2, "one file and one row"
    assert len(re.findall(r"^--- /dev/null", diff, re.MULTILINE)) == 1
    shutil.copytree(PACKAGE, tmp_path / "hvd_train", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=diff, text=True, check=True, timeout=SECONDS)
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    line = [sys.executable, "-c", EXAMPLES[section]]
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
