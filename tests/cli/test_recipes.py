"""Recipes: ``hvd-train init`` writes their files, which train as the page shows, on two ranks in both frameworks."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hvd_train.cli import guide, init
from hvd_train.cli.main import cli
from hvd_train.config import load_config
from hvd_train.errors import ConfigError
from tests.cli.test_guide import LINK, ROOT, as_typed, blocks, parse
from tests.limits import SECONDS

TEXT_LINES = 30
FOLDER = guide.PAGES / "recipes"
CONFIGURED = [name for name in guide.RECIPES if "job.yaml" in init.contents(name)[0]]
TORCH_ALONE = {"from-lightning", "from-pytorch", "from-hugging-face"}
# What each training of the page comes to, at least: a number of its last line.
REACHED = {
    "regression": (r"r2 ([\d.]+)", 0.45),
    "words-and-gaps": (r"accuracy ([\d.]+)", 0.95),
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
    "from-pytorch": (r"accuracy ([\d.]+)", 0.8),
    "from-scikit-learn": (r"\[16\] +3 +\S+ ± \S+ +([\d.]+)", 0.68),
    "from-lightning": (r"accuracy ([\d.]+)", 0.85),
    "from-hugging-face": (r'accuracy"?:? ([\d.]+)', 0.8),
    "gan": (r"generator ([\d.]+)", 0.3),
    "reinforcement-learning": (r"stands for (\d+) of 200", 50),
    "from-accelerate": (r"accuracy ([\d.]+)", 0.85),
    "from-keras": (r"accuracy ([\d.]+)", 0.85),
}
# Packages that hvd_train does not need. scripts/test installs those of Hugging Face.
PACKAGES = {"trackers": ("mlflow", "wandb"), "from-hugging-face": ("transformers", "datasets")}


def missing(name):
    return [package for package in PACKAGES.get(name, ()) if importlib.util.find_spec(package) is None]


def need_packages(name):
    if missing(name):
        pytest.skip(f"{', '.join(missing(name))}: not installed")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder with the files of each recipe."""
    top = tmp_path_factory.mktemp("recipes")
    for name in guide.RECIPES:
        init.write(top / name, init.contents(name)[0])
        for script in () if missing(name) else (top / name).glob("make_*.py"):
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
    assert printed == "images: gan.py. Next:\n  cd images\n  hvd-train run -np 2 -- python gan.py 20\n"
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


# What shortens the trainings of a page, whose commands are typed as they stand.
SHORTER = {
    "hvd-train": 'case "$1" in fit|sweep) exec REAL "$@" --set max_epochs=1 ;; run) '
    'case "$6" in pole.py) count=10 ;; *) count=1 ;; esac; exec REAL "$1" "$2" "$3" "$4" "$5" "$6" $count ;; '
    'esac; exec REAL "$@"',
    "pip": "exit 0",
}


def test_no_page_is_in_the_way_of_another(tmp_path, monkeypatch):
    """Type how each page begins, one after the other in one folder; four of them wrote into the same one."""
    for name in guide.RECIPES:
        monkeypatch.chdir(tmp_path)
        first, second, *_ = blocks(guide.page(name), "sh")[0].splitlines()
        if first.startswith("pip "):
            first, second = second, blocks(guide.page(name), "sh")[0].splitlines()[2]
        assert not CliRunner().invoke(cli, shlex.split(first)[1:]).exception, first
        assert shlex.split(second)[0] == "cd"
        monkeypatch.chdir(tmp_path / shlex.split(second)[1])
        assert all(Path(file).exists() for file in init.contents(name)[0])


@pytest.fixture(scope="module")
def typing(tmp_path_factory):
    """(a folder for all pages, variables): those of a user, who has set none for Open MPI; trainings are shortened."""
    top, tools = tmp_path_factory.mktemp("typed"), Path(sys.executable).parent
    for name, line in SHORTER.items():
        script = top / "bin" / name
        script.parent.mkdir(exist_ok=True)
        script.write_text(f"#!/bin/sh\n{line.replace('REAL', str(tools / name))}\n")
        script.chmod(0o755)
    kept = {key: x for key, x in os.environ.items() if not key.startswith(("OMPI_", "PRTE_"))}
    return top, kept | {"PATH": f"{top / 'bin'}:{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


ALWAYS = ("k-fold", "from-keras")  # of the other pages the files alone run each time
OTHERS = [name for name in guide.RECIPES if name not in ALWAYS]
LONG = pytest.mark.long("their files run each time, and test_guide parses their commands")


@pytest.mark.parametrize("name", [*ALWAYS, *(pytest.param(name, marks=LONG) for name in OTHERS)])
def test_a_page_as_typed(typing, name):
    """Type all that a page shows into a shell, in a folder that the other pages are typed in."""
    need_packages(name)
    folder, variables = typing
    line = ["bash", "-e", "-c", "\n".join(blocks(guide.page(name), "sh"))]
    run = subprocess.run(line, cwd=folder, env=variables, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert run.returncode == 0, (run.stdout[-2000:], run.stderr[-2000:])
    assert re.search(REACHED[name][0].replace("(", "-?(", 1), run.stdout), run.stdout[-2000:]


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_all_configurations_train_in_one_world(folders, tmp_path, framework):
    names = [name for name in CONFIGURED if framework == "pytorch" or name not in TORCH_ALONE]
    names = [name for name in names if name == "trackers" or not missing(name)]  # its runs need no logger
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


def test_cells_of_a_notebook_in_the_other_framework(folders):
    """No file holds the functions, as in a notebook."""
    printed = as_typed(["python", "-c", CELLS, "tensorflow"], folders / "notebook")
    assert re.search(r"^\{0\.01: 0\.\d+\}$", printed, re.MULTILINE)
    summary = json.loads((folders / "notebook" / "runs" / "0.01" / "summary.json").read_text())
    assert summary["framework"] == "tensorflow" and summary["world_size"] == 2 and summary["epochs"] == 1


SCRIPTS = """
import os, runpy, sys

top = sys.argv[1]
scripts = ["reinforcement-learning", "pole.py", "10"], ["from-accelerate", "train.py", "1"], ["gan", "gan.py", "1"]
for folder, *sys.argv in scripts:
    os.chdir(os.path.join(top, folder))
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_scripts_of_pytorch_in_one_world(folders):
    (folders / "scripts.py").write_text(SCRIPTS)
    printed = as_typed(["mpirun", "-np", "2", "python", "scripts.py", str(folders)], folders)
    assert re.search(r"^step 10: the pole stands for \d+ of 200$", printed, re.MULTILINE)
    assert re.search(r"^epoch 1: accuracy 0\.\d+$", printed, re.MULTILINE)
    assert re.search(REACHED["gan"][0], printed)


def trainings():
    """Yield (recipe, framework); None: the page's files as they are."""
    for name in guide.RECIPES:
        both = "or tensorflow" in guide.page(name)
        yield from ((name, framework) for framework in (("pytorch", "tensorflow") if both else (None,)))


@pytest.mark.long("each recipe trains for an epoch in every run")
@pytest.mark.parametrize(("name", "framework"), trainings())
def test_a_recipe_as_shown(tmp_path, name, framework):
    """Type all commands of the page; each training comes to what it should."""
    need_packages(name)
    _, lines = init.contents(name)
    as_typed(["hvd-train", "init", name, "here"], tmp_path)
    folder, results = tmp_path / "here", []
    for path in folder.iterdir() if framework else ():
        shown = re.sub(r"pytorch(\"?) ( *# or tensorflow)", rf"{framework}\1 \2", path.read_text())
        path.write_text(shown.replace(":pytorch", f":{framework}"))
    pattern, least = REACHED[name]
    for line in lines:
        printed = "" if line.startswith(("pip", "export")) else as_typed(shlex.split(line), folder)
        results += [float(number) for number in re.findall(pattern, printed)[-1:]]
    assert results[-1] >= least, results
    assert name != "transfer-learning" or results[-1] - results[-2] >= 0.08, "no better than from scratch"
