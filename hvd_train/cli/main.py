"""The command line: parse, build the configuration, call. No arithmetic, and no framework before a job starts."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from hvd_train import __version__
from hvd_train.cli import streams
from hvd_train.errors import ConfigError
from hvd_train.frameworks import FRAMEWORKS


class Commands(click.Group):
    """Lists its commands in the order of a first session, not of the alphabet."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="hvd-train")
def cli() -> None:
    """Train PyTorch and Keras 3 / TensorFlow models in data parallel over Horovod.

    \b
    A first run (digits data, a small CNN, two ranks on this host):
      hvd-train fit -np 2 --set data.image_size=28 --set max_epochs=5 --run-dir runs/first
    The same in the other framework, from the same configuration:
      hvd-train fit -np 2 --set data.image_size=28 --set max_epochs=5 --set framework=tensorflow --run-dir runs/second
    On a cluster, let the launcher start the ranks:
      mpirun -np 8 hvd-train fit -c job.yaml
      hvd-train fit -np 8 -H host1:4,host2:4 -c job.yaml
      srun -n 8 hvd-train fit -c job.yaml
    """


config_option = click.option(
    "-c",
    "--config",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="YAML file; 'hvd-train config' prints one.",
)
set_option = click.option(
    "--set", "sets", metavar="KEY=VALUE", multiple=True, help="Set any key, for example optim.lr=0.1; repeatable."
)
num_proc_option = click.option(
    "-np",
    "--num-proc",
    type=click.IntRange(min=1),
    help="Start this many ranks on this host (without: this process alone).",
)
LAUNCHER = "What starts the ranks of -np; auto: mpirun where Horovod speaks MPI, else horovodrun (Gloo)."


def launcher_of(names: list[str], more: str = "") -> Callable:
    return click.option(
        "--launcher", type=click.Choice(names), default="auto", show_default=True, help=f"{LAUNCHER}{more}"
    )


launcher_option = launcher_of(["auto", "horovodrun", "mpirun"])
verbose_option = click.option(
    "-v", "--verbose", is_flag=True, help="Show the launcher's command and the frameworks' own logs."
)
checkpoint_option = click.option(
    "--checkpoint", default="last", show_default=True, metavar="last|best|PATH", help="Which checkpoint to load."
)
HOSTS = (
    click.option("-H", "--hosts", metavar="HOST:SLOTS,...", help="The hosts of the ranks, over ssh (fit: of -np)."),
    click.option("--hostfile", type=click.Path(path_type=Path), help="The same as a file, a line 'HOST slots=N' each."),
    click.option("--network-interfaces", metavar="NAME,...", help="With several hosts: the networks between them."),
)


def hosts_options(command: Callable) -> Callable:
    """What fit and doctor share."""
    for option in reversed(HOSTS):
        command = option(command)
    return command


split_option = click.option(
    "--split",
    type=click.Choice(["train", "val", "test", "all"]),
    help="Part of the data (without: val of the run's own data, all of others).",
)


@cli.command()
@config_option
@set_option
@num_proc_option
@launcher_of(["auto", "horovodrun", "mpirun", "srun"], " srun: within an allocation of Slurm.")
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
@click.option("--seed", type=click.IntRange(min=0), help="Of first weights, sample order and dropout.")
@click.option(
    "--until-epoch",
    type=click.IntRange(min=1),
    help="Leave the run there, saved; --resume auto goes on to the bits of a run that nobody left.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="With -np: start all ranks again from the newest checkpoint when one dies, at most so often.",
)
@click.option(
    "--min-np",
    type=click.IntRange(min=1),
    help="With --max-restarts: start again without the rank that was lost, down to so many ranks; else on as many.",
)
@click.option(
    "--spares",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="With --max-restarts: keep a process that has loaded the framework, from which so many ranks start again.",
)
@hosts_options
@click.option("--nnodes", type=click.IntRange(min=1), help="The first of these hosts, or so many of Slurm's.")
@click.option("--nproc-per-node", type=click.IntRange(min=1), help="Ranks on each host, instead of -np.")
@click.option(
    "--dry-run", is_flag=True, help="Print the launcher's command, or without -np the configuration; start nothing."
)
@click.option(
    "--check", is_flag=True, help="Open data and model, take one step and one validation batch; write nothing."
)
@verbose_option
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
    hosts: str | None,
    hostfile: Path | None,
    network_interfaces: str | None,
    nnodes: int | None,
    nproc_per_node: int | None,
    dry_run: bool,
    check: bool,
    verbose: bool,
) -> None:
    """Train a model.

    \b
    hvd-train fit -c job.yaml                       one rank
    hvd-train fit -np 2 -c job.yaml                 two ranks on this host
    mpirun -np 2 hvd-train fit -c job.yaml          the same, started by mpirun
    hvd-train fit -np 2 -c job.yaml --resume auto   go on where the last run stopped
    hvd-train fit -np 2 -c job.yaml --max-restarts 3
    hvd-train fit -np 2 -c job.yaml --check         try all of it with one step, and write nothing
    """
    from hvd_train.config import load_config, resolved_yaml
    from hvd_train.launch.environment import world
    from hvd_train.launch.outside import forget, listen

    config = load_config(path, sets, run_dir=run_dir, seed=seed)
    from hvd_train.launch.hosts import parse, spread

    where = parse(hosts, hostfile, network_interfaces)
    if spares and not max_restarts:
        raise ConfigError("spares take the place of ranks at a restart", where="--spares", fix="give --max-restarts")
    if min_np and not max_restarts:
        raise ConfigError("nothing starts again on fewer ranks", where="--min-np", fix="give --max-restarts")
    if launcher == "srun" and not _within_a_world():
        if where or max_restarts:
            fix = "leave it out: the allocation has the hosts, and 'hvd-train submit --requeue' starts again"
            raise ConfigError("srun takes none", where="--hosts" if where else "--max-restarts", fix=fix)
        from hvd_train.launch import allocation

        program = [sys.executable, "-m", "hvd_train", *_without_launch_options(sys.argv[1:])]
        line = allocation.command(num_proc, nnodes, nproc_per_node, program)
        if dry_run:
            click.echo(shlex.join(line))
            return
        forget()
        sys.exit(allocation.start(line))
    if nnodes or nproc_per_node:
        where, num_proc = spread(where, num_proc, nnodes, nproc_per_node)
    if dry_run and num_proc is None and not (max_restarts or where):
        here = world()
        if here.rank == 0:
            begun = f"{here.size} ranks, started by {here.launcher}" if here.launcher else "1 rank, this process"
            click.echo(f"# {begun}. It would train with this configuration:")
            click.echo(resolved_yaml(config), nl=False)
        return
    if _starts_ranks(num_proc) or max_restarts or where or dry_run:
        if num_proc is None:
            asks = "--max-restarts" if max_restarts else "--hosts"
            raise ConfigError(f"{asks} is about ranks that -np starts", fix="give -np, or leave it out")
        words, folder = _without_launch_options(sys.argv[1:]), Path(config.run_dir)
        if where and max_restarts:
            fix = "leave it out, and start again with --resume auto"
            raise ConfigError("ranks of several hosts are not started again", where="--max-restarts", fix=fix)
        if dry_run:
            from hvd_train.launch.local import choose, command

            if where:
                where.taken(num_proc)
            click.echo(shlex.join(command(num_proc, choose(launcher), words, hosts=where)))
            return
        forget()
        if where or check:
            from hvd_train.launch import launch

            sys.exit(launch(num_proc, launcher, words, verbose, hosts=where))
        from hvd_train.launch.snapshots import in_memory
        from hvd_train.launch.spares import Spares
        from hvd_train.launch.supervise import supervise

        snapshots = in_memory(bool(max_restarts and config.checkpoint.snapshot_every_n_steps))
        with snapshots, closing(Spares(spares, config.framework, config.threads, num_proc, verbose)) as kept:
            watched = max_restarts, verbose, config.watchdog_s, kept, min_np
            sys.exit(supervise(num_proc, launcher, words, folder, *watched))
    _prepare()
    if check:
        forget()
        from hvd_train.jobs.check import check as try_once

        sys.exit(try_once(config, resume, allow_change, overwrite, verbose))
    from hvd_train.jobs.fit import fit as train

    sys.exit(train(config, resume, allow_change, overwrite, verbose, listen(), until_epoch))


def _within_a_world() -> bool:
    from hvd_train.launch.environment import world

    return bool(world().launcher)


def _starts_ranks(num_proc: int | None) -> bool:
    """Whether this process is the one that starts the ranks of ``-np``."""
    from hvd_train.launch.environment import world

    started = world()
    if num_proc is not None and started.launcher and started.size != num_proc:
        raise ConfigError(
            f"-np {num_proc} inside a world of {started.size} ranks",
            where=f"started by {started.launcher}",
            fix="leave out -np",
        )
    return num_proc not in (None, 1) and not started.launcher


def _prepare() -> None:
    """For a rank that srun started."""
    from hvd_train.launch import slurm
    from hvd_train.launch.environment import world

    slurm.prepare(world())


def _launch_or(num_proc: int | None, launcher: str, verbose: bool, here: Any) -> None:
    """Runs in this process, or starts the ranks of ``-np`` with the same arguments."""
    if not _starts_ranks(num_proc):
        _prepare()
        sys.exit(here())
    from hvd_train.launch import launch

    sys.exit(launch(num_proc or 1, launcher, _without_launch_options(sys.argv[1:]), verbose))


OF_LAUNCH = (
    "-np", "--num-proc", "--launcher", "--max-restarts", "--min-np", "--spares", "-H", "--hosts", "--hostfile",
    "--network-interfaces", "--nnodes", "--nproc-per-node",
)  # fmt: skip


def _without_launch_options(arguments: list[str]) -> list[str]:
    kept, skip = [], False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in OF_LAUNCH:
            skip = True
        elif argument == "--dry-run" or argument.startswith(
            ("-np", "-H", *(f"{x}=" for x in OF_LAUNCH if x[1] == "-"))
        ):
            continue
        else:
            kept.append(argument)
    return kept


param_option = click.option(
    "--param",
    "params",
    metavar="KEY=VALUE,...",
    multiple=True,
    help="A key and its values; with --random also a range, 8..64 or log:1e-4..1e-1; repeatable.",
)
random_option = click.option(
    "--random", "draws", type=click.IntRange(min=1), help="Draw this many trials (without: all combinations)."
)
draws_seed_option = click.option("--seed", type=click.IntRange(min=0), help="Of the draws of --random (0).")


def _seed_of(draws: int | None, seed: int | None) -> int:
    if seed is not None and draws is None:
        fix = f"give --random, or --set seed={seed} for the seed of the training"
        raise ConfigError("is of the draws of --random", where="--seed", fix=fix)
    return seed or 0


@cli.command()
@config_option
@set_option
@param_option
@random_option
@draws_seed_option
@click.option(
    "--halving",
    metavar="ETA",
    type=click.IntRange(min=2),
    help="Successive halving: train all a little, go on with the best 1 in ETA, ETA times as long, and so on.",
)
@num_proc_option
@click.option(
    "--ranks-per-trial", type=click.IntRange(min=1), help="Split the ranks into groups, which train side by side."
)
@launcher_option
@click.option("--run-dir", type=click.Path(file_okay=False), help="The sweep's folder; each trial has one in it.")
@click.option("--resume", is_flag=True, help="Run what is missing or has failed.")
@click.option("--collect", is_flag=True, help="Run nothing: write the results of the sweep that --run-dir holds.")
@verbose_option
def sweep(
    path: Path | None,
    sets: tuple[str, ...],
    params: tuple[str, ...],
    draws: int | None,
    seed: int | None,
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
    mpirun -np 4 hvd-train sweep -c job.yaml --param optim.lr=0.1,0.05,0.01 --ranks-per-trial 2
    """
    from hvd_train.config import load_config
    from hvd_train.launch.environment import world
    from hvd_train.sweep import folder as sweeps
    from hvd_train.sweep import results
    from hvd_train.sweep.halving import ladder
    from hvd_train.sweep.plan import plan
    from hvd_train.sweep.table import live

    here, folder = world(), Path(load_config(path, sets, run_dir=run_dir).run_dir)
    if collect:
        whole = sweeps.load(folder)
        click.echo(results.finish(whole))
        sys.exit(5 if results.left(whole) else 0)
    if here.size > 1 and ranks_per_trial is None:
        what, fix = f"{here.size} ranks, and not told how to share them", "give --ranks-per-trial N"
        raise ConfigError(what, where=here.launcher, fix=fix)
    trials = plan(path, sets, params, draws, _seed_of(draws, seed), folder)
    whole = sweeps.Sweep(folder, trials, ladder(trials, halving))
    if ranks_per_trial == 1 and here.size == 1 and num_proc in (None, 1):
        ranks_per_trial = None  # one process, one trial at a time
    if ranks_per_trial is None:
        from hvd_train.sweep import local

        sweeps.begin(whole, resume)
        with live(whole):
            code = local.run(whole, num_proc, launcher)
    elif _starts_ranks(num_proc):
        from hvd_train.launch import launch

        sys.exit(launch(num_proc or 1, launcher, _without_launch_options(sys.argv[1:]), verbose))
    else:
        from contextlib import nullcontext

        from hvd_train.frontends.mpi import leave
        from hvd_train.launch.outside import listen
        from hvd_train.sweep import ranks

        rank, mpi = ranks.join(trials, ranks_per_trial, here, verbose)
        if mpi.rank == 0:
            sweeps.begin(whole, resume)
        mpi.Barrier()
        with nullcontext() if mpi.rank else live(whole):
            code = ranks.run(whole, ranks_per_trial, here, rank, mpi, listen())
        if here.rank:
            leave(code)
    if code:
        click.echo("stopped; --resume goes on", err=True)
    else:
        click.echo(results.finish(whole))
        code = 5 if results.left(whole) else 0
    if ranks_per_trial is not None:
        leave(code)
    sys.exit(code)


@cli.command()
@config_option
@set_option
@click.option("--run-dir", type=click.Path(file_okay=False), help="As of fit.")
@click.option("--resume", metavar="auto|last|best|PATH", help="As of fit.")
@click.option("--overwrite", is_flag=True, help="As of fit.")
@param_option
@random_option
@draws_seed_option
@click.option("--at-once", metavar="N", type=click.IntRange(min=1), help="With --param: so many trials at most.")
@click.option("--nodes", type=click.IntRange(min=1), help="Hosts (1).")
@click.option("--ntasks-per-node", type=click.IntRange(min=1), help="Ranks on each (1).")
@click.option("--cpus-per-task", type=click.IntRange(min=1), help="Cores of each rank.")
@click.option("--gpus-per-node", metavar="[TYPE:]N", help="GPUs of each host; a rank takes that of its local rank.")
@click.option("--time", metavar="TIME", help="Limit, in Slurm's words: 30 (minutes), 2:00:00, 1-12.")
@click.option("--partition", help="Where the site has several.")
@click.option("--account", help="Who pays.")
@click.option("--job-name", help="Without: the configuration's or script's name.")
@click.option("--output", metavar="FILE", help="What the job prints (without: slurm-JOB.out here).")
@click.option("--module", "modules", multiple=True, help="Load this module first; repeatable.")
@click.option("--container", metavar="COMMAND", help="Before each rank's command: 'apptainer exec train.sif'.")
@click.option(
    "--requeue",
    type=click.IntRange(min=1),
    help="Save before the time is over, or when others need the hosts, and start again, so often at most.",
)
@click.option(
    "--save-before",
    type=click.IntRange(min=1),
    help="With --requeue: seconds before the end of the time (120); Slurm may take a minute more.",
)
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
    at_once: int | None,
    job_name: str | None,
    output: str | None,
    modules: tuple[str, ...],
    dry_run: bool,
    follow: bool,
    **asked: Any,
) -> None:
    """Train as a batch job of Slurm, or with --param as an array of them, a sweep; prints the job's number.

    \b
    hvd-train submit -c job.yaml --nodes 2 --ntasks-per-node 4 --time 2:00:00
    hvd-train submit -c job.yaml --param optim.lr=0.1,0.01 --ntasks-per-node 4 --time 30
    hvd-train submit -c job.yaml --nodes 2 --dry-run > job.sbatch     a script to change by hand
    hvd-train submit --nodes 2 --time 30 -- python train.py --lr 0.1  a script with hvd_train.torch or .keras
    """
    from hvd_train.config import SlurmConfig, load_config
    from hvd_train.launch import submit as jobs

    if program and (path or sets or run_dir or resume or overwrite):
        what = "a script has no configuration"
        raise ConfigError(what, where="submit", fix="leave out -c, --set, --run-dir, --resume and --overwrite")
    config = None if program else load_config(path, sets, run_dir=run_dir)
    slurm = config.slurm if config else SlurmConfig()
    # The command line comes first.
    own = slurm.model_dump() | {key: value for key, value in asked.items() if value is not None}
    times = own["requeue"]
    anew = "--overwrite" if overwrite else "--resume" if resume not in (None, "auto", "last") else ""
    if times and anew:
        fix = "give another --run-dir, or remove the folder" if overwrite else "give --resume auto"
        raise ConfigError("each start of the job would begin anew", where=f"submit: --requeue {anew}", fix=fix)
    own_seed, swept = _seed_of(draws, seed), bool(params or draws or at_once)
    given = {"a script": program, "--output": output, "--follow": follow, "--overwrite": overwrite}
    given["--resume, but for auto"] = resume not in (None, "auto")
    strange = next((name for name, one in given.items() if one), None)
    if swept and strange:
        raise ConfigError(f"a sweep takes no {strange}", where="submit: --param", fix="leave it out")
    named = next((word for word in program if word.endswith(".py")), path or "hvd-train")
    plain = ("nodes", "ntasks_per_node", "cpus_per_task", "gpus_per_node", "time", "partition", "account")
    options = {"job-name": job_name or Path(named).stem, **{key.replace("_", "-"): own[key] for key in plain}}
    options["output"] = output
    contained = jobs.contained(own["container"])
    folder = Path(config.run_dir) if config else None
    words = [*contained, *program]
    here = [sys.executable, "-m", "hvd_train"]
    start = [*contained, "hvd-train"] if contained else here  # in a container Python lies elsewhere
    then, first, place = [], [], [str(folder)] if folder else []
    if folder and swept:
        from hvd_train.sweep import array
        from hvd_train.sweep.plan import plan

        sweep = array.of(folder, plan(path, sets, params, draws, own_seed, folder))
        options |= array.options(sweep, at_once)
        words, first, place = [*start, *array.WORDS], [array.line(folder)], [array.TRIAL]
        then = [[*here, "ended", array.TRIAL]]
    elif folder:
        words = [*start, *_fit_words(path, sets, run_dir, folder, resume, overwrite, times)]
    if times:
        options |= {"requeue": True, "signal": f"USR1@{own['save_before']}", "open-mode": "append"}
        again = [*here, "requeue", "--times", str(times), *(["--run-dir", *place] if place else [])]
        first, then = [jobs.starts(times), *first, jobs.END_LINE], [again, *then]
    else:
        options["no-requeue"] = True  # a second start would find a run folder in use, and its output overwritten
    text = jobs.script(words, options, modules or slurm.modules, then, slurm.lines, first)
    if dry_run:
        click.echo(text, nl=False)
        return
    job = array.submit(sweep, text, resume is not None) if swept else jobs.submit(text)
    click.echo(job)
    if follow:
        sys.exit(jobs.follow(job))


def _fit_words(
    path: Path | None,
    sets: tuple[str, ...],
    run_dir: str | None,
    folder: Path,
    resume: str | None,
    overwrite: bool,
    times: int | None,
) -> list[str]:
    """``fit`` with these options; a run folder in use is told now, not when the job starts."""
    from hvd_train.core.folder import check_free

    check_free(folder, resume, overwrite)
    given = {"-c": path, "--run-dir": run_dir, "--resume": resume or ("auto" if times else None)}
    words = ["fit", *(str(word) for name, value in given.items() if value is not None for word in (name, value))]
    return words + ["--overwrite"] * overwrite + [word for setting in sets for word in ("--set", setting)]


@cli.command(hidden=True)
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("code", type=int)
def ended(folder: Path, code: int) -> None:
    """The last line of a sweep's batch script."""
    from hvd_train.sweep.array import ended

    sys.exit(ended(folder, code))


@cli.command(hidden=True)
@click.option("--times", type=int, required=True)
@click.option("--run-dir", type=click.Path(path_type=Path))
@click.argument("code", type=int)
def requeue(times: int, run_dir: Path | None, code: int) -> None:
    """The last line of the batch script of ``submit --requeue``."""
    from hvd_train.launch.requeue import requeue

    sys.exit(requeue(code, times, run_dir))


trained_run_option = click.option(
    "--run-dir",
    type=click.Path(file_okay=False),
    help="Run folder of the training; the configuration saved with the checkpoint is used.",
)
trust_option = click.option(
    "--trust", is_flag=True, help="Import the code (package.module:function) that the run folder names."
)


def trained_run_options(command: Callable) -> Callable:
    """What eval and predict share."""
    own = (trained_run_option, config_option, set_option, checkpoint_option, trust_option, split_option)
    for option in reversed((*own, num_proc_option, launcher_option, verbose_option)):
        command = option(command)
    return command


@cli.command("eval")
@trained_run_options
def evaluate(
    run_dir: str | None,
    path: Path | None,
    sets: tuple[str, ...],
    checkpoint: str,
    trust: bool,
    split: str | None,
    num_proc: int | None,
    launcher: str,
    verbose: bool,
) -> None:
    """Loss and accuracy of a trained model; every sample counts exactly once, on any number of ranks.

    \b
    hvd-train eval --run-dir runs/cnn
    hvd-train eval --run-dir runs/cnn --set data.path=new.csv             (all samples of other data)
    hvd-train eval --run-dir runs/cnn --set framework=tensorflow -np 2    (weights cross frameworks)
    """
    from hvd_train.jobs.evaluate import evaluate
    from hvd_train.jobs.trained_run import refuse_foreign, trained_config

    config, named = trained_config(path, sets, run_dir, checkpoint)
    refuse_foreign({} if trust else named, run_dir)
    _launch_or(num_proc, launcher, verbose, lambda: evaluate(config, checkpoint, split, verbose))


@cli.command()
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="A .npy file: logits, one row a sample; with --names a .csv file.",
)
@click.option("--names", is_flag=True, help="Write a table: each sample's class by name, and its probability.")
@click.option("--overwrite", is_flag=True, help="Replace the file.")
@trained_run_options
def predict(
    run_dir: str | None,
    path: Path | None,
    sets: tuple[str, ...],
    checkpoint: str,
    trust: bool,
    split: str | None,
    output: Path,
    names: bool,
    overwrite: bool,
    num_proc: int | None,
    launcher: str,
    verbose: bool,
) -> None:
    """Write a trained model's predictions in the data set's order; data without labels will do.

    \b
    hvd-train predict --run-dir runs/cnn -o predictions.npy -np 2
    hvd-train predict --run-dir runs/cnn --set data.path=photos --names -o photos.csv
    """
    from hvd_train.jobs.predict import check_names, check_output, predict
    from hvd_train.jobs.trained_run import refuse_foreign, trained_config

    config, named = trained_config(path, sets, run_dir, checkpoint)
    refuse_foreign({} if trust else named, run_dir)
    check_output(config, output, overwrite)
    if names:
        check_names(config, output)
    work = (config, checkpoint, output, split, verbose, overwrite, names)
    _launch_or(num_proc, launcher, verbose, lambda: predict(*work))


@cli.command()
@config_option
@set_option
@click.option("-np", "--num-proc", type=click.IntRange(min=2), required=True, help="Ranks that are held against one.")
@click.option("--steps", type=click.IntRange(min=1), default=20, show_default=True, help="Steps to train.")
@launcher_option
@click.option(
    "--report", metavar="FILE.html", type=click.Path(dir_okay=False, path_type=Path), help="Write a page with curves."
)
@verbose_option
@click.argument("program", metavar="[-- python SCRIPT.py ...]", nargs=-1, type=click.UNPROCESSED)
def verify(
    program: tuple[str, ...],
    path: Path | None,
    sets: tuple[str, ...],
    num_proc: int,
    steps: int,
    launcher: str,
    report: Path | None,
    verbose: bool,
) -> None:
    """Train a few steps on N ranks and on one, in PyTorch and in Keras, and compare everything.

    \b
    hvd-train verify -c job.yaml -np 2                      exit code 0: all equal, 1: something differs
    hvd-train verify -c job.yaml -np 3 --report proof.html  with the loss curves drawn over each other
    hvd-train verify -np 2 -- python train.py --lr 0.1      a script of your own, with hvd_train.torch or .keras
    """
    if program:
        from hvd_train.verify.script import verify_script

        if path or sets:
            raise ConfigError("a script has no configuration", where="verify", fix="leave out -c and --set")
        sys.exit(verify_script(program, num_proc, steps, launcher, report, verbose))
    from hvd_train.config import load_config
    from hvd_train.verify import compare as proof

    sys.exit(proof.verify(load_config(path, sets), num_proc, steps, launcher, report, verbose))


@cli.command(hidden=True)
@click.argument("folder", type=click.Path(path_type=Path))
@verbose_option
def record(folder: Path, verbose: bool) -> None:
    """One rank of verify."""
    from hvd_train.verify.record import record as worker

    sys.exit(worker(folder, verbose))


@cli.command()
@trained_run_option
@config_option
@set_option
@checkpoint_option
@trust_option
@click.option(
    "--to",
    required=True,
    type=click.Choice([*(f.format for f in FRAMEWORKS.values() if f.format), "torch-export", "onnx", "safetensors"]),
    help="The file's format.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file (without: model.pt, .keras, .pt2, .onnx or .safetensors in the run folder).",
)
@click.option("--overwrite", is_flag=True, help="Replace the file.")
@verbose_option
def export(
    run_dir: str | None,
    path: Path | None,
    sets: tuple[str, ...],
    checkpoint: str,
    trust: bool,
    to: str,
    output: Path | None,
    overwrite: bool,
    verbose: bool,
) -> None:
    """Write a trained model as a file that needs no hvd_train; says what it takes and how to load it.

    \b
    hvd-train export --run-dir runs/cnn --to pytorch       a state dictionary for torch.load and the model's code
    hvd-train export --run-dir runs/cnn --to torch-export  a program for torch.export.load, without the model's code
    hvd-train export --run-dir runs/cnn --to keras         for keras.models.load_model, whichever framework trained it
    hvd-train export --run-dir runs/cnn --to onnx -o cnn.onnx --checkpoint best
    hvd-train export --run-dir runs/cnn --to safetensors   weights alone, under names that both frameworks share
    """
    from hvd_train.jobs.export import export
    from hvd_train.jobs.trained_run import trained_config

    config, named = trained_config(path, sets, run_dir, checkpoint)
    sys.exit(export(config, checkpoint, to, output, overwrite, verbose, {} if trust else named))


@cli.command()
@click.argument("run_dirs", metavar="RUN_DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", metavar="FILE.png", type=click.Path(dir_okay=False, path_type=Path), help="Draw their curves too."
)
@click.option("--by", type=click.Choice(["epoch", "step"]), default="epoch", show_default=True, help="Of the curves.")
def compare(run_dirs: tuple[Path, ...], output: Path | None, by: str) -> None:
    """Finished runs side by side.

    \b
    hvd-train compare runs/a runs/b -o curves.png
    hvd-train compare runs/a runs/b -o curves.png --by step   each line of the log (log_every_n_steps)
    """
    from hvd_train.report.tables import side_by_side

    click.echo(side_by_side(run_dirs))
    if output is not None:
        from hvd_train.report.plots import curves

        curves(run_dirs, output, by)
        click.echo(f"curves: {output}")


@cli.command()
@hosts_options
@launcher_option
@verbose_option
def doctor(
    hosts: str | None, hostfile: Path | None, network_interfaces: str | None, launcher: str, verbose: bool
) -> None:
    """What is built, what is missing and how to get it; then a 2-rank allreduce in each framework, with its speed.

    Over several hosts: a row for each, the speed between them, and in what they differ (exit code 1).

    \b
    hvd-train doctor -H node1:2,node2:2             as fit is started, with one rank on each host
    mpirun -np 2 --hostfile hosts.txt hvd-train doctor
    srun -N 2 hvd-train doctor
    """
    from hvd_train.launch.environment import world
    from hvd_train.launch.hosts import Hosts, parse

    where, started = parse(hosts, hostfile, network_interfaces), world().launcher
    if (where or launcher != "auto") and started:
        raise ConfigError("the ranks are started already", where=f"by {started}", fix="leave out --hosts, --launcher")
    if started:
        from hvd_train.doctor import hosts as several

        sys.exit(several.hosts())
    if where:
        from hvd_train.launch import launch

        one_each = Hosts(dict.fromkeys(where.slots, 1), where.interfaces)
        words = _without_launch_options(sys.argv[1:])
        sys.exit(launch(len(one_each.slots), launcher, words, verbose, hosts=one_each))
    if launcher != "auto":
        raise ConfigError("of which hosts", where="--launcher", fix="give --hosts too, or leave it out: all are tried")
    from hvd_train.doctor import host

    sys.exit(host.doctor(verbose))


@cli.command(hidden=True)
@click.option("--framework", type=click.Choice(list(FRAMEWORKS)), required=True)
def probe(framework: str) -> None:
    """One rank of the doctor's allreduce."""
    from hvd_train.doctor import host

    sys.exit(host.probe(framework))


@cli.command("config")
@config_option
@set_option
@click.option(
    "--explain",
    metavar="[KEY]",
    is_flag=False,
    flag_value="",
    help="Type, default and meaning of every key, of a section's keys, or of one key.",
)
def show_config(path: Path | None, sets: tuple[str, ...], explain: str | None) -> None:
    """Print the resolved configuration, or explain its keys.

    \b
    hvd-train config > job.yaml          a full file to start from
    hvd-train config -c job.yaml         what the defaults make of it
    hvd-train config --explain optim     the keys of a section, or one key: optim.lr
    """
    from hvd_train import config as configuration

    if explain is None:
        click.echo(configuration.resolved_yaml(configuration.load_config(path, sets)), nl=False)
        return
    from hvd_train.report.tables import explanations

    click.echo(explanations(configuration.explained(explain)))


@cli.command()
def models() -> None:
    """List the models that both frameworks have, with their options."""
    from hvd_train.cli.zoo import listing
    from hvd_train.report.tables import table

    click.echo(table(["model.name", "options", "frameworks", "what"], listing()))
    click.echo("Your own: model.name 'package.module:function', called with input_shape, num_classes and the options.")


@cli.group(invoke_without_command=True)
@click.pass_context
def data(context: click.Context) -> None:
    """List the kinds of data sets, and what can be done to their samples; pack one, check a packed one."""
    if context.invoked_subcommand:
        return
    from hvd_train.data import transforms
    from hvd_train.data.sources import catalog
    from hvd_train.report.tables import table

    click.echo(table(["data.name", "what"], list(catalog().items())))
    click.echo("Your own: data.name 'package.module:function', called with data.options, giving (train, val).\n")
    click.echo(table(["data.transforms", "what"], list(transforms.catalog().items())))
    click.echo("Your own: 'package.module:function', called with a sample's array and a numpy Generator.")


@data.command("pack")
@config_option
@set_option
@click.argument("paths", metavar="[SOURCE] FOLDER", nargs=-1, required=True, type=click.Path())
def data_pack(path: Path | None, sets: tuple[str, ...], paths: tuple[str, ...]) -> None:
    """Write a data set as a few large files, to be read with data: {name: packed, path: FOLDER}.

    \b
    hvd-train data pack photos packed --set data.image_size=64      a folder of images
    hvd-train data pack -c job.yaml packed                          whatever a configuration reads
    mpirun -np 4 hvd-train data pack -c job.yaml packed             four processes share the work
    """
    import time

    from hvd_train.config import load_config
    from hvd_train.config.own import look_in
    from hvd_train.data import packing, sources

    *source, target = paths
    if len(source) > 1:
        raise ConfigError(f"{len(paths)} paths", where="data pack", fix="give the data's path and a folder to write")
    if source:
        named = path is not None or any(one.startswith("data.name=") for one in sets)
        own = [] if named else [f"data.name={packing.kind_of(Path(source[0]))}"]
        sets = (*sets, *own, f"data.path={json.dumps(source[0])}")
    config, began = load_config(path, sets), time.monotonic()
    look_in(config.code_dir)
    world, folder = _packing_world(), Path(target)
    manifest = sources.pack(config.data, config.task, folder, world)
    if world.rank == 0:
        took = f"{time.monotonic() - began:.1f} s, {world.size} rank{'s' * (world.size > 1)}"
        click.echo(f"packed {packing.facts(manifest)}: {folder} ({took})")


@data.command("check")
@click.argument("folder", type=click.Path(path_type=Path))
def data_check(folder: Path) -> None:
    """Read a packed data set and compare all checksums; exit code 3 names the first file that is damaged.

    hvd-train data check packed
    """
    from hvd_train.data import packing

    world = _packing_world()
    manifest = packing.check(folder, world)
    if world.rank == 0:
        click.echo(f"as it was written: {packing.facts(manifest)}: {folder}")


def _packing_world() -> Any:
    from hvd_train.data.packing import Alone
    from hvd_train.launch.environment import world

    here = world()
    if here.size == 1:
        return Alone()
    from hvd_train.frontends.mpi import mpi_world

    return mpi_world(here)


@cli.command()
@click.argument("topic", required=False)
def guide(topic: str | None) -> None:
    """Read the guide: a page, or the list of them.

    hvd-train guide first-run
    """
    from hvd_train.cli import guide as pages
    from hvd_train.report.tables import table

    if topic is None:
        click.echo(table(["hvd-train guide", "what"], [[name, pages.title(name)] for name in pages.ORDER]))
    else:
        pages.show(pages.page(topic))


def main() -> None:
    """Runs the command; the user's mistakes become lines on stderr and an exit code, never a traceback."""
    # A training outlives its reader: the run folder has all that it says.
    streams.guard("stderr", *(["stdout"] if sys.argv[1:2] in (["fit"], ["sweep"]) else []))
    from hvd_train.launch import shutdown

    try:
        if sys.argv[1:2] == ["fit"]:  # a signal may come at any moment
            from hvd_train.launch.outside import listen

            listen().anew()
        cli.main(prog_name="hvd-train", standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        shutdown.shutdown(error.exit_code)
    except click.ClickException as error:
        command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "hvd-train"
        text = " ".join(error.format_message().split())  # click lists choices one a line
        shutdown.tell(text, [f"error{shutdown.rank_tag()}: {text} See '{command} --help'."], error.exit_code)
        shutdown.shutdown(error.exit_code)
    except KeyboardInterrupt:
        shutdown.shutdown(130)
    except streams.ReaderLeftError:
        shutdown.shutdown(0)
    except Exception as error:
        shutdown.shutdown_with(error)
