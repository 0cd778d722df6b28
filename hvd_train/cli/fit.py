"""``hvd-train fit``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hvd_train.cli import options
from hvd_train.cli.launching import note_refusal, open_rendezvous, rank_words

if TYPE_CHECKING:
    from hvd_train.config import Config
    from hvd_train.launch.hosts import Hosts

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
@options.num_proc
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
    num_proc: int | None,
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
    mpirun -np 2 hvd-train fit -c job.yaml          the same, started by mpirun
    hvd-train fit -np 2 -c job.yaml --resume auto   go on where the last run stopped
    hvd-train fit -np 2 -c job.yaml --check         try all of it with one step, and write nothing
    """
    from hvd_train.config import load_config
    from hvd_train.launch.signals import listen, stop_listening
    from hvd_train.launch.start_plan import Restarts, plan

    config = load_config(path, sets, run_dir=run_dir, seed=seed)
    restarts = Restarts(max_restarts, min_np, spares)
    ranks = plan(num_proc, launcher, hosts, nnodes, nproc_per_node, restarts, dry_run)
    if dry_run:
        text = shlex.join(ranks.command(rank_words())) + "\n" if ranks else _as_one_rank(config)
        click.echo(text, nl=False)
        if text:  # only rank 0 prints
            note_refusal(config, resume, overwrite)
    elif ranks:
        stop_listening()  # a launcher forwards signals instead of saving
        sys.exit(ranks.run(rank_words(), config, verbose, once=check))
    elif check:
        from hvd_train.jobs.check import check as check_run

        open_rendezvous()
        stop_listening()
        sys.exit(check_run(config, resume, allow_change, overwrite, verbose))
    else:
        from hvd_train.jobs.fit import fit as train

        open_rendezvous()
        sys.exit(train(config, resume, allow_change, overwrite, verbose, listen(), until_epoch, quiet))


def _as_one_rank(config: Config) -> str:
    """Return what ``--dry-run`` prints on a rank that would train in this process; "" on ranks above 0."""
    from hvd_train.config import resolved_yaml
    from hvd_train.launch.environment import world

    here = world()
    if here.rank:
        return ""
    ranks = f"{here.size} ranks, started by {here.launcher}" if here.launcher else "1 rank, this process"
    return f"# {ranks}. It would train with this configuration:\n{resolved_yaml(config)}"
