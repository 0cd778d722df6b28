"""``hvd-train init``: write the files of a recipe, which are the code blocks of a page of the guide."""

from __future__ import annotations

import re
from pathlib import Path

import click

from hvd_train.cli import guide
from hvd_train.errors import ConfigError

BLOCK = re.compile(r"^```(?:python|yaml)\n# ([\w-]+\.(?:py|yaml))\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@click.command()
@click.argument("recipe", required=False)
@click.argument("folder", required=False, type=click.Path(file_okay=False, path_type=Path))
def init(recipe: str | None, folder: Path | None) -> None:
    """Write the files of a recipe to start from; without a recipe list all of them.

    \b
    hvd-train init gan digits-gan
    hvd-train guide gan                      the same recipe to read
    """
    from hvd_train.report.text_tables import table

    if recipe is None:
        rows = [[name, guide.title(name)] for name in guide.RECIPES]
        click.echo(table(["hvd-train init", "what"], rows))
        return
    files, commands = contents(recipe)
    folder = Path(recipe) if folder is None else folder
    write(folder, files)
    click.echo("\n  ".join([f"{folder}: {', '.join(files)}. Next:", f"cd {folder}", *commands]))


def contents(recipe: str) -> tuple[dict[str, str], list[str]]:
    """Return ({file name: text}, command lines) of a recipe."""
    if recipe not in guide.RECIPES:
        fix = guide.advice(recipe, guide.RECIPES)
        raise ConfigError(f"there is no recipe '{recipe}'", where="hvd-train init", fix=fix)
    text = guide.page(recipe)
    lines = [line for block in COMMANDS.findall(text) for line in block.splitlines()]
    return dict(BLOCK.findall(text)), [line for line in lines if not line.startswith(("hvd-train init ", "cd "))]


def write(folder: Path, files: dict[str, str]) -> None:
    """Write all files, or none if one of them already exists."""
    if there := [name for name in files if (folder / name).exists()]:
        raise ConfigError(f"{', '.join(there)} is there already", where=str(folder), fix="name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the files cannot be written: {error.strerror}", where=str(folder)) from error
