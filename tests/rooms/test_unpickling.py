"""Nothing of a file or a network is unpickled or run: what could do so is called nowhere, or in its safe way."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.rooms.test_arrows import FILES, PACKAGE, ROOT, imports

PICKLERS = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "runpy", "code"}
# A function for own ranks, which passes through a folder of this process' own (0700), and what processes answer that a
# rank has forked, through a pipe between the two.
KNOWN = {"launch/function.py", "launch/run_function.py", "data/item_workers.py"}
NEVER = {
    "eval",
    "exec",
    "load_model",
    "read_pickle",
    "unsafe_load",
    "full_load",
    "load_all",
    "enable_unsafe_deserialization",
}
ZOOS = [file for zoo in ("pt_models", "tf_models") for file in (ROOT / zoo).glob("*.py")]


def called(node: ast.Call) -> tuple[str, str]:
    """("torch", "load") of ``torch.load(...)``, ("", "open") of ``open(...)``."""
    if isinstance(node.func, ast.Attribute):
        owner = node.func.value
        return (owner.id if isinstance(owner, ast.Name) else "?"), node.func.attr
    return "", node.func.id if isinstance(node.func, ast.Name) else ""


def unsafe(source: str) -> list[str]:
    """The calls that could run what a file holds."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        owner, name = called(node)
        given = {keyword.arg: getattr(keyword.value, "value", None) for keyword in node.keywords}
        wants = {"torch": ("weights_only", True), "np": ("allow_pickle", False), "numpy": ("allow_pickle", False)}
        bad = (name in NEVER and (not owner or name not in ("eval", "exec"))) or given.get("allow_pickle") is True
        bad |= (owner, name) == ("yaml", "load") or given.get("safe_mode") is False or given.get("shell") is True
        if name == "load" and owner in wants:
            key, value = wants[owner]
            bad |= given.get(key) is not value
        if bad:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("file", [*FILES, *ZOOS], ids=lambda f: str(f.relative_to(ROOT)))
def test_nothing_of_a_file_is_run(file: Path):
    assert unsafe(file.read_text()) == []
    packages = {module.split(".")[0] for module in imports(file)}
    assert not packages & PICKLERS or str(file.relative_to(PACKAGE)) in KNOWN


@pytest.mark.parametrize(
    "line",
    [
        "torch.load(path)", "torch.load(path, weights_only=False)", "np.load(path)", "np.load(path, allow_pickle=True)",
        "yaml.load(text)", "yaml.unsafe_load(text)", "keras.models.load_model(path)", "load_model(path)", "eval(text)",
        "exec(text)", "pandas.read_pickle(path)", "subprocess.run(line, shell=True)",
    ],
)  # fmt: skip
def test_the_look_finds_what_it_looks_for(line):
    assert unsafe(line)


def test_the_look_passes_what_is_safe():
    assert not unsafe("torch.load(path, weights_only=True); np.load(path, allow_pickle=False); yaml.safe_load(t)")
    assert not unsafe("model.eval(); json.load(stream)")
