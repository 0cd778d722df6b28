"""``hvd-train submit``, and the last lines of its batch scripts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from hvd_train.cli import options
from hvd_train.cli.launching import check_run_folder, note_refusal
from hvd_train.errors import ConfigError

slurm = options.together(
    click.option("--nodes", type=click.IntRange(min=1), help="Number of hosts (1)."),
    click.option("--ntasks-per-node", type=click.IntRange(min=1), help="Ranks on each host (1)."),
    click.option("--cpus-per-task", type=click.IntRange(min=1), help="Cores of each rank."),
    click.option("--gpus-per-node", metavar="[TYPE:]N", help="GPUs of each host; a rank uses that of its local rank."),
    click.option("--time", metavar="TIME", help="Limit, in Slurm's words: 30 (minutes), 2:00:00, 1-12."),
    click.option("--partition", help="Slurm partition, where the site has several."),
    click.option("--account", help="Slurm account to charge."),
    click.option("--job-name", help="Name of the job (without: the configuration's or script's name)."),
    click.option("--output", metavar="FILE", help="File for what the job prints (without: slurm-JOB.out here)."),
    click.option("--module", "modules", multiple=True, help="Load this module first; repeatable."),
    click.option("--container", metavar="COMMAND", help="Put before each rank's command: 'apptainer exec train.sif'."),
    click.option(
        "--requeue",
        type=click.IntRange(min=1),
        help="Save before the time is over, or when others need the hosts, and start again, so often at most.",
    ),
    click.option(
        "--save-before",
        type=click.IntRange(min=1),
        help="With --requeue: seconds before the end of the time (120); Slurm may take a minute more.",
    ),
)


@click.command()
@options.configuration
@click.option("--run-dir", type=click.Path(file_okay=False), help="As in fit.")
@click.option("--resume", metavar="auto|last|best|PATH", help="As in fit.")
@click.option("--overwrite", is_flag=True, help="As in fit.")
@options.trials
@click.option("--at-once", metavar="N", type=click.IntRange(min=1), help="With --param: so many trials at most.")
@slurm
@click.option("--dry-run", is_flag=True, help="Print the script and submit nothing.")
@click.option("--follow", is_flag=True, help="Print what the job prints until it ends, and end with its exit code.")
@click.argument("program", metavar="[-- python SCRIPT.py ...]", nargs=-1, type=click.UNPROCESSED)
def submit(
    program: tuple[str, ...],
    path: Path | None,
    sets: tuple[str, ...],
    run_dir: str | None,
    resume: str | None,
    overwrite: bool,
    params: tuple[str, ...],
    draws: int | None,
    seed: int | None,
    folds: int | None,
    seeds: int | None,
    at_once: int | None,
    job_name: str | None,
    output: str | None,
    modules: tuple[str, ...],
    dry_run: bool,
    follow: bool,
    **settings: Any,
) -> None:
    """Train as a batch job of Slurm, or with --param as an array of them, a sweep; prints the job's number.

    \b
    hvd-train submit -c job.yaml --nodes 2 --ntasks-per-node 4 --time 2:00:00
    hvd-train submit -c job.yaml --param optim.lr=0.1,0.01 --ntasks-per-node 4 --time 30
    hvd-train submit -c job.yaml --nodes 2 --dry-run > job.sbatch     a script to change by hand
    hvd-train submit --nodes 2 --time 30 -- python train.py --lr 0.1  a script with hvd_train.torch or .keras
    """
    from hvd_train.config import SlurmConfig, load_config
    from hvd_train.launch import submit as slurm
    from hvd_train.sweep import array
    from hvd_train.sweep.repeats import repeats
    from hvd_train.sweep.trials import plan

    keys = "-c, --set, --run-dir, --resume and --overwrite"
    options.check_script(program, path or sets or run_dir or resume or overwrite, "submit", keys)
    config = None if program else load_config(path, sets, run_dir=run_dir)
    # The command line comes before the configuration.
    settings = (config.slurm if config else SlurmConfig()).model_dump() | _set(settings | {"modules": modules})
    slurm.check_requeue(settings["requeue"], resume, overwrite)
    seed, swept = options.seed_of_draws(draws, seed), bool(params or draws or at_once or folds or seeds)
    if swept:
        _check_sweep(program, output, follow, overwrite, resume)
    batch = slurm.BatchJob(settings, job_name or _title(program, path), output)
    if config is None:
        text = batch.script(program)
    elif swept:
        folder, again = Path(config.run_dir), repeats(folds, seeds, config.seed, params)
        sweep = array.of(folder, plan(path, sets, params, draws, seed, folder, again), list(again))
        text = array.script(batch, sweep, at_once)
    else:
        # Check now rather than when the job starts.
        (note_refusal if dry_run else check_run_folder)(config, resume, overwrite)
        words = _fit_words(path, sets, run_dir, resume or ("auto" if settings["requeue"] else None), overwrite)
        text = batch.script(batch.hvd_train(words), run_dir=config.run_dir)
    if dry_run:
        click.echo(text, nl=False)
        return
    click.echo(job := array.submit(sweep, text, resume is not None) if swept else slurm.submit(text))
    if follow:
        sys.exit(slurm.follow(job))


def _title(program: tuple[str, ...], path: Path | None) -> str:
    """Return the name of the job: the script's, or the configuration's."""
    return Path(next((word for word in program if word.endswith(".py")), path or "hvd-train")).stem


def _set(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if value not in (None, ())}


def _check_sweep(
    program: tuple[str, ...], output: str | None, follow: bool, overwrite: bool, resume: str | None
) -> None:
    refused = {"a script": program, "--output": output, "--follow": follow, "--overwrite": overwrite}
    refused["--resume, but for auto"] = resume not in (None, "auto")
    name = next((name for name, value in refused.items() if value), None)
    if name:
        raise ConfigError(f"a sweep takes no {name}", where="submit: --param", fix="leave it out")


def _fit_words(
    path: Path | None, sets: tuple[str, ...], run_dir: str | None, resume: str | None, overwrite: bool
) -> list[str]:
    """Return the arguments of ``fit`` with these options."""
    values = {"-c": path, "--run-dir": run_dir, "--resume": resume}
    words = ["fit", *(str(word) for name, value in values.items() if value is not None for word in (name, value))]
    return words + ["--overwrite"] * overwrite + [word for setting in sets for word in ("--set", setting)]


@click.command(hidden=True)
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("code", type=int)
def ended(folder: Path, code: int) -> None:
    """Record the end of a trial, or of a run of a scaling study: the last line of its batch script."""
    from hvd_train.scaling import turns
    from hvd_train.scaling.study import STUDY
    from hvd_train.sweep import array

    sys.exit((turns if (folder.absolute().parents[1] / STUDY).exists() else array).ended(folder, code))


@click.command(hidden=True)
@click.option("--times", type=int, required=True)
@click.option("--run-dir", type=click.Path(path_type=Path))
@click.argument("code", type=int)
def requeue(times: int, run_dir: Path | None, code: int) -> None:
    """Requeue the job: the last line of the batch script of ``submit --requeue``."""
    from hvd_train.launch import requeue as job

    sys.exit(job.requeue(code, times, run_dir))
