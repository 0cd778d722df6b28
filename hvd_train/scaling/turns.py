"""Measure: run after run on this host or in this allocation, or all as Slurm jobs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hvd_train.errors import ConfigError, amount
from hvd_train.launch import logged
from hvd_train.launch import submit as jobs
from hvd_train.scaling.points import Point, measured
from hvd_train.scaling.runs import WARM, read
from hvd_train.scaling.study import Study, discard, load, prepare
from hvd_train.sweep.folder import CONFIG, LOG, fail
from hvd_train.sweep.local import fit
from hvd_train.sweep.trials import Trial

PILOT_STEPS = 20
FEWEST_STEPS, MOST_STEPS = 40, 20_000
PRECISE = 0.05  # the half interval of a step's time from which no further run is needed


@dataclass(frozen=True)
class Limits:
    """``seconds``: measured in a run on the fewest ranks. ``repeats``: short runs of each point, at most.

    ``minutes``: after which no run is begun.
    """

    seconds: float = 10.0
    repeats: int = 5
    minutes: float = math.inf


def measure(
    study: Study, starting: Callable[[int], Sequence[str]], limits: Limits, report: Callable[[str], None]
) -> int:
    """Run what is missing. Returns 0, or the exit code of the signal that stopped it.

    ``starting``: number of ranks -> options of ``fit`` that start them. ``report`` gets a line for each run.
    """
    end = time.monotonic() + 60 * limits.minutes
    if study.steps is None:
        study, code = _with_length(study, starting, limits, report)
        if code:
            return code
    for turn in range(limits.repeats):
        points = measured(study).points
        if turn > 1 and all(precise(one) or one.problem for one in points):
            break
        for point in points:
            trial = study.short_run(point.ranks, turn)
            name = f"run {turn + 1} of at most {limits.repeats}, {amount(point.ranks, 'rank')}"
            if point.problem or study.state(trial).word == "done":
                continue
            if time.monotonic() > end:
                report(f"{limits.minutes:g} minutes have passed: nothing further is measured")
                return 0
            discard(trial)
            if code := _run(study, trial, ["--overwrite", *starting(point.ranks)], name, report):
                return code
    for seed in range(study.seeds if study.target else 0):
        for ranks in study.ranks:
            trial = study.training(ranks, seed)
            name = f"training {seed + 1} of {study.seeds} to {study.target}, {amount(ranks, 'rank')}"
            if study.state(trial).word in ("done", "failed"):
                continue
            if time.monotonic() > end:
                report(f"{limits.minutes:g} minutes have passed: nothing further is measured")
                return 0
            if code := _run(study, trial, ["--resume", "auto", *starting(ranks)], name, report):
                return code
    return 0


def precise(one: Point) -> bool:
    return one.uncertainty is not None and one.uncertainty <= PRECISE


def _run(study: Study, trial: Trial, words: Sequence[str], name: str, report: Callable[[str], None]) -> int:
    """Run ``fit`` for a trial, and record a failure. Returns 0, or the exit code of the signal that stopped it."""
    prepare(trial)
    code = fit(trial, words)
    if code in logged.STOPPED:
        return code
    run_dir = Path(trial.config.run_dir)
    if study.state(trial).word != "done":
        why = logged.reason(run_dir / LOG, code)
        fail(trial, why, code)
        report(f"{name}: failed: {why}")
    elif run := read(run_dir):
        report(f"{name}: {float(run.milliseconds.mean()):.3g} ms a step, {run.rate:,.0f} samples/s")
    else:
        report(f"{name}: done")
    return 0


def _with_length(
    study: Study, starting: Callable[[int], Sequence[str]], limits: Limits, report: Callable[[str], None]
) -> tuple[Study, int]:
    """Choose the number of steps of each run, by a first short one. Returns (the study with it, 0 or the code of a
    signal). Raises ConfigError with the reason if the configuration does not train."""
    trial = study.pilot(PILOT_STEPS)
    prepare(trial)
    code = fit(trial, ["--overwrite", *starting(study.ranks[0])])
    if code in logged.STOPPED:
        return study, code
    run = read(Path(trial.config.run_dir))
    if run is None:
        log = Path(trial.config.run_dir) / LOG
        raised = ConfigError(f"a short training does not run: {logged.reason(log, code)}", where=str(study.folder))
        raised.exit_code = code or 1
        raise raised
    steps = 1000 * limits.seconds / float(run.milliseconds.mean()) / (1 - WARM)
    study = replace(study, steps=math.ceil(min(max(steps, FEWEST_STEPS), MOST_STEPS)))
    study.save()
    report(f"each run takes {study.steps} steps, of which the first quarter is not timed")
    return study, 0


def scripts(study: Study, limits: Limits, title: str) -> list[tuple[Trial, str]]:
    """Return (run, batch script) for each run that is missing, in turns. Raises ConfigError."""
    if study.steps is None:
        what = "a job needs to know how long it trains"
        raise ConfigError(what, where="--slurm", fix="give --steps, for example --steps 200")
    runs = [(study.short_run(n, turn), "--overwrite") for turn in range(limits.repeats) for n in study.ranks]
    if study.target:
        runs += [(study.training(n, seed), "--resume auto") for seed in range(study.seeds) for n in study.ranks]
    result = []
    for trial, how in runs:
        if study.state(trial).word == "done":
            continue
        run_dir = Path(trial.config.run_dir).absolute()
        settings = study.config.slurm.model_dump() | places(trial.values["ranks"], study.config.slurm.ntasks_per_node)
        settings |= {"requeue": None}
        batch = jobs.BatchJob(settings, f"{title}-{trial.values['ranks']}", str(run_dir / LOG).replace("%", "%%"))
        words = batch.hvd_train(["fit", "-c", str(run_dir / CONFIG), "--run-dir", str(run_dir), *how.split()])
        result.append((trial, batch.script(words, then=[[*jobs.HERE, "ended", str(run_dir)]])))
    return result


def ended(run_dir: Path, code: int) -> int:
    """Record that the job of a run exited with ``code``; return the code."""
    study = load(run_dir.parents[1])
    kind, _, number = run_dir.name.partition("-")
    ranks = int(run_dir.parent.name.partition("-")[2])
    trial = (study.training if kind == "seed" else study.short_run)(ranks, int(number))
    if code not in logged.STOPPED and study.state(trial).word != "done":
        fail(trial, logged.reason(run_dir / LOG, code), code)
    return code


def places(ranks: int, each: int) -> dict[str, int]:
    """Return Slurm's nodes and tasks a node for so many ranks, at most ``each`` on a node. Raises ConfigError."""
    nodes = -(-ranks // each)
    if ranks % nodes:
        what = f"{ranks} ranks cannot be spread evenly over {nodes} nodes of at most {each}"
        raise ConfigError(what, where="--ranks", fix=f"give multiples of {each}, or divisors of it")
    return {"nodes": nodes, "ntasks_per_node": ranks // nodes}
