"""``hvd-train guide``. Its pages are Markdown files in the package, so that they are installed with the program."""

from __future__ import annotations

from pathlib import Path

import click

import hvd_train
from hvd_train.errors import ConfigError

PAGES = Path(hvd_train.__file__).parent / "guide"
ORDER = (
    "first-run", "model-and-data", "images", "tables", "lengths", "own-loss", "optimizers", "learning-rate",
    "fine-tuning", "resume", "results", "verify", "sweep", "packing", "recipes", "python-api", "own-script",
    "pytorch-script", "keras-script", "migrate", "install", "clusters", "hosts", "slurm", "containers", "parallel",
    "performance", "ranks", "plan", "slow", "errors", "measurements", "glossary", "how-it-is-built", "extending",
)  # fmt: skip

MOST, SHOWN = 8, 80  # maximum pages of a search, and characters of each page's line

# Pages in the folder ``recipes``, which ``hvd-train init`` turns into files.
RECIPES = (
    "regression", "words-and-gaps", "multi-label", "imbalanced", "segmentation", "autoencoder", "k-fold",
    "forecasting", "text-classification", "transfer-learning", "trackers", "notebook", "gan", "reinforcement-learning",
    "from-pytorch", "from-lightning", "from-hugging-face", "from-accelerate", "from-keras", "from-scikit-learn",
)  # fmt: skip


@click.command()
@click.argument("topic", required=False)
def guide(topic: str | None) -> None:
    """Read the guide: a page, the list of them, or the lines of all pages that have a word.

    \b
    hvd-train guide first-run
    hvd-train guide freeze
    """
    from hvd_train.report.text_tables import table

    if topic is None:
        click.echo(table(["hvd-train guide", "what"], [[name, title(name)] for name in ORDER]))
    elif topic not in (*ORDER, *RECIPES) and (found := search(topic)):
        click.echo(f"no page is called '{topic}'; of these that have it, 'hvd-train guide PAGE' shows one")
        click.echo(table(["page", "lines", "the first one"], found))
    else:
        show(page(topic))


def title(topic: str) -> str:
    return page(topic).split("\n", 1)[0].removeprefix("# ")


def page(topic: str) -> str:
    if topic in RECIPES:
        return (PAGES / "recipes" / f"{topic}.md").read_text(encoding="utf-8")
    if topic not in ORDER:
        fix = advice(topic, (*ORDER, *RECIPES))
        raise ConfigError(f"the guide has no page '{topic}'", where="hvd-train guide", fix=fix)
    return (PAGES / f"{topic}.md").read_text(encoding="utf-8")


def search(words: str) -> list[tuple[str, int, str]]:
    """Return (page, number of lines with the words, the first such line), pages with most lines first."""
    found = []
    for name in (*ORDER, *RECIPES):
        lines = [line.strip() for line in page(name).splitlines() if words.lower() in line.lower()]
        if lines:
            found.append((name, len(lines), lines[0] if len(lines[0]) <= SHOWN else f"{lines[0][:SHOWN]}..."))
    return sorted(found, key=lambda row: -row[1])[:MOST]


def advice(name: str, names: tuple[str, ...]) -> str:
    from hvd_train.config.names import nearest

    near = nearest(name, names)
    return f"did you mean '{near}'?" if near else f"there are {', '.join(names)}"


def show(text: str) -> None:
    """Print Markdown, formatted on a terminal and as plain text to a pipe."""
    from rich.console import Console
    from rich.markdown import Markdown

    # Long lines are hard to read, however wide the terminal is.
    console = Console()
    console.print(Markdown(text), width=min(console.width, 120))
