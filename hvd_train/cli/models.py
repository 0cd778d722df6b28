"""``hvd-train models``. Parses the models' source, because listing them must not import a framework."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import click

from hvd_train.frameworks import FRAMEWORKS


@click.command()
def models() -> None:
    """List the models that both frameworks have, with their options."""
    from hvd_train.report.text_tables import table

    click.echo(table(["model.name", "options", "frameworks", "what"], listing()))
    click.echo("Your own: model.name 'package.module:function', called with input_shape, num_classes and the options.")


def listing() -> list[tuple[str, str, str, str]]:
    """Return (name, options, frameworks, first line of its docstring) of every model."""
    rows: dict[str, tuple[list[str], str, str]] = {}
    for framework in FRAMEWORKS.values():
        for file in sorted(_folder(framework.zoo).glob("*.py")):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            build = next((n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "build"), None)
            if build is None:
                continue
            frameworks = rows.get(file.stem, ([], "", ""))[0]
            # The options are the arguments of ``build`` with defaults. The others come from the data.
            doc = (ast.get_docstring(tree) or "").splitlines()
            rows[file.stem] = ([*frameworks, framework.name], _options(build), doc[0] if doc else "")
    return [(name, options, ", ".join(frameworks), doc) for name, (frameworks, options, doc) in rows.items()]


def _folder(package: str) -> Path:
    spec = find_spec(package) if package else None
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else Path()


def _options(build: ast.FunctionDef) -> str:
    arguments, defaults = build.args.args, build.args.defaults
    optional = arguments[len(arguments) - len(defaults) :]
    return ", ".join(
        f"{a.arg}={ast.unparse(d)}"
        for a, d in zip(optional, defaults, strict=True)
        if a.arg not in ("image", "vocabulary_size", "max_length")  # set by the data, not by the user
    )
