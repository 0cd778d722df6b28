"""``hvd-train plan``, and one of its measurements."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hvd_train.cli import options
from hvd_train.cli.launching import open_rendezvous, rank_words
from hvd_train.errors import CheckpointError, ConfigError
from hvd_train.run_folder.terminal import say

if TYPE_CHECKING:
    from hvd_train.config import Config
    from hvd_train.insight.plan import Aim

SECONDS = 60.0
MOST_A_CORE = 32  # ranks that sleep: each is a process with its framework, of 0.3 GB


@click.command()
@options.configuration
@click.option("--ranks", metavar="N,...", help="Ranks on a host to plan for (1, 2, 4, ... up to the cores).")
@click.option("--hosts", metavar="N,...", help="Numbers of hosts like this one to predict for; needs --link.")
@click.option("--link", metavar="10gbit[,50us]", help="Speed of the network between hosts, and its latency.")
@click.option("--strong", "kind", flag_value="strong", help="Keep the global batch of one rank, and divide it.")
@click.option(
    "--weak",
    "kind",
    flag_value="weak",
    help="Keep the batch of a rank (without: as batch_size or global_batch_size say).",
)
@click.option("--deadline", metavar="6h", help="Choose what takes the fewest node-hours and ends in this time.")
@click.option("--budget", metavar="200nodeh", help="Choose among what takes no more node-hours.")
@click.option(
    "--rehearse", metavar="N,...", help="Start N ranks that sleep instead of computing, and exchange for real."
)
@click.option(
    "--study",
    "folder",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Plan for the configuration of a study by scale, and compare with what it has measured.",
)
@click.option(
    "--seconds",
    type=options.NumberRange(min=5),
    default=SECONDS,
    show_default=True,
    help="Measure for so long; the first two measurements are always made.",
)
@options.launcher(in_allocation=True)
@click.option(
    "-o",
    "--output",
    "outputs",
    metavar="FILE",
    type=options.FILE,
    multiple=True,
    help="Write a picture (.png, .svg, .pdf), .csv or .json; repeatable.",
)
def plan(
    path: Path | None,
    sets: tuple[str, ...],
    ranks: str | None,
    hosts: str | None,
    link: str | None,
    kind: str | None,
    deadline: str | None,
    budget: str | None,
    rehearse: str | None,
    folder: Path | None,
    seconds: float,
    launcher: str,
    outputs: tuple[Path, ...],
) -> None:
    """Measure this configuration for a minute, and predict it on more ranks and hosts.

    \b
    hvd-train plan -c job.yaml
    hvd-train plan -c job.yaml --hosts 1,2,4,8 --link 10gbit --deadline 6h
    hvd-train plan -c job.yaml --rehearse 8 -o plan.png

    Nothing is trained: the run folder stays as it is. A step on ranks that were measured is what was measured; others
    are predicted from parts: computing, the exchange, waiting for the slowest rank.
    """
    from hvd_train.config import load_config
    from hvd_train.insight import calibration as measuring
    from hvd_train.insight import plan as planning
    from hvd_train.launch.environment import world

    if world().launcher:
        raise ConfigError("the ranks are started already", where=f"by {world().launcher}", fix="start plan alone")
    counts = planning.parse_counts(hosts, "--hosts") if hosts else [1]
    on_host = planning.parse_counts(ranks, "--ranks") if ranks else []
    slept = planning.parse_counts(rehearse, "--rehearse") if rehearse else []
    if slept and slept[-1] > (most := MOST_A_CORE * measuring.host_cores()):
        what = f"{slept[-1]} ranks that sleep on {measuring.host_cores()} cores"
        raise ConfigError(what, where=f"--rehearse {rehearse}", fix=f"try up to {most}")
    network = planning.parse_link(link) if link else None
    if max(counts) > 1 and network is None:
        raise ConfigError("the network between the hosts is not given", where="--hosts", fix="give --link 10gbit")
    wish = planning.Wish(
        planning.parse_hours(deadline, "--deadline") if deadline else None,
        planning.parse_budget(budget) if budget else None,
    )
    if strange := [file for file in outputs if file.suffix not in (*options.PICTURES, ".csv", ".json")]:
        fix = "give .png, .svg, .pdf, .csv or .json"
        raise ConfigError("the ending says what to write", where=f"-o {strange[0]}", fix=fix)
    studied: dict[int, list[float]] = {}
    aim: Aim | None = None
    if folder:
        if path or sets or kind:
            raise ConfigError("the study has its own configuration", where="--study", fix="leave out -c, --set, --weak")
        config, kind, studied, aim = _of_study(folder)
    else:
        config = load_config(path, sets)
    measuring.check(config)
    config = planning.with_batches(config, kind) if kind else config
    if counts != [1] or slept:  # ranks of other hosts, real or imagined, share no weights
        config = planning.unshared(config)
    cores = measuring.host_cores()
    wanted = measuring.placements(cores, config.threads, [n for n in on_host if n <= measuring.TRIED * cores])
    start = measuring.on_ranks("auto")
    with measuring.folder_of(config, shared=False) as files:
        measured = measuring.measure(config, wanted, seconds, start, files, _report)
    model, rehearsed = measured.model(config.exchange.compression), {}
    with measuring.folder_of(config, shared=launcher != "auto") as files:
        for n in slept if not measured.stopped else []:
            own = planning.slept(model, planning.batch_of_rank(config, n))
            try:
                taken = measuring.rehearse(config, n, own, 5.0, measuring.on_ranks(launcher), files / str(n))
            except ConfigError as error:  # what was measured is kept
                say(f"warning: {error}", err=True)
                continue
            rehearsed[n] = taken
    on_host = sorted({*on_host, *studied})
    found = planning.rows(config, measured, counts, on_host, network, rehearsed, studied, aim)
    click.echo(planning.text(found, wish, config, measured, network, counts, aim))
    for file in outputs:
        _write(file, found, measured, studied)
        click.echo(f"written: {file}")
    sys.exit(measured.stopped)


def _report(line: str) -> None:
    say(line, err=True)


def _of_study(folder: Path) -> tuple[Config, str, dict[int, list[float]], Aim | None]:
    """Return a study's configuration, kind (strong or weak), {number of ranks: samples/s of each run} and target.

    Only runs on a single host count.
    """
    from hvd_train.scaling import study as studies
    from hvd_train.scaling.points import aim, measured

    study = studies.load(folder)
    found = measured(study)
    points = [one for one in found.known if all(run.hosts == 1 for run in one.runs)]
    if not points:
        fix = "run hvd-train scale, or give another folder"
        raise ConfigError("the study holds no runs of one host", where=f"--study {folder}", fix=fix)
    return study.config, study.kind, {one.ranks: [run.rate for run in one.runs] for one in points}, aim(found)


def _write(file: Path, found: list, measured: object, studied: dict[int, list[float]]) -> None:
    from hvd_train import files
    from hvd_train.insight import plan as planning
    from hvd_train.insight.plan_picture import picture

    if file.suffix not in (".csv", ".json"):
        picture(found, file, studied)
        return
    text = planning.csv_text(found) if file.suffix == ".csv" else planning.json_text(found, measured)  # type: ignore[arg-type]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        files.put(file, text.encode())
    except OSError as error:
        raise CheckpointError(f"the table cannot be written: {error.strerror}", where=str(file)) from error


@click.command(hidden=True)
@options.configuration
@options.num_proc
@options.launcher(in_allocation=True)
@click.option("--seconds", type=float, required=True)
@click.option("--rehearse", "times", type=options.FILE)
@click.option("--batches", type=int)
@click.option("-o", "--output", type=options.FILE, required=True)
@options.verbose
def calibrate(
    path: Path | None,
    sets: tuple[str, ...],
    num_proc: int | None,
    launcher: str,
    seconds: float,
    times: Path | None,
    batches: int | None,
    output: Path,
    verbose: bool,
) -> None:
    """Measure once for ``plan``, or for ``batch_size: auto``."""
    from hvd_train.config import load_config
    from hvd_train.launch.start_plan import Restarts
    from hvd_train.launch.start_plan import plan as ranks_of

    config = load_config(path, sets)
    if ranks := ranks_of(num_proc, launcher, None, None, None, Restarts(), dry_run=False):
        sys.exit(ranks.run(rank_words(), config, verbose, once=True))
    open_rendezvous()
    if times:
        from hvd_train.jobs.calibrate import rehearse

        sys.exit(rehearse(config, json.loads(times.read_bytes()), seconds, output, verbose))
    if batches:
        from hvd_train.jobs.calibrate import batches as try_sizes

        sys.exit(try_sizes(config, batches, seconds, output, verbose))
    from hvd_train.jobs.calibrate import calibrate as job

    sys.exit(job(config, seconds, output, verbose))
