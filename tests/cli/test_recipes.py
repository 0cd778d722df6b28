"""Recipes: ``hvd-train init`` writes their files, which train as the page shows, on two ranks."""

from __future__ import annotations

import re
import shlex

import pytest
from click.testing import CliRunner

from hvd_train.cli import guide, init
from hvd_train.cli.main import cli
from hvd_train.config import load_config
from hvd_train.errors import ConfigError
from tests.cli.test_guide import LINK, as_typed, parse

TEXT_LINES = 30
FOLDER = guide.PAGES / "recipes"
# What the page's commands come to, at least: a metric of the last line, or a number of the script's last line.
REACHED = {
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


@pytest.mark.long("each script runs for a short while in every run")
@pytest.mark.parametrize("name", guide.RECIPES)
def test_a_recipe_as_shown(tmp_path, name):
    """Type all commands of the page; the script comes to what it should."""
    as_typed(["hvd-train", "init", name, "here"], tmp_path)
    for line in init.contents(name)[1]:
        printed = as_typed(shlex.split(line), tmp_path / "here")
    pattern, least = REACHED[name]
    assert float(re.findall(pattern, printed)[-1]) >= least
