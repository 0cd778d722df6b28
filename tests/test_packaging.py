"""The recipes of scripts/packaging fit hvd_train/engine/build.py and setup.cfg."""

from __future__ import annotations

import configparser
import contextlib
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml
from packaging.requirements import Requirement

from hvd_train.engine import build
from tests.limits import SECONDS

ROOT = Path(__file__).parents[1]
LONG = 3600  # seconds: the engine is compiled three times
FOLDER = ROOT / "scripts" / "packaging"
SPACK = FOLDER / "spack_repo" / "hvd_train" / "packages"
ARCHIVE = f"horovod-{build.VERSION}.tar.gz"
CONFIG = configparser.ConfigParser()
CONFIG.read(ROOT / "setup.cfg")
REQUIREMENTS = [Requirement(line) for line in CONFIG["options"]["install_requires"].split()]
MPI = Requirement(CONFIG["options.extras_require"]["mpi"])
# What an easyconfig calls otherwise.
EASYBUILD = {"numpy": "scipy-bundle", "pyarrow": "arrow"} | dict.fromkeys(
    ("rich", "psutil", "cloudpickle"), "python-bundle-pypi"
)


def spack_package(monkeypatch, name):
    """Run a package's file with stand-ins for Spack; return its class and the directives as (name, words, options)."""
    directives, scope = [], []
    package = ModuleType("spack.package")

    def directive(kind):
        def call(*words, **options):
            directives.append((kind, words, {key: value for each in scope for key, value in each.items()} | options))

        return call

    @contextlib.contextmanager
    def default_args(**options):
        scope.append(options)
        yield
        scope.pop()

    for kind in ("version", "variant", "depends_on", "license"):
        setattr(package, kind, directive(kind))
    package.default_args = default_args
    package.run_before = package.run_after = lambda phase: lambda method: method
    package.join_path = os.path.join
    package.mkdirp, package.install = os.makedirs, None
    package.working_dir = lambda *words, **options: contextlib.nullcontext()
    package.Executable = package.python = None
    package.__all__ = [key for key in vars(package) if not key.startswith("_")]
    python = ModuleType("spack_repo.builtin.build_systems.python")
    python.PythonPackage = type("PythonPackage", (), {})
    for module in (package, python):
        parts = module.__name__.split(".")
        for length in range(1, len(parts)):
            parent = ".".join(parts[:length])
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    content = runpy.run_path(str(SPACK / name / "package.py"))
    return content["".join(map(str.capitalize, name.split("_")))], directives


def easyconfig():
    constants = {"PYPI_SOURCE": "pypi/%(nameletter)s/%(name)s", "SOURCE_TAR_GZ": "%(name)s-%(version)s.tar.gz"}
    (path,) = (FOLDER / "easybuild").glob("*.eb")
    return path, runpy.run_path(str(path), constants)


def recipe():
    return yaml.safe_load((FOLDER / "conda" / "recipe.yaml").read_text())


def spack_range(requirement):
    """``>=2`` as ``@2:``, ``>=64,<80`` as ``@64:79``, ``>=3.11,<3.13`` as ``@3.11:3.12``."""
    bounds = {each.operator: each.version for each in requirement.specifier}
    if not bounds:
        return ""
    *head, last = bounds.get("<", "").split(".")
    return f"@{bounds['>=']}:" + (".".join([*head, str(int(last) - 1)]) if last else "")


def build_requirement():
    line = next(line for line in (ROOT / "pyproject.toml").read_text().splitlines() if line.startswith("requires"))
    return Requirement(line.split('"')[1])


def test_spack(monkeypatch):
    source, directives = spack_package(monkeypatch, "horovod_source")
    assert source.pypi == f"horovod/{ARCHIVE}"
    assert ("version", (build.VERSION,), {"sha256": build.SHA256, "expand": False}) in directives

    package, directives = spack_package(monkeypatch, "py_hvd_train")
    assert Path(package.git) == ROOT
    needs = {words[0]: options for kind, words, options in directives if kind == "depends_on"}
    assert needs[f"horovod-source@{build.VERSION}"] == {"type": "build"}
    assert f"py-{build_requirement().name}{spack_range(build_requirement())}" in needs
    python = Requirement("python" + CONFIG["options"]["python_requires"])
    assert needs[f"python{spack_range(python)}"] == {"type": ("build", "run")}
    for requirement in REQUIREMENTS:
        assert needs[f"py-{requirement.name.lower()}{spack_range(requirement)}"] == {"type": "run"}
    assert needs[f"py-{MPI.name}{spack_range(MPI)}"] == {"type": "run", "when": "+mpi"}
    variants = {f"+{words[0]}" for kind, words, _ in directives if kind == "variant"}
    assert {options["when"] for options in needs.values() if "when" in options} <= variants


def test_conda():
    content = recipe()
    assert content["context"] == {"version": CONFIG["metadata"]["version"], "horovod": build.VERSION}
    clone, archive = content["source"]
    assert (FOLDER / "conda" / clone["path"]).resolve() == ROOT
    assert archive["sha256"] == build.SHA256 and archive["file_name"] == archive["path"]
    needs = content["requirements"]
    assert str(build_requirement().specifier) == "<80,>=64" and "setuptools >=64,<80" in needs["host"]
    named = {"matplotlib": "matplotlib-base"}
    for requirement in (*REQUIREMENTS, MPI):
        name = named.get(requirement.name, requirement.name.lower())
        assert f"{name} {requirement.specifier}".strip() in needs["run"]
    variants = yaml.safe_load((FOLDER / "conda" / "variants.yaml").read_text())
    pythons = Requirement("python" + CONFIG["options"]["python_requires"]).specifier
    assert all(pythons.contains(version.split(".*")[0]) for version in variants["python"])


def test_easybuild():
    path, content = easyconfig()
    assert content["version"] == CONFIG["metadata"]["version"]
    chain = content["toolchain"]
    assert path.name == f"{content['name']}-{content['version']}-{chain['name']}-{chain['version']}.eb"
    *others, (name, version, options) = content["components"]
    assert (name, version) == (content["name"], content["version"])
    assert options["sources"][1]["filename"] == ARCHIVE and options["checksums"] == [None, build.SHA256]
    assert options["sources"][1]["source_urls"] == ["pypi/h/horovod"]
    versions = {need[0].lower(): need[1] for need in (*content["dependencies"], *others)}
    assert "patch-ng" in versions
    for requirement in REQUIREMENTS:
        module = EASYBUILD.get(requirement.name, requirement.name.lower())
        assert module in versions
        assert not requirement.specifier or requirement.specifier.contains(versions[module])
    assert Requirement("python" + CONFIG["options"]["python_requires"]).specifier.contains(versions["python"])


def spack_calls(monkeypatch, folder):
    package, _ = spack_package(monkeypatch, "py_hvd_train")
    calls = []
    prefix = SimpleNamespace(share=str(folder))
    spec = {
        "horovod-source": SimpleNamespace(prefix=prefix, version=build.VERSION),
        "mpi": SimpleNamespace(mpicc="mpicc"),
    }
    package.compile_engine.__globals__["python"] = lambda *words: calls.append(list(words))
    package.spec = type("Spec", (dict,), {"satisfies": lambda self, variant: True})(spec)
    package.stage = SimpleNamespace(source_path=str(folder))
    package().compile_engine()
    return calls


def shell_calls(folder, script, **variables):
    """Run a script in ``folder`` with a stand-in for Python that notes how it is called."""
    for name in ("python", "mpicc"):
        (folder / name).write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >> {folder}/calls\n')
        (folder / name).chmod(0o755)
    env = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"} | variables
    subprocess.run(["bash", "-euc", script], cwd=folder, env=env, check=True, timeout=SECONDS)
    return [line.split() for line in (folder / "calls").read_text().splitlines()]


def conda_calls(monkeypatch, folder):
    names = {"SRC_DIR": folder, "PREFIX": folder, "PYTHON": folder / "python"}
    script = (FOLDER / "conda" / recipe()["build"]["script"]).read_text()
    *calls, pip = shell_calls(folder, script, **{name: str(path) for name, path in names.items()})
    assert pip[:3] == ["-m", "pip", "install"] and {"--no-deps", "--no-index"} < set(pip)
    return calls


def easybuild_calls(monkeypatch, folder):
    steps = easyconfig()[1]["components"][-1][2]["preinstallopts"]
    filled = steps % {"builddir": folder, "installdir": folder, "pyshortver": "3.12"} + "true"
    return shell_calls(folder, filled, PYTHONPATH="")


@pytest.mark.parametrize("calls", [spack_calls, conda_calls, easybuild_calls])
def test_build_steps(monkeypatch, tmp_path, calls):
    """Each recipe compiles the engine from the archive, by options that build.py has."""
    (tmp_path / ARCHIVE).touch()
    (engine,) = calls(monkeypatch, tmp_path)
    assert engine[0] == "hvd_train/engine/build.py" and (ROOT / engine[0]).exists()
    options = dict(zip(engine[1::2], engine[2::2], strict=True))
    assert options["--archive"] == str(tmp_path / ARCHIVE) and Path(options["--mpi"]).name == "mpicc"
    shown = subprocess.run(
        [sys.executable, ROOT / engine[0], "--help"], capture_output=True, text=True, check=True, timeout=SECONDS
    )
    assert {*options} <= set(shown.stdout.replace("[", " ").split())


def test_archive_of_other_content(monkeypatch, tmp_path):
    """An archive with another hash is refused, and nothing is fetched in its place."""
    monkeypatch.setitem(sys.modules, "patch_ng", ModuleType("patch_ng"))
    monkeypatch.setattr(build.subprocess, "run", None)
    (tmp_path / ARCHIVE).write_bytes(b"other")
    with pytest.raises(SystemExit, match=f"error: .*{ARCHIVE} is not .* sha256 {build.SHA256}"):
        build.fetch(tmp_path, tmp_path / ARCHIVE)
    with pytest.raises(SystemExit, match="is not"):
        build.fetch(tmp_path, tmp_path / "none")


@pytest.mark.long("compiles the engine three times")
@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_a_wheel_needs_no_compiler(tmp_path_factory, framework):
    """On a PATH without one: ranks that Open MPI starts, and ranks over Gloo, end with the same bits."""
    folder = tmp_path_factory.getbasetemp() / "wheel"
    if not folder.exists():
        subprocess.run([ROOT / "scripts" / "wheel", "-o", folder / "dist"], check=True, timeout=LONG)
        install = ["install", "-q", "--no-deps", "--no-index", "--target", folder / "site"]
        subprocess.run([sys.executable, "-m", "pip", *install, *(folder / "dist").iterdir()], check=True)
    lib = folder / "site" / "hvd_train" / "engine" / "lib"
    assert {path.name for path in lib.iterdir()} == {"gloo.so", "mpich.so", "openmpi.so", "tensorflow.so"}
    path = str(Path(sys.prefix) / "bin")
    assert not any(shutil.which(compiler, path=path) for compiler in ("c++", "g++", "cc", "gcc"))
    env = {"PATH": path, "HOME": str(folder), "PYTHONPATH": str(folder / "site")}
    weights = []
    for launcher in ("mpirun", "horovodrun"):
        job = {"framework": framework, "run_dir": folder / f"{framework}-{launcher}", "max_steps": 20}
        line = [folder / "site" / "bin" / "hvd-train", "fit", "-np", "2", "--launcher", launcher]
        line += ["-c", ROOT / "scripts" / "configs" / "tiny.yaml"]
        line += [word for key, value in job.items() for word in ("--set", f"{key}={value}")]
        subprocess.run(line, cwd=folder, env=env, check=True, timeout=SECONDS)
        weights.append(json.loads((job["run_dir"] / "summary.json").read_text())["weights_sha256"])
    assert weights[0] == weights[1]
