"""A sweep's folder: sweep.json (the plan), a run folder per trial, and rungs.json (which trials continue).

The result of a trial is in its folder only, so all readers see the same, including a later ``--resume``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvd_train.config import digest, load_config, resolved_yaml
from hvd_train.errors import CheckpointError, ConfigError
from hvd_train.files import content as content_of
from hvd_train.files import put
from hvd_train.run_folder import layout, safe_reading
from hvd_train.sweep.rungs import Rung
from hvd_train.sweep.trials import Trial

PLAN, DECIDED, CONFIG, FAILED, LOG = "sweep.json", "rungs.json", "trial.yaml", "failed.json", "output.log"


@dataclass(frozen=True)
class Sweep:
    """A sweep: its folder, trials and rungs; ``repeats``: the keys (seed, data.fold) over which it repeats."""

    folder: Path
    trials: Sequence[Trial]
    rungs: Sequence[Rung]
    repeats: Sequence[str] = ()


@dataclass(frozen=True)
class State:
    """The progress of a trial, read from its folder.

    word: waiting, running, paused (at the end of a rung), stopped (eliminated), done or failed. rung: rungs completed.
    """

    word: str
    summary: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    code: int = 0
    rung: int = 0


def begin(sweep: Sweep, resume: bool) -> None:
    """Write the plan of a new sweep, or with ``resume`` compare it with the existing one.

    With ``resume`` records of failures are removed, so that these trials run again. Raises ConfigError and
    CheckpointError.
    """
    path = sweep.folder / PLAN
    trials = [{"values": dict(trial.values), "config": digest(trial.config)} for trial in sweep.trials]
    content = {"trials": trials, "rungs": sweep.rungs, "repeats": list(sweep.repeats)}
    try:
        if resume:
            if json.loads(content_of(path)) != json.loads(json.dumps(content)):
                fix = "give the same configuration and parameters, or another --run-dir"
                raise ConfigError("the folder holds another sweep", where=str(path), fix=fix)
            for trial in survivors(sweep)[1]:
                (Path(trial.config.run_dir) / FAILED).unlink(missing_ok=True)
            return
        if path.exists():
            fix = "--resume runs what is missing; or give another --run-dir"
            raise ConfigError("the folder holds a sweep already", where=str(sweep.folder), fix=fix)
        if layout.holds_run(sweep.folder):
            raise ConfigError(
                "the folder holds a run",
                where=str(sweep.folder),
                fix="give the sweep a folder of its own: another --run-dir",
            )
        # The plan is written last, so a folder with a plan has all trials.
        for trial in sweep.trials:
            run_dir = Path(trial.config.run_dir)
            run_dir.mkdir(parents=True, exist_ok=True)
            put(run_dir / CONFIG, resolved_yaml(trial.config).encode())
        put(path, json.dumps(content, indent=1).encode() + b"\n")
    except FileNotFoundError as error:
        raise ConfigError("there is no sweep to continue", where=str(path), fix="leave out --resume") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the plan of the sweep cannot be used: {str(error).splitlines()[0]}", where=str(path)
        ) from error


def load(folder: Path) -> Sweep:
    """Read the sweep in a folder, which may have been moved."""
    path = folder / PLAN
    try:
        content = json.loads(content_of(path))
        trials = []
        for number, one in enumerate(content["trials"]):
            run_dir = folder / f"trial-{number:03d}"
            trials.append(Trial(number, one["values"], load_config(run_dir / CONFIG, run_dir=str(run_dir))))
        return Sweep(folder, trials, [Rung(*rung) for rung in content["rungs"]], tuple(content["repeats"]))
    except FileNotFoundError as error:
        raise ConfigError("the folder holds no sweep", where=str(folder), fix="give the --run-dir of one") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"the plan of the sweep cannot be used: {str(error).splitlines()[0]}", where=str(path)
        ) from error


def state(sweep: Sweep, trial: Trial) -> State:
    """Read the state of a trial from its folder."""
    run_dir, summary, rung = Path(trial.config.run_dir), {}, 0
    with suppress(OSError, ValueError):
        summary = _object(run_dir / "summary.json")
        # "paused_at" is the epoch at which the run paused at the end of a rung.
        at = summary.get("paused_at")
        if at is None:
            return State("done", summary, rung=len(sweep.rungs))
        rung = sum(one.end is not None and one.end <= at for one in sweep.rungs)
    with suppress(OSError, ValueError, TypeError):
        return State("failed", **_object(run_dir / FAILED), rung=rung)
    if not summary:
        return State("running" if (run_dir / LOG).exists() else "waiting")
    decided = _decided(sweep)
    stopped = len(decided) >= rung > 0 and trial.number not in decided[rung - 1]
    return State("stopped" if stopped else "paused", summary, rung=rung)


def _object(path: Path) -> dict[str, Any]:
    return safe_reading.parsed(content_of(path))


def fail(trial: Trial, error: str, code: int) -> None:
    """Write the error and exit code of a failed trial to its folder. Raises CheckpointError."""
    run_dir = Path(trial.config.run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        put(run_dir / FAILED, json.dumps({"error": error, "code": code}).encode())
    except OSError as reason:
        what = f"a failure cannot be recorded: {reason.strerror}"
        raise CheckpointError(what, where=str(run_dir), fix=error) from reason


def survivors(sweep: Sweep) -> tuple[int, Sequence[Trial]]:
    """Return (the number of decided rungs, the trials that continue after them)."""
    decided = _decided(sweep)
    return len(decided), [sweep.trials[number] for number in decided[-1]] if decided else sweep.trials


def decide_rung(sweep: Sweep, trials: Sequence[Trial]) -> None:
    """Record which trials continue after the rung that has ended."""
    decided = [*_decided(sweep), sorted(trial.number for trial in trials)]
    put(sweep.folder / DECIDED, json.dumps(decided).encode())


def _decided(sweep: Sweep) -> list[list[int]]:
    """Read for each ended rung the numbers of the trials that continue."""
    with suppress(OSError, ValueError):
        return json.loads(content_of(sweep.folder / DECIDED))
    return []
