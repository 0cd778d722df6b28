"""``hvd-train modes``, and one of its measured trainings."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hvd_train.cli import options
from hvd_train.cli.launching import open_rendezvous, rank_words
from hvd_train.errors import ConfigError
from hvd_train.run_folder.terminal import say

if TYPE_CHECKING:
    from hvd_train.launch.hosts import Hosts


@click.command()
@options.configuration
@options.num_proc
@options.launcher(in_allocation=True)
@options.hosts
@click.option(
    "--modes",
    "names",
    metavar="NAME,...",
    help="Only these, combined as in outer+topk: synchronous, sharded, pipeline, modes and compressions of exchange.",
)
@click.option(
    "--steps", type=click.IntRange(min=4), default=120, show_default=True, help="Steps of each way in each turn."
)
@click.option(
    "--seconds",
    type=options.NumberRange(min=0),
    default=60.0,
    show_default=True,
    help="End each turn of a way after this many seconds of steps; 0: never.",
)
@click.option(
    "--turns",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Number of turns, each with new ranks; medians count, so other work disturbs all ways alike.",
)
@click.option(
    "-o", "--output", metavar="FILE.png", type=options.FILE, help="Draw the losses over samples and over seconds."
)
def modes(
    path: Path | None,
    sets: tuple[str, ...],
    num_proc: int | None,
    launcher: str,
    hosts: Hosts | None,
    names: str | None,
    steps: int,
    seconds: float,
    turns: int,
    output: Path | None,
) -> None:
    """Train a short while in each way there is, and compare; nothing is written but the picture.

    \b
    hvd-train modes -c job.yaml -np 2 -o modes.png
    hvd-train modes -c job.yaml -np 4 -H node1:2,node2:2      over the network between two hosts
    hvd-train modes -c job.yaml -np 4 --modes synchronous,int8,outer,outer+topk --steps 300

    The table has for each way: bytes that a rank sends in a step, the time of a step, memory of a rank, the loss after
    as many samples and after as many seconds as all ways have trained, and whether N ranks train as one does. The first
    quarter of the steps is not timed. A way that cannot run here has a row that says why.
    """
    from hvd_train.config import load_config
    from hvd_train.launch.environment import world
    from hvd_train.launch.start_plan import InAllocation, Restarts, plan
    from hvd_train.mode_comparison import results
    from hvd_train.mode_comparison import turns as measuring
    from hvd_train.mode_comparison.ways import ways

    if world().launcher:
        raise ConfigError("the ranks are started already", where=f"by {world().launcher}", fix="give -np instead")
    if num_proc is None:
        raise ConfigError("the number of ranks is missing", where="-np", fix="give -np 2, or more")
    chosen, config = ways(names, num_proc), load_config(path, sets)
    limits = measuring.Limits(steps, seconds, turns)
    ranks = plan(num_proc, launcher, hosts, None, None, Restarts(), dry_run=False)
    if ranks:
        ranks.check()  # report wrong hosts once, not for each way
    words = ["-np", str(num_proc), "--launcher", launcher, *(hosts.options if hosts else [])]
    with measuring.folder_of(config, shared=bool(hosts) or isinstance(ranks, InAllocation)) as folder:
        start = measuring.on_ranks(words)
        measured = measuring.measure(config, chosen, num_proc, limits, start, folder, _report)
    click.echo(results.text(measured, config, limits))
    if output:
        results.picture(measured, output)
        click.echo(f"picture: {output}")


def _report(line: str) -> None:
    say(line, err=True)


@click.command(hidden=True)
@options.configuration
@options.num_proc
@options.launcher(in_allocation=True)
@options.hosts
@click.option("--seconds", type=float, required=True)
@click.option("-o", "--output", type=options.FILE, required=True)
@options.verbose
def measure(
    path: Path | None,
    sets: tuple[str, ...],
    num_proc: int | None,
    launcher: str,
    hosts: Hosts | None,
    seconds: float,
    output: Path,
    verbose: bool,
) -> None:
    """Train once for ``modes``."""
    from hvd_train.config import load_config
    from hvd_train.jobs.measure import measure as job
    from hvd_train.launch.start_plan import Restarts, plan

    config = load_config(path, sets)
    if ranks := plan(num_proc, launcher, hosts, None, None, Restarts(), dry_run=False):
        sys.exit(ranks.run(rank_words(), config, verbose, once=True))
    open_rendezvous()
    sys.exit(job(config, seconds, output, verbose))
