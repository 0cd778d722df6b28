"""``hvd-train scale``."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hvd_train.cli import options
from hvd_train.errors import ConfigError
from hvd_train.run_folder.terminal import say

if TYPE_CHECKING:
    from hvd_train.launch.hosts import Hosts
    from hvd_train.scaling.study import Study
    from hvd_train.scaling.turns import Limits


@click.command()
@options.configuration
@click.option("--ranks", metavar="N,N,...", help="Numbers of ranks (1, 2, 4, ... up to the cores of this host).")
@click.option("--strong", "kind", flag_value="strong", help="Keep the global batch, and divide it (the default).")
@click.option("--weak", "kind", flag_value="weak", help="Keep the batch of a rank.")
@click.option("--target", "goal", metavar="NAME=VALUE", help="Also train until val_accuracy=0.97, for example.")
@click.option("--seeds", type=click.IntRange(min=1), help="With --target: trainings for each number of ranks (1).")
@click.option("--steps", type=click.IntRange(min=8), help="Steps of each run (without: chosen by --seconds).")
@click.option(
    "--seconds",
    type=options.NumberRange(min=0.1),
    default=10.0,
    show_default=True,
    help="Seconds of steps that are timed in a run on the fewest ranks.",
)
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Runs of each number of ranks at most; fewer, if the steps' times are known to 5 % before.",
)
@click.option("--minutes", type=options.NumberRange(min=0), help="Begin no run after this time.")
@click.option(
    "--branch",
    "checkpoint",
    type=click.Path(file_okay=False, path_type=Path),
    help="Try larger batches from this checkpoint, or run.",
)
@click.option("--batch", "batches", metavar="1x,2x,...", help="With --branch: multiples of its batch (1x,2x,4x,8x).")
@click.option("--samples", type=click.IntRange(min=1), help="With --branch: samples of each (200 steps of its batch).")
@options.launcher(in_allocation=True)
@options.hosts
@click.option("--slurm", is_flag=True, help="Submit each run as a job, with section slurm; --collect reads them.")
@click.option("--run-dir", type=click.Path(file_okay=False), help="The study's folder; each run has one in it.")
@click.option("--resume", is_flag=True, help="Run what is missing or has failed; ranks, repeats and seeds may be more.")
@click.option("--collect", is_flag=True, help="Run nothing: write the results of the study that --run-dir holds.")
@click.option("--report", "report_dir", metavar="DIR", type=click.Path(file_okay=False, path_type=Path),
              help="Write a page for a proposal, index.html, and results.csv.")  # fmt: skip
def scale(
    path: Path | None,
    sets: tuple[str, ...],
    ranks: str | None,
    kind: str | None,
    goal: str | None,
    seeds: int | None,
    steps: int | None,
    seconds: float,
    repeats: int,
    minutes: float | None,
    checkpoint: Path | None,
    batches: str | None,
    samples: int | None,
    launcher: str,
    hosts: Hosts | None,
    slurm: bool,
    run_dir: str | None,
    resume: bool,
    collect: bool,
    report_dir: Path | None,
) -> None:
    """Train a short while on 1, 2, 4, ... ranks: times, speed-up, efficiency, node-hours, and laws of scaling.

    \b
    hvd-train scale -c job.yaml --ranks 1,2,4
    hvd-train scale -c job.yaml --ranks 1,2,4 --weak --report proposal
    hvd-train scale -c job.yaml --ranks 1,2 --target val_accuracy=0.97 --seeds 3
    hvd-train scale -c job.yaml --ranks 4,8,16 -H node1:8,node2:8
    hvd-train scale --branch runs/first --batch 1x,2x,4x,8x --ranks 2
    """
    from hvd_train.config import load_config
    from hvd_train.insight.plan import parse_counts
    from hvd_train.launch.environment import world
    from hvd_train.run_folder.lock import Lock
    from hvd_train.scaling import study as studies
    from hvd_train.scaling.turns import Limits, measure

    if not checkpoint and (batches or samples):
        raise ConfigError(
            "--batch and --samples are those of branches", fix="give --branch CHECKPOINT, or leave them out"
        )
    if world().launcher and not collect:
        fix = "start it once, without the launcher; it starts the ranks (--launcher srun, or -H)"
        raise ConfigError("the ranks are started already", where=f"by {world().launcher}", fix=fix)
    if checkpoint:
        source = click.get_current_context().get_parameter_source
        others = ("kind", "goal", "seeds", "steps", "seconds", "repeats", "minutes", "slurm", "collect", "report_dir")
        if any(source(name) is click.core.ParameterSource.COMMANDLINE for name in others):
            fix = "leave out the options of studies, such as --weak, --target and --repeats"
            raise ConfigError("branches are compared by their loss", where="--branch", fix=fix)
        counts = parse_counts(ranks or "1", "--ranks")
        if len(counts) > 1:
            raise ConfigError("branches train on one number of ranks", where=f"--ranks {ranks}", fix="give one")
        if hosts:
            hosts.needed(counts[0])
        places = hosts.options if hosts else _on_nodes(launcher, counts[0])
        of = checkpoint, path, sets, counts[0], batches or "1x,2x,4x,8x", samples
        starting = ["-np", str(counts[0]), "--launcher", launcher, *places]
        sys.exit(_branch(Path(run_dir or "runs/branches"), of, starting, resume))
    config = load_config(path, sets, run_dir=run_dir)
    folder = Path(config.run_dir)
    if collect:
        sys.exit(_finish(studies.load(folder), 0, report_dir))
    if seeds and not goal:
        raise ConfigError("--seeds repeats trainings to a target", fix="give --target, or leave --seeds out")
    target = studies.parse_target(goal, config) if goal else None
    numbers = tuple(parse_counts(ranks, "--ranks")) if ranks else _up_to_cores()
    study = studies.Study(folder, config, numbers, kind or "strong", steps, target, seeds or 1)
    study.check()
    limits = Limits(seconds, repeats, math.inf if minutes is None else minutes)
    if hosts:
        hosts.needed(max(numbers))
    for count in numbers:
        _on_nodes(launcher, count)
    if slurm:
        _submit(study, limits, resume, Path(path or "hvd-train").stem)
        return

    def on(count: int) -> list[str]:
        return ["-np", str(count), "--launcher", launcher, *(hosts.options if hosts else _on_nodes(launcher, count))]

    with Lock(folder, "another study is measured there; wait for its end, or give another --run-dir"):
        study = study.begin(resume)
        try:
            code = measure(study, on, limits, lambda line: say(line, err=True))
        except KeyboardInterrupt:  # between two runs
            code = 130
    sys.exit(_finish(studies.load(folder), code, report_dir))


def _branch(folder: Path, of: tuple, starting: list[str], resume: bool) -> int:
    """Train the branches of a checkpoint, print what became of them, and return the exit code."""
    from hvd_train.run_folder.lock import Lock
    from hvd_train.scaling import branches as branching

    branches = branching.opened(folder, *of)
    with Lock(folder, "other branches are trained there; wait for their end, or give another --run-dir"):
        if any(folder.glob("batch-*x")) and not resume:
            fix = "--resume trains what is missing; or give another --run-dir"
            raise ConfigError("the folder holds branches already", where=str(folder), fix=fix)
        try:
            found, code = branching.measure(branches, starting, lambda line: say(line, err=True))
        except KeyboardInterrupt:  # between two runs
            found, code = [], 130
    if code:
        say("stopped; --resume goes on", err=True)
        return code
    say(branching.text(branches, found), styled=True)
    say(f"results: {branching.write(branches, found)}")
    return 0


def _up_to_cores() -> tuple[int, ...]:
    cores = len(os.sched_getaffinity(0))
    return tuple(1 << k for k in range(cores.bit_length()))


def _on_nodes(launcher: str, ranks: int) -> list[str]:
    """Return the options of ``fit`` that fill the nodes of an allocation one after the other."""
    from hvd_train.launch.launchers.srun import Srun, tasks_per_node
    from hvd_train.scaling.turns import places

    each = tasks_per_node(os.environ.get("SLURM_TASKS_PER_NODE", "1"))[0]
    if launcher != Srun.name or each == 1:
        return []
    spread = places(ranks, each)
    return ["--nnodes", str(spread["nodes"]), "--nproc-per-node", str(spread["ntasks_per_node"])]


def _submit(study: Study, limits: Limits, resume: bool, title: str) -> None:
    from hvd_train.launch.submit import submit
    from hvd_train.scaling.study import STUDY, prepare
    from hvd_train.scaling.turns import scripts
    from hvd_train.sweep.folder import LOG

    scripts(study, limits, title)
    study = study.begin(resume)
    try:
        for trial, text in scripts(study, limits, title):
            prepare(trial)
            click.echo(submit(text))
    except ConfigError:
        if not resume and not any(study.folder.glob(f"ranks-*/*/{LOG}")):
            (study.folder / STUDY).unlink()  # Slurm has refused the first job
        raise


def _finish(study: Study, code: int, report_dir: Path | None) -> int:
    """Write and print what was measured; return the exit code."""
    from hvd_train.scaling import results
    from hvd_train.scaling.points import measured

    found = measured(study)
    if code:
        say("stopped; --resume goes on", err=True)
        if not found.known:
            return code
    results.check(found)
    results.write(found)
    say(results.text(found), styled=True)
    say(f"results: {study.folder / results.CSV}, and pictures beside it")
    if report_dir:
        from hvd_train.scaling.page import write

        say(f"report: {write(found, report_dir)}")
    return code
