"""Recipes: ``hvd-train init`` writes their files, which train as the page shows, on two ranks in both frameworks."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from click.testing import CliRunner

from hvd_train.cli import guide, init
from hvd_train.cli.main import cli
from hvd_train.config import load_config
from hvd_train.errors import ConfigError
from tests.cli.test_guide import LINK, as_typed, parse

TEXT_LINES = 30
FOLDER = guide.PAGES / "recipes"
CONFIGURED = [name for name in guide.RECIPES if "job.yaml" in init.contents(name)[0]]
TORCH_ALONE = {"from-lightning"}
# What each training of the page comes to, at least: a number of its last line.
REACHED = {
    "regression": (r"r2 ([\d.]+)", 0.45),
    "multi-label": (r"f1 macro ([\d.]+)", 0.9),
    "imbalanced": (r"balanced accuracy ([\d.]+)", 0.85),
    "segmentation": (r"iou ([\d.]+)", 0.4),
    "autoencoder": (r"r2 ([\d.]+)", 0.8),
    "k-fold": (r"± \S+ +([\d.]+) ± \S+ +[\d.]+ ±", 0.9),  # the loss stands before it
    "forecasting": (r"r2 ([\d.]+)", 0.45),
    "text-classification": (r"accuracy ([\d.]+)", 0.85),
    "transfer-learning": (r"done: .* accuracy ([\d.]+)", 0.57),
    "trackers": (r"accuracy ([\d.]+)", 0.8),
    "notebook": (r"0\.01: ([\d.]+)", 0.85),
    "from-lightning": (r"accuracy ([\d.]+)", 0.85),
    "gan": (r"generator ([\d.]+)", 0.3),
    "reinforcement-learning": (r"stands for (\d+) of 200", 50),
    "from-accelerate": (r"accuracy ([\d.]+)", 0.85),
    "from-keras": (r"accuracy ([\d.]+)", 0.85),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder with the files of each recipe."""
    top = tmp_path_factory.mktemp("recipes")
    for name in guide.RECIPES:
        init.write(top / name, init.contents(name)[0])
        for script in (top / name).glob("make_*.py"):
            subprocess.run([sys.executable, script.name], cwd=script.parent, check=True, timeout=60)
    return top


def test_all_pages_are_recipes():
    assert {path.stem for path in FOLDER.glob("*.md")} == {*guide.RECIPES}
    listed = re.findall(r"^\| \[([\w-]+)\]\(recipes/\1\.md\)", guide.page("recipes"), re.MULTILINE)
    assert listed == [*guide.RECIPES]


@pytest.mark.parametrize("name", guide.RECIPES)
def test_a_page_is_short_and_names_what_there_is(name, tmp_path):
    text = guide.page(name)
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert len([line for line in prose.splitlines() if line.strip()]) <= TEXT_LINES
    assert all((FOLDER / target).exists() for target in LINK.findall(text))
    files, commands = init.contents(name)
    assert files and commands and len(re.findall(r"^```(?:python|yaml)$", text, re.MULTILINE)) == len(files)
    for file, content in files.items():
        (tmp_path / file).write_text(content)
        if file.endswith(".py"):
            compile(content, file, "exec")
    if "job.yaml" in files:
        load_config(tmp_path / "job.yaml")
    for line in commands:
        if line.startswith("hvd-train"):
            parse(shlex.split(line)[1:])


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke
    assert all(f"{name} " in run(cli, ["init"]).output for name in guide.RECIPES)
    printed = run(cli, ["init", "gan", "images"]).output
    assert printed == "images: gan.py. Next:\n  cd images\n  mpirun -np 2 python gan.py 20\n"
    for words, what in (
        (["gan", "images"], "gan.py is there already; images; name another folder"),
        (["from-kears"], "there is no recipe 'from-kears'; hvd-train init; did you mean 'from-keras'?"),
    ):
        error = run(cli, ["init", *words]).exception
        assert isinstance(error, ConfigError) and str(error) == what
    assert run(cli, ["guide", "gan"]).output and not run(cli, ["init", "gan"]).exception
    assert (tmp_path / "gan" / "gan.py").exists()


ALL = """
import importlib.util, os, sys
from pathlib import Path

import hvd_train
from hvd_train.config import load_config

top, framework, *names = sys.argv[1:]
for name in names:
    os.chdir(os.path.join(top, name))
    for path in sorted(Path().glob("*.yaml")):  # job.yaml comes after before.yaml, whose weights it takes
        model = load_config(path).model.name.replace(":pytorch", f":{framework}")
        sets = ["max_epochs=1", f"framework={framework}", f"model.name={model}"]
        if importlib.util.find_spec("mlflow") is None and "mlflow" in path.read_text():
            sets.append("loggers=[csv]")
        hvd_train.fit(load_config(path, sets))
"""


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_all_configurations_train_in_one_world(folders, tmp_path, framework):
    names = [name for name in CONFIGURED if framework == "pytorch" or name not in TORCH_ALONE]
    shutil.copytree(folders, tmp_path, dirs_exist_ok=True)
    (tmp_path / "all.py").write_text(ALL)
    as_typed(["mpirun", "-np", "2", "python", "all.py", str(tmp_path), framework, *names], tmp_path)
    for name in names:
        folder = tmp_path / name
        for path in folder.glob("*.yaml"):
            summary = json.loads((folder / load_config(path).run_dir / "summary.json").read_text())
            assert summary["world_size"] == 2 and summary["epochs"] == 1 and summary["framework"] == framework


CELLS = """
import __main__, re, sys

SHORT = {"epochs=5": "epochs=1", "(0.001, 0.01)": "(0.01,)", '"pytorch"  # or': f'"{sys.argv[1]}"  # or'}
for number, cell in enumerate(re.split("^# %%", open("cells.py").read(), flags=re.M)):
    for shown, short in SHORT.items():
        cell = cell.replace(shown, short)
    exec(compile(f"#{cell}", f"cell {number}", "exec"), vars(__main__))
"""


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_cells_of_a_notebook(folders, framework):
    """No file holds the functions, as in a notebook."""
    printed = as_typed(["python", "-c", CELLS, framework], folders / "notebook")
    assert re.search(r"^\{0\.01: 0\.\d+\}$", printed, re.MULTILINE)
    summary = json.loads((folders / "notebook" / "runs" / "0.01" / "summary.json").read_text())
    assert summary["framework"] == framework and summary["world_size"] == 2 and summary["epochs"] == 1


SCRIPTS = """
import os, runpy, sys

for folder, script in (("gan", "gan.py"), ("reinforcement-learning", "pole.py"), ("from-accelerate", "train.py")):
    os.chdir(os.path.join(sys.argv[1], folder))
    sys.argv[2:] = ["10" if script == "pole.py" else "1"]
    words, sys.argv = sys.argv, [script, sys.argv[2]]
    runpy.run_path(script, run_name="__main__")
    sys.argv = words
"""


def test_scripts_of_pytorch_in_one_world(folders):
    (folders / "scripts.py").write_text(SCRIPTS)
    printed = as_typed(["mpirun", "-np", "2", "python", "scripts.py", str(folders)], folders)
    assert re.search(r"^epoch 1: critic [\d.]+, generator", printed, re.MULTILINE)
    assert re.search(r"^step 10: the pole stands for \d+ of 200$", printed, re.MULTILINE)
    assert re.search(r"^epoch 1: accuracy 0\.\d+$", printed, re.MULTILINE)
    assert (folders / "gan" / "gan.safetensors").exists()


def test_the_script_of_keras(folders):
    printed = as_typed(["mpirun", "-np", "2", "python", "train.py", "1"], folders / "from-keras")
    assert re.search(r"^accuracy 0\.\d+$", printed, re.MULTILINE)


def trainings():
    """Yield (recipe, framework); None: the page's files as they are."""
    for name in guide.RECIPES:
        both = "or tensorflow" in guide.page(name)
        yield from ((name, framework) for framework in (("pytorch", "tensorflow") if both else (None,)))


@pytest.mark.long("each recipe trains for an epoch in every run")
@pytest.mark.parametrize(("name", "framework"), trainings())
def test_a_recipe_as_shown(tmp_path, name, framework):
    """Type all commands of the page; each training comes to what it should."""
    if name == "trackers" and not all(importlib.util.find_spec(package) for package in ("mlflow", "wandb")):
        pytest.skip("MLflow or Weights & Biases is not installed")
    _, lines = init.contents(name)
    as_typed(["hvd-train", "init", name, "here"], tmp_path)
    folder, results = tmp_path / "here", []
    for path in folder.iterdir() if framework else ():
        shown = re.sub(r"pytorch(\"?) ( *# or tensorflow)", rf"{framework}\1 \2", path.read_text())
        path.write_text(shown.replace(":pytorch", f":{framework}"))
    pattern, least = REACHED[name]
    for line in lines:
        printed = "" if line.startswith("pip") else as_typed(shlex.split(line), folder)
        results += [float(number) for number in re.findall(pattern, printed)[-1:]]
    assert results[-1] >= least, results
    assert name != "transfer-learning" or results[-1] - results[-2] >= 0.08, "no better than from scratch"
