"""What the model zoos hold, read from their source text: listing them must not load a framework."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

from hvd_train.frameworks import FRAMEWORKS


def _folder(package: str) -> Path:
    spec = find_spec(package) if package else None
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else Path()


def listing() -> list[tuple[str, str, str, str]]:
    """(name, options, frameworks, first line of its docstring) of every model."""
    found: dict[str, tuple[list[str], str, str]] = {}
    for framework in FRAMEWORKS.values():
        for file in sorted(_folder(framework.zoo).glob("*.py")):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            build = next((n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "build"), None)
            if build is None:
                continue
            frameworks = found.get(file.stem, ([], "", ""))[0]
            doc = (ast.get_docstring(tree) or "").splitlines()
            found[file.stem] = ([*frameworks, framework.name], _options(build), doc[0] if doc else "")
    return [(name, options, ", ".join(where), doc) for name, (where, options, doc) in found.items()]


def _options(build: ast.FunctionDef) -> str:
    arguments, defaults = build.args.args, build.args.defaults
    given = arguments[len(arguments) - len(defaults) :]
    return ", ".join(
        f"{a.arg}={ast.unparse(d)}"
        for a, d in zip(given, defaults, strict=True)
        if a.arg != "image"  # the data's
    )
