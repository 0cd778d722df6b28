"""``hvd-train fit``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hvd_train.cli import options
from hvd_train.cli.launching import check_run_folder, note_refusal, open_rendezvous, rank_words
from hvd_train.errors import ConfigError
from hvd_train.run_folder.terminal import say

if TYPE_CHECKING:
    from hvd_train.config import Config
    from hvd_train.launch.hosts import Hosts

LOCAL = ("auto", "mpirun", "horovodrun")  # launchers that start ranks on this host

starting = options.together(
    click.option(
        "--max-restarts",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="With -np: restart all ranks from the newest checkpoint when one dies, at most this many times.",
    ),
    click.option(
        "--min-np",
        type=click.IntRange(min=1),
        help="With --max-restarts: restart without the lost rank, down to this many ranks (default: with all).",
    ),
    click.option(
        "--spares",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="With --max-restarts: keep a process with the framework loaded, from which this many ranks restart.",
    ),
    options.hosts,
    click.option("--nnodes", type=click.IntRange(min=1), help="Use only this many of the hosts, or of Slurm's."),
    click.option("--nproc-per-node", type=click.IntRange(min=1), help="Ranks on each host, instead of -np."),
)


@click.command()
@options.configuration
@options.num_proc_or_auto
@options.launcher(in_allocation=True)
@click.option("--run-dir", type=click.Path(file_okay=False), help="Run folder: config, metrics, checkpoints, events.")
@click.option(
    "--resume",
    metavar="auto|last|best|PATH",
    help="Go on from a checkpoint: auto (newest, or from the start if there is none), last (newest), best (by "
    "checkpoint.monitor), or a folder.",
)
@click.option(
    "--allow-change", metavar="KEY", multiple=True, help="Let this key differ from the resumed run's; repeatable."
)
@click.option("--overwrite", is_flag=True, help="Replace the run that the run folder holds.")
@click.option("--seed", type=click.IntRange(min=0), help="Seed of first weights, sample order and dropout.")
@click.option(
    "--until-epoch",
    type=click.IntRange(min=1),
    help="Save and pause the run after this epoch; --resume auto continues to the same bits as without the pause.",
)
@starting
@click.option(
    "--dry-run", is_flag=True, help="Print the launcher's command, or without -np the configuration; start nothing."
)
@click.option(
    "--check", is_flag=True, help="Open data and model, take one step and one validation batch; write nothing."
)
@options.verbose
@options.quiet
def fit(
    path: Path | None,
    sets: tuple[str, ...],
    num_proc: int | str | None,
    launcher: str,
    run_dir: str | None,
    resume: str | None,
    allow_change: tuple[str, ...],
    overwrite: bool,
    seed: int | None,
    until_epoch: int | None,
    max_restarts: int,
    min_np: int | None,
    spares: int,
    hosts: Hosts | None,
    nnodes: int | None,
    nproc_per_node: int | None,
    dry_run: bool,
    check: bool,
    verbose: bool,
    quiet: bool,
) -> None:
    """Train a model.

    \b
    hvd-train fit -c job.yaml                       one rank
    hvd-train fit -np 2 -c job.yaml                 two ranks on this host
    hvd-train fit -np auto -c job.yaml              as many as train fastest on this host
    mpirun -np 2 hvd-train fit -c job.yaml          the same, started by mpirun
    hvd-train fit -np 2 -c job.yaml --resume auto   go on where the last run stopped
    hvd-train fit -np 2 -c job.yaml --check         try all of it with one step, and write nothing
    """
    from hvd_train.config import load_config
    from hvd_train.launch.environment import world
    from hvd_train.launch.signals import listen, stop_listening
    from hvd_train.launch.start_plan import Restarts, plan

    config = load_config(path, sets, run_dir=run_dir, seed=seed)
    restarts = Restarts(max_restarts, min_np, spares)
    words = rank_words()
    if isinstance(num_proc, str):
        if hosts or nnodes or nproc_per_node or launcher not in LOCAL or world().launcher:
            raise ConfigError("auto chooses ranks of this host alone", where="-np auto", fix="give their number")
        if dry_run:
            raise ConfigError("auto measures before it chooses", where="-np auto", fix="leave out --dry-run")
        check_run_folder(config, resume, overwrite)
        num_proc, more = _chosen(config, resume, launcher)
        config, words = load_config(path, (*sets, *more), run_dir=run_dir, seed=seed), [*words, *_as_options(more)]
    ranks = plan(num_proc, launcher, hosts, nnodes, nproc_per_node, restarts, dry_run)
    if dry_run:
        text = shlex.join(ranks.command(words)) + "\n" if ranks else _as_one_rank(config)
        click.echo(text, nl=False)
        if text:  # only rank 0 prints
            note_refusal(config, resume, overwrite)
    elif ranks:
        stop_listening()  # a launcher forwards signals instead of saving
        sys.exit(ranks.run(words, config, verbose, once=check))
    elif check:
        from hvd_train.jobs.check import check as check_run

        open_rendezvous()
        stop_listening()
        sys.exit(check_run(config, resume, allow_change, overwrite, verbose))
    else:
        from hvd_train.jobs.fit import fit as train

        open_rendezvous()
        sys.exit(train(config, resume, allow_change, overwrite, verbose, listen(), until_epoch, quiet))


def _chosen(config: Config, resume: str | None, launcher: str) -> tuple[int, list[str]]:
    """Return the ranks of ``-np auto``, and the keys to set for their threads. Says why."""
    from hvd_train.insight.auto_ranks import choose
    from hvd_train.insight.calibration import host_cores

    (ranks, threads), why = choose(config, resume, launcher)
    say(f"-np auto: {why}")
    return ranks, [] if config.threads != "auto" or threads == host_cores() // ranks else [f"threads={threads}"]


def _as_options(sets: list[str]) -> list[str]:
    return [word for one in sets for word in ("--set", one)]


def _as_one_rank(config: Config) -> str:
    """Return what ``--dry-run`` prints on a rank that would train in this process; "" on ranks above 0."""
    from hvd_train.config import resolved_yaml
    from hvd_train.launch.environment import world

    here = world()
    if here.rank:
        return ""
    ranks = f"{here.size} ranks, started by {here.launcher}" if here.launcher else "1 rank, this process"
    return f"# {ranks}. It would train with this configuration:\n{resolved_yaml(config)}"
