"""A sweep's folder: sweep.json (the plan), a run folder for each trial, results.csv, results.png, best.yaml.

What a trial came to stands in its own folder, so whoever looks, a later ``--resume`` too, sees the same.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvd_train.config import digest, resolved_yaml
from hvd_train.core.files import put
from hvd_train.errors import CheckpointError, ConfigError
from hvd_train.report.tables import table
from hvd_train.sweep.plan import Trial

PLAN, FAILED, LOG = "sweep.json", "failed.json", "output.log"


@dataclass(frozen=True)
class State:
    """``word``: waiting, running, done or failed."""

    word: str
    summary: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    code: int = 0


def begin(folder: Path, trials: Sequence[Trial], resume: bool) -> None:
    """Writes the plan; with ``resume`` it must be the one that is there. Forgets what had failed, to try it again."""
    path = folder / PLAN
    content = {"trials": [{"values": dict(trial.values), "config": digest(trial.config)} for trial in trials]}
    try:
        if resume:
            if json.loads(path.read_bytes()) != json.loads(json.dumps(content)):
                fix = "give the same configuration and parameters, or another --run-dir"
                raise ConfigError("holds another sweep", where=str(path), fix=fix)
            for trial in trials:
                (Path(trial.config.run_dir) / FAILED).unlink(missing_ok=True)
            return
        if path.exists():
            fix = "--resume runs what is missing; or give another --run-dir"
            raise ConfigError("holds a sweep already", where=str(folder), fix=fix)
        folder.mkdir(parents=True, exist_ok=True)
        put(path, json.dumps(content, indent=1).encode() + b"\n")
    except FileNotFoundError as error:
        raise ConfigError("there is no sweep to go on with", where=str(path), fix="leave out --resume") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot be used: {str(error).splitlines()[0]}", where=str(path)) from error


def state(trial: Trial) -> State:
    run_dir = Path(trial.config.run_dir)
    with suppress(OSError, ValueError):
        return State("done", json.loads((run_dir / "summary.json").read_bytes()))
    with suppress(OSError, ValueError):
        return State("failed", **json.loads((run_dir / FAILED).read_bytes()))
    return State("running" if (run_dir / LOG).exists() else "waiting")


def fail(trial: Trial, error: str, code: int) -> None:
    run_dir = Path(trial.config.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    put(run_dir / FAILED, json.dumps({"error": error, "code": code}).encode())


def rows(trials: Sequence[Trial]) -> tuple[list[str], list[list[Any]]]:
    """The table of all trials: their values, how they stand, and what the finished ones came to."""
    states = [state(trial) for trial in trials]
    told = list(dict.fromkeys(key for one in states for key in one.summary if _metric(key)))
    header = ["trial", *trials[0].values, "state", *told, "samples_per_second"]
    found = []
    for trial, one in zip(trials, states, strict=True):
        values = [
            value if isinstance(value, int | float | str) else json.dumps(value) for value in trial.values.values()
        ]
        word = one.word if one.word != "failed" else f"failed: {one.error}"
        found.append([trial.name, *values, word, *(one.summary.get(key) for key in (*told, header[-1]))])
    return header, found


def _metric(key: str) -> bool:
    return key.startswith("val_") and key != "val_samples"


def shown(trials: Sequence[Trial]) -> tuple[list[str], list[list[str]]]:
    header, found = rows(trials)
    digits = {header[-1]: ",.0f"}
    at = header.index("state")
    cells = [[_cell(name, x, digits) for name, x in zip(header, row, strict=True)] for row in found]
    return header, [[*row[:at], row[at].partition(":")[0], *row[at + 1 :]] for row in cells]


def _cell(name: str, value: Any, digits: dict[str, str]) -> str:
    if value is None:
        return ""
    measured = isinstance(value, float) and (_metric(name) or name in digits)
    return format(value, digits.get(name, ".4f")) if measured else str(value)[:60]


def best(trials: Sequence[Trial]) -> Trial | None:
    """By ``checkpoint.monitor`` at the end of each training."""
    found = []
    for trial in trials:
        rule = trial.config.checkpoint
        value = state(trial).summary.get(rule.monitor)
        if isinstance(value, int | float) and value == value:
            found.append((value if rule.mode == "min" else -value, trial.number))
    return trials[min(found)[1]] if found else None


def finish(folder: Path, trials: Sequence[Trial]) -> str:
    """Writes results.csv, results.png and best.yaml; gives the table and what is best, or raises if all failed."""
    states = [state(trial) for trial in trials]
    header, found = rows(trials)
    text = io.StringIO()
    csv.writer(text).writerows([header, *found])
    put(folder / "results.csv", text.getvalue().encode())
    failed = [one for one in states if one.word == "failed"]
    if len(failed) == len(trials):
        raised = ConfigError(f"all {len(trials)} trials failed, the first with: {failed[0].error}", where=str(folder))
        raised.exit_code = failed[0].code if len({one.code for one in failed}) == 1 else 1
        raise raised
    lines = [table(*shown(trials))]
    first = best(trials)
    if first is not None:
        monitor = first.config.checkpoint.monitor
        chosen = first.config.model_copy(update={"run_dir": str(folder / "best")})
        put(folder / "best.yaml", resolved_yaml(chosen).encode())
        picture(folder / "results.png", trials, first)
        value = state(first).summary[monitor]
        lines.append(f"best: {first.name} ({first.told}), {monitor} {value:.4f}; {folder / 'best.yaml'}")
    left = len(trials) - len(failed) - sum(one.word == "done" for one in states)
    if left:
        lines.append(f"{left} of {len(trials)} trials were not run; --resume runs them")
    if failed:
        lines.append(f"{len(failed)} of {len(trials)} trials failed, the first with: {failed[0].error}")
    return "\n".join(lines)


def picture(path: Path, trials: Sequence[Trial], first: Trial) -> None:
    """The monitored value over each parameter, the best trial marked."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    monitor = first.config.checkpoint.monitor
    done = [trial for trial in trials if state(trial).summary.get(monitor) is not None]
    values = [state(trial).summary[monitor] for trial in done]
    keys = [key for key in trials[0].values if len({json.dumps(trial.values[key]) for trial in trials}) > 1]
    keys = keys or list(trials[0].values)
    figure, axes = pyplot.subplots(
        1, len(keys), figsize=(4.2 * len(keys), 3.6), layout="constrained", sharey=True, squeeze=False
    )
    for axis, key in zip(axes[0], keys, strict=True):
        at = [trial.values[key] for trial in done]
        numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in at)
        place = at if numbers else [str(x) for x in at]
        axis.scatter(place, values, color="C0", label="trial")
        mine = done.index(first)
        axis.scatter([place[mine]], [values[mine]], marker="*", s=200, color="C1", label=f"best: {first.name}")
        if numbers and min(at) > 0 and max(at) >= 8 * min(at):
            axis.set_xscale("log")
        axis.set(xlabel=key)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel(monitor)
    axes[0][0].legend(fontsize=8)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise CheckpointError(f"the picture cannot be written: {error.strerror}", where=str(path)) from error
    finally:
        pyplot.close(figure)
