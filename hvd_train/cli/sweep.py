"""``hvd-train sweep``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from hvd_train.cli import options
from hvd_train.cli.launching import start_ranks
from hvd_train.errors import ConfigError


@click.command()
@options.configuration
@options.trials
@click.option(
    "--halving",
    metavar="ETA",
    type=click.IntRange(min=2),
    help="Successive halving: train all a little, go on with the best 1 in ETA, ETA times as long, and so on.",
)
@options.num_proc
@click.option(
    "--ranks-per-trial", type=click.IntRange(min=1), help="Split the ranks into groups, which train side by side."
)
@options.any_launcher
@click.option("--run-dir", type=click.Path(file_okay=False), help="The sweep's folder; each trial has one in it.")
@click.option("--resume", is_flag=True, help="Run only missing or failed trials.")
@click.option("--collect", is_flag=True, help="Run nothing: write the results of the sweep that --run-dir holds.")
@options.verbose
def sweep(
    path: Path | None,
    sets: tuple[str, ...],
    params: tuple[str, ...],
    draws: int | None,
    seed: int | None,
    folds: int | None,
    seeds: int | None,
    halving: int | None,
    num_proc: int | None,
    ranks_per_trial: int | None,
    launcher: str,
    run_dir: str | None,
    resume: bool,
    collect: bool,
    verbose: bool,
) -> None:
    """Train with many values and compare: results.csv, results.png and best.yaml in the sweep's folder.

    \b
    hvd-train sweep -c job.yaml --param optim.lr=0.1,0.01 --param optim.momentum=0,0.9
    hvd-train sweep -c job.yaml --param optim.lr=log:1e-4..1e-1 --random 20 -np 2
    hvd-train sweep -c job.yaml --param optim.lr=log:1e-4..1e-1 --random 16 --halving 2
    hvd-train sweep -c job.yaml --param optim.lr=0.1,0.01 --folds 5
    mpirun -np 4 hvd-train sweep -c job.yaml --param optim.lr=0.1,0.05,0.01 --ranks-per-trial 2
    """
    from hvd_train.config import load_config
    from hvd_train.launch.environment import world
    from hvd_train.launch.start_plan import starts_ranks
    from hvd_train.sweep.folder import Sweep, load
    from hvd_train.sweep.repeats import repeats
    from hvd_train.sweep.results import report
    from hvd_train.sweep.rungs import ladder
    from hvd_train.sweep.trials import plan

    # Read once without the parameters, so that errors in the file are reported without a trial's values.
    here, folder = world(), Path(load_config(path, sets, run_dir=run_dir).run_dir)
    if collect:
        sys.exit(report(load(folder)))
    if here.size > 1 and ranks_per_trial is None:
        what, fix = f"{here.size} ranks, and nothing says how many a trial gets", "give --ranks-per-trial N"
        raise ConfigError(what, where=here.launcher, fix=fix)
    again = repeats(folds, seeds, load_config(path, sets).seed, params, halving)
    trials = plan(path, sets, params, draws, options.seed_of_draws(draws, seed), folder, again)
    whole = Sweep(folder, trials, ladder(trials, halving), list(again))
    alone = here.size == 1 and num_proc in (None, 1)  # one process trains one trial at a time
    if ranks_per_trial is None or (ranks_per_trial == 1 and alone):
        from hvd_train.sweep import local

        sys.exit(local.train_trials(whole, num_proc, launcher, resume))
    # Groups of ranks that train in parallel: all ranks are started once, and each runs this command again.
    if starts_ranks(num_proc):
        start_ranks(num_proc or 1, launcher, verbose)
    from hvd_train.sweep import ranks

    ranks.train_trials(whole, ranks_per_trial, here, resume, verbose)
