"""The rooms of the house: a file imports only its own room and lower ones, and looking in loads no framework."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import hvd_train
from tests.limits import SECONDS

PACKAGE = Path(hvd_train.__file__).parent
ROOT = PACKAGE.parent
ROOMS = {
    "engine": 0, "errors": 0, "files": 0, "faults": 0, "config": 0, "frameworks": 0, "installation": 0, "protocol": 0,
    "metrics": 0, "compression": 0, "data": 1, "task": 1, "checkpoint": 2, "update": 2, "run_folder": 3, "core": 4,
    "launch": 5, "report": 5, "frontends": 6, "session": 7, "jobs": 8, "script": 8, "api": 9, "doctor": 9, "verify": 9,
    "sweep": 9, "insight": 9, "mode_comparison": 9, "torch": 9, "keras": 9, "scaling": 10, "cli": 11, "__main__": 12,
    "__init__": 0,
}  # fmt: skip
FRAMEWORKS = {"torch", "tensorflow", "keras", "jax", "horovod", "mpi4py"}
FILES = sorted(PACKAGE.rglob("*.py"))


def room(module: str) -> str:
    """hvd_train.data.loader -> data; hvd_train itself -> __init__."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}: relative import"
            packages = node.module == "hvd_train"
            found |= {f"hvd_train.{a.name}" if packages and a.name in ROOMS else node.module for a in node.names}
    return found


def own_room(file: Path) -> str:
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_arrows_point_down(file):
    here = own_room(file)
    for module in imports(file):
        if module.split(".")[0] != "hvd_train":
            continue
        there = room(module)
        down = ROOMS[there] < ROOMS[here] or ROOMS[there] == 0
        assert here == there or down, f"{here} imports {module}"


def test_no_files_import_each_other_in_a_circle():
    """Also by imports within functions; an ``__init__`` hands names on."""
    names = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in FILES}
    graph = {}
    for name, file in names.items():
        froms = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
        taken = imports(file) | {f"{node.module}.{alias.name}" for node in froms for alias in node.names}
        graph[name] = taken & names.keys()
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_the_top_level_is_fixed():
    """A compiler's output lay there, committed by mistake."""
    git = ["git", "-C", str(ROOT), "ls-files"]
    listed = subprocess.run(git, capture_output=True, text=True, timeout=SECONDS)
    if listed.returncode:
        pytest.skip("no git checkout")
    known = {"setup.cfg", "README.md", "hvd_train", "tf_models", "pt_models", "scripts", "tests", "pyproject.toml"}
    known |= {"LICENSE", "CONTRIBUTING.md", "CHANGELOG.md", "CITATION.cff", ".gitignore", ".ci"}
    assert {line.split("/")[0] for line in listed.stdout.splitlines()} == known


@pytest.mark.parametrize("part", ["shared", "pytorch", "keras"])
def test_scripts_of_two_frameworks_share_only_what_is_shared(part):
    for file in (PACKAGE / "script" / part).rglob("*.py"):
        parts = {module.split(".")[2] for module in imports(file) if module.startswith("hvd_train.script.")}
        assert parts <= {part, "shared"}, file


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_who_knows_what(file):
    packages = {module.split(".")[0] for module in imports(file)}
    here = own_room(file)
    if here not in ("frontends", "script"):
        assert not packages & FRAMEWORKS, "only front-ends, and what a user's script imports, know a framework"
    if here != "cli":
        assert "click" not in packages
    if here == "compression":
        assert packages - sys.stdlib_module_names <= {"numpy", "hvd_train"}
        assert {m for m in imports(file) if m.startswith("hvd_train")} <= {"hvd_train.protocol"} | {
            f"hvd_train.compression.{f.stem}" for f in (PACKAGE / "compression").glob("*.py")
        }


@pytest.mark.parametrize("zoo", ["pt_models", "tf_models"])
def test_models_are_plain_framework_code(zoo):
    for file in (ROOT / zoo).glob("*.py"):
        packages = {module.split(".")[0] for module in imports(file)}
        assert packages <= {zoo, "__future__", "math", "torch" if zoo == "pt_models" else "keras"}


def test_both_zoos_hold_the_same_models():
    names = [{file.name for file in (ROOT / zoo).glob("*.py")} for zoo in ("pt_models", "tf_models")]
    assert names[0] == names[1]


def loaded(code: str) -> set[str]:
    line = f"{code}\nimport sys; print(' '.join(sys.modules))"
    run = subprocess.run(
        [sys.executable, "-c", line], cwd=ROOT, capture_output=True, text=True, check=True, timeout=SECONDS
    )
    return {name.split(".")[0] for name in run.stdout.splitlines()[-1].split()}


@pytest.mark.parametrize(
    "code",
    [
        "import hvd_train",
        "import hvd_train.jobs.fit, hvd_train.core.loop, hvd_train.launch, hvd_train.report.plots",
        "from hvd_train.config import load_config; load_config()",
        "from hvd_train.cli.main import cli; cli(['fit', '--help'], standalone_mode=False)",
        "from hvd_train.cli.main import cli; cli(['models'], standalone_mode=False)",
        "from hvd_train.cli.main import cli; cli(['data'], standalone_mode=False)",
        "from hvd_train.cli.main import cli; cli(['config', '--explain'], standalone_mode=False)",
    ],
)
def test_looking_in_loads_no_framework(code):
    assert not loaded(code) & FRAMEWORKS


def test_help_loads_little():
    """What half a second allows: help needs click alone."""
    heavy = FRAMEWORKS | {"numpy", "pydantic", "rich", "matplotlib", "sklearn"}
    assert not loaded("from hvd_train.cli.main import cli; cli(['--help'], standalone_mode=False)") & heavy


def names_of(file: Path) -> set[str]:
    """What a module binds at its top."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        parts = [node, *ast.walk(node)] if isinstance(node, ast.If | ast.Try | ast.With) else [node]
        for part in parts:
            if isinstance(part, ast.FunctionDef | ast.ClassDef):
                found.add(part.name)
            elif isinstance(part, ast.Import | ast.ImportFrom):
                found |= {alias.asname or alias.name for alias in part.names}
            elif isinstance(part, ast.Assign | ast.AnnAssign):
                targets = part.targets if isinstance(part, ast.Assign) else [part.target]
                found |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return found


@pytest.mark.parametrize(
    "file", sorted((ROOT / "scripts").rglob("*.py")) + [ROOT / "scripts" / "bench"], ids=lambda p: p.name
)
def test_the_benchmarks_ask_for_what_is_there(file):
    """They run for minutes and in no test: what they import of the package must not move away unseen."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hvd_train":
            path = ROOT.joinpath(*node.module.split("."))
            module = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            for alias in node.names:
                there = path.is_dir() and ((path / f"{alias.name}.py").exists() or (path / alias.name).is_dir())
                assert there or alias.name in names_of(module), f"{node.module} has no {alias.name}"
