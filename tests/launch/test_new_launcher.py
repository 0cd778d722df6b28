"""A new launcher is a file and a row of the table; nothing else in the package knows a launcher by name."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hvd_train
from hvd_train.launch.launchers import LAUNCHERS
from tests.limits import SECONDS

PACKAGE = Path(hvd_train.__file__).parent
ROOT = Path(__file__).parents[2]
TINY = ROOT / "scripts" / "configs" / "tiny.yaml"
ROW = "LAUNCHERS: list[Launcher] = ["


@pytest.fixture(scope="module")
def with_toy(tmp_path_factory):
    """run(words): hvd-train with one more launcher."""
    folder = tmp_path_factory.mktemp("toy")
    shutil.copytree(PACKAGE, folder / "hvd_train", ignore=shutil.ignore_patterns("__pycache__"))
    launchers = folder / "hvd_train" / "launch" / "launchers"
    shutil.copy(Path(__file__).with_name("toy.py"), launchers)
    table = launchers / "__init__.py"
    text = table.read_text()
    assert text.count(ROW) == 1
    row = f"from hvd_train.launch.launchers.toy import Toy\n\n{ROW}Toy(), "
    table.write_text(text.replace(ROW, row))

    def run(*words: str) -> subprocess.CompletedProcess:
        env = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}", "HVD_TRAIN_SECRET": "of the test"}
        line = [sys.executable, "-m", "hvd_train", *words]
        return subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, timeout=SECONDS)

    return run


def test_two_ranks_train(with_toy, tmp_path):
    run = tmp_path / "run"
    done = with_toy("fit", "--launcher", "toy", "-np", "2", "-c", str(TINY), "--run-dir", str(run))
    assert done.returncode == 0, done.stderr
    assert json.loads((run / "summary.json").read_text())["world_size"] == 2
    assert json.loads((run / "environment.json").read_text())["launcher"] == "toy"


def strings(file: Path) -> set[str]:
    return {node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)}


def test_nothing_else_knows_launchers_by_name():
    names = {launcher.name for launcher in LAUNCHERS}
    names |= {variable for launcher in LAUNCHERS for variable in launcher.place_variables[:2]}
    names -= {"HOROVOD_RANK", "HOROVOD_SIZE"}  # with these the rendezvous tells Horovod of the ranks
    # The engine looks for the MPI that started the rank.
    files = [file for file in PACKAGE.rglob("*.py") if not {"launchers", "engine"} & {*file.parts}]
    known = {file.name: names & strings(file) for file in files}
    assert not {name: found for name, found in known.items() if found}
