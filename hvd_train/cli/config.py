"""``hvd-train config``."""

from __future__ import annotations

from pathlib import Path

import click

from hvd_train.cli import options


@click.command()
@options.configuration
@click.option(
    "--explain",
    metavar="[KEY]",
    is_flag=False,
    flag_value="",
    help="Type, default and meaning of every key, of a section's keys, or of one key, and what they do not go with.",
)
@click.option("--plot", type=click.Choice(["lr"]), help="Draw the learning rate of every step, as -np ranks train.")
@click.option("-np", "--num-proc", type=click.IntRange(min=1), default=1, help="Number of ranks for --plot (1).")
@click.option("-o", "--output", metavar="FILE.png", type=options.FILE, help="Picture of --plot.")
def config(
    path: Path | None, sets: tuple[str, ...], explain: str | None, plot: str | None, num_proc: int, output: Path | None
) -> None:
    """Print the resolved configuration, explain its keys, or draw the learning rate.

    \b
    hvd-train config > job.yaml          a full file to start from
    hvd-train config -c job.yaml         what the defaults make of it
    hvd-train config --explain optim     the keys of a section, or one key: optim.lr
    hvd-train config -c job.yaml --plot lr -np 4 -o lr.png
    """
    from hvd_train.config import explained, load_config, resolved_yaml

    if plot:
        from hvd_train.jobs.rates import draw_rates

        click.echo(draw_rates(load_config(path, sets), num_proc, output or Path(f"{plot}.png")))
        return
    if explain is None:
        click.echo(resolved_yaml(load_config(path, sets)), nl=False)
        return
    from hvd_train.config.conflicts import sentences
    from hvd_train.report.text_tables import explanations

    click.echo(explanations(explained(explain), sentences(explain)))
