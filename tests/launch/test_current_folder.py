"""Files of the folder in which a command runs: they take the place of no module, and are found where they are named."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import hvd_train
from hvd_train.config import user_code
from hvd_train.config.user_code import source_of, user_function, user_module
from hvd_train.errors import ConfigError
from hvd_train.frontends.user_model import find_model
from hvd_train.launch.launchers.installed import python
from tests.limits import SECONDS

PACKAGE = Path(hvd_train.__file__).parent
# Of the standard library, of ours and of what we load late.
NAMES = ("random", "csv", "json", "click", "yaml", "numpy", "torch", "psutil", "safetensors", "hvd_train")
PLANTED = "import pathlib; pathlib.Path({mark!r}).touch(); raise SystemExit(99)\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A current folder with a file of each of these names, none of which may run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setattr(user_code, "_folder", [])
    monkeypatch.setattr(user_code, "_added", [])
    mark = tmp_path / "planted.txt"
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(PLANTED.format(mark=str(mark)))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("own_") or name.partition(".")[0] == "examples"]:
        del sys.modules[name]
    assert not mark.exists()


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun"])
def test_ranks(folder, launcher):
    """Over Gloo, the starter as well."""
    line = [
        str(Path(sys.executable).parent / "hvd-train"),
        "eval",
        "-np",
        "2",
        "--launcher",
        launcher,
        "--run-dir",
        "x",
    ]
    done = subprocess.run(line, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode != 99 and "x" in done.stderr, done.stderr


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_environment_of_a_rank_is_set_before_your_modules_load_a_framework(tmp_path, ranks):
    """A file with both data and model imports it at its top, before the model is built."""
    code = """
        import os
        seen = {name: os.environ.get(name) for name in ("KERAS_BACKEND", "OMP_NUM_THREADS")}
        assert seen == {"KERAS_BACKEND": "tensorflow", "OMP_NUM_THREADS": "3"}, seen
        raise ValueError("all as it should be")
    """
    (tmp_path / "own_data.py").write_text(textwrap.dedent(code))
    line = [
        str(Path(sys.executable).parent / "hvd-train"),
        "fit",
        "--set",
        "framework=tensorflow",
        "--set",
        "threads=3",
    ]
    line += ["--set", "data.name=own_data:data", *(["-np", "2"] if ranks == 2 else [])]
    clean = {k: v for k, v in os.environ.items() if k not in ("KERAS_BACKEND", "OMP_NUM_THREADS")}
    done = subprocess.run(line, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert "all as it should be" in done.stderr and done.returncode == 3, done.stderr


def test_python_m(folder):
    (folder / "hvd_train.py").unlink()  # Python itself would take it
    done = subprocess.run(
        [sys.executable, "-m", "hvd_train", "config"], capture_output=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_start():
    """All of the package start Python with -P, or with -I, or a script of the user."""
    starts = [
        (str(file.relative_to(PACKAGE)), words)
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.List | ast.Tuple)
        and "sys.executable" in (words := [ast.unparse(word) for word in node.elts])
        and {"'-m'", "'-c'"} & {*words}
    ]
    assert [file for file, words in starts if not {"'-P'", "'-I'"} & {*words}] == []
    named = {"launch/launchers/installed.py", "launch/hosts.py", "doctor/host.py", "launch/heartbeat.py"} | {
        "engine/build.py"
    }
    assert named == {file for file, _ in starts}
    assert python("x") == [sys.executable, "-P", "-m", "x"]


def test_a_function_on_ranks(folder):
    """The ranks find a module of the script's folder, and everything else where it belongs."""
    (folder / "own_helper.py").write_text("def here(): return __file__\n")
    (folder / "examples.py").write_text("def here(): return __file__\n")
    (folder / "own_script.py").write_text(
        "import sys\n"
        "script = sys.path.pop(0)\n"  # the caller loads ours without it
        "import hvd_train.launch.function, csv, json, numpy, cloudpickle, psutil\n"
        "sys.path.insert(0, script)\n"
        "import own_helper, examples\n"
        "def work():\n"
        "    import click, csv, torch, psutil\n"
        "    import own_late\n"
        "    return own_helper.here(), examples.here(), own_late.N\n"
        "print(hvd_train.launch(work, np=2, launcher='horovodrun')[1])\n"
    )
    (folder / "own_late.py").write_text("N = 1\n")
    done = subprocess.run(
        [sys.executable, "own_script.py"], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    wanted = str(folder / "own_helper.py"), str(folder / "examples.py"), 1
    assert (done.returncode, done.stdout) == (0, f"{wanted}\n"), done.stderr


def test_named_modules(folder):
    """The folder of the configuration comes before the current one, and both come last for all that is not named."""
    (folder / "own_model.py").write_text(
        "import own_helper, random\ndef build(): return own_helper.N, random.random()\n"
    )
    (folder / "own_helper.py").write_text("N = 3\n")
    assert user_function("own_model:build", "x")()[0] == 3
    assert sys.path[-1] == str(folder) and source_of("own_model:build") == [folder / "own_model.py"]
    code = folder / "code"
    code.mkdir()
    (code / "own_second.py").write_text("N = 'code'\n")
    (folder / "own_second.py").write_text("N = 'here'\n")
    user_code.look_in(str(code))
    assert user_module("own_second", "x").N == "code" and sys.path[-2:] == [str(code), str(folder)]
    assert source_of("own_second:f") == [code / "own_second.py"]


def test_a_package_of_a_library_s_name(folder):
    """Wheels leave packages called ``examples`` and ``tests`` behind; what the configuration names is the user's."""
    (folder / "examples").mkdir()
    (folder / "examples" / "own.py").write_text("def f(): return 1\n")
    assert user_function("examples.own:f", "x")() == 1
    assert source_of("examples.own:f") == [folder / "examples", folder / "examples" / "own.py"]


def test_two_modules_of_one_name(folder):
    """Neither is taken: the user may mean either."""
    (folder / "tokenizers").mkdir()
    (folder / "tokenizers" / "__init__.py").write_text("def f(): return 1\n")
    with pytest.raises(ConfigError, match=rf"two modules 'tokenizers': {folder}/tokenizers/__init__.py and .*rename"):
        user_function("tokenizers:f", "model.name")
    assert user_function("random:random", "x")() < 1  # the standard library's, as everywhere


@pytest.mark.parametrize(("name", "yours"), [("random:network", "random.py"), ("code.own:network", "code")])
def test_a_module_that_one_of_python_hides(folder, name, yours):
    """It said that Python's own ``random.py`` has no such function, and did not look like the user's fault."""
    (folder / "code").mkdir()
    (folder / "code" / "own.py").write_text("def network(): return 1\n")
    for find in (lambda: user_function(name, "data.name"), lambda: find_model("pt_models", name, {})):
        with pytest.raises(
            ConfigError,
            match=rf"Python itself has a module '.*, which is taken instead of yours: rename {folder}/{yours}$",
        ):
            find()
    with pytest.raises(ConfigError, match=r"did you mean 'shuffle'") as caught:
        (folder / "random.py").unlink()
        user_function("random:shufle", "data.name")
    assert "Python itself" not in str(caught.value)
