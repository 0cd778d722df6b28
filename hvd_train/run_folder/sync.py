"""Send the numbers of run folders to trackers, while a run goes on or later (``hvd-train sync``).

A tracker is asked what it has, so that a second call sends only what is new, also after a kill or a lost connection.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvd_train.config import leaves
from hvd_train.config.trackers import TARGETS, TargetSpec
from hvd_train.errors import CheckpointError, ConfigError, TrainError, amount, named_reason
from hvd_train.run_folder import layout, lock, metrics_file, safe_reading
from hvd_train.run_folder.lock import Lock
from hvd_train.run_folder.terminal import warn
from hvd_train.run_folder.trackers import import_package
from hvd_train.run_folder.trackers.tracker import Known, Point, SavedRun, Target, TrackedRun

JUDGED = ("/train", "/val")  # endings of results, in which a repeated step is equal; speeds are not
AGAIN = "what was sent is kept; run the command again"


def check(run_dirs: Sequence[Path]) -> None:
    """Raise ConfigError if one of the folders holds no run."""
    for run_dir in run_dirs:
        if not run_dir.is_dir():
            raise ConfigError("there is no such run folder", where=str(run_dir))
        if not (run_dir / metrics_file.NAME).exists():
            several = any(run_dir.glob(f"*/{metrics_file.NAME}"))
            fix = f"give the folders of its runs: {run_dir}/*" if several else ""
            raise ConfigError(f"holds no run: it has no {metrics_file.NAME}", where=str(run_dir), fix=fix)


def opened(name: str, address: str = "", project: str = "") -> TargetSpec:
    """Import what the target ``name`` needs. Raises ConfigError if it is not installed, or has no such option."""
    spec = TARGETS[name]
    for option, value, taken in (("--uri", address, spec.address), ("--project", project, spec.project)):
        if value and not taken:
            raise ConfigError(f"{name} takes no {option}", where=option, fix="leave it out")
    for variable, text in {**spec.environment, **spec.patience}.items():
        os.environ.setdefault(variable, text)
    if spec.package:
        import_package(spec.package, f"--to {name}", f"pip install {spec.package}")
    return spec


def sync(run_dir: Path, name: str, spec: TargetSpec, address: str = "", project: str = "") -> str:
    """Send what the target does not have yet. Returns a line for the user. Raises ConfigError and CheckpointError."""
    config = dict(leaves(safe_reading.yaml_object(run_dir / "config.yaml")))
    run = TrackedRun(run_dir, config, address, project)
    with Lock(run.folder, "another sync may be at work; wait for its end"):
        saved = read(run_dir)
        try:
            return _sent(spec.target_class(run), saved, run_dir)
        except TrainError:
            raise
        except (Exception, SystemExit) as error:  # a library may raise anything, and call sys.exit() itself
            where = f"--to {name}" + f" --uri {address}" * bool(address)
            raise ConfigError(f"{name} failed: {named_reason(error)}", where=where, fix=AGAIN) from error


def read(run_dir: Path) -> SavedRun:
    """Read what a run folder holds, also while it is written."""
    # In this order: a run that has ended meanwhile is only taken for one that goes on.
    held = lock.state(run_dir) == "held"
    summary: dict[str, Any] = {}
    with suppress(FileNotFoundError, CheckpointError):
        summary = safe_reading.json_object(run_dir / layout.SUMMARY)
    rows, damaged = metrics_file.read(run_dir)
    if damaged:
        warn(f"{amount(damaged, 'damaged line')} of {run_dir / metrics_file.NAME} left out")
    points = [Point(row["epoch"], row["step"], values) for row in rows if (values := metrics_file.scalars(row))]
    steps = summary.get("steps")
    if held or not isinstance(steps, int) or steps < max((row["step"] for row in rows), default=0):
        return SavedRun(points, {}, "running" if held else "stopped")
    return SavedRun(points, summary, "stopped" if summary.get("paused_at") else "finished")


def _sent(target: Target, saved: SavedRun, run_dir: Path) -> str:
    if target.live and saved.state == "running":
        return f"{run_dir}: the training itself sends its numbers to {target.place}; run sync after its end"
    known, note = target.known(saved), ""
    step = _first_difference(known, saved, target)
    if step is not None:
        old = target.renew(step)
        known = {key: value for key, value in target.known(saved).items() if key[1] < step} if old else known
        note = f"; a resumed run has other numbers from step {step} on: {old}" if old else ""
    new = _missing(saved.points, known)
    target.send(saved.points if target.whole and new else new)
    target.finish(saved)
    there = len(saved.points) - len(new)
    if not new:
        return f"{run_dir}: {target.place} has all {amount(there, 'line')}{note}"
    had = f", {there} were there already" if there else ""
    return f"{run_dir}: {amount(len(new), 'line')} sent to {target.place}{had}{note}"


def _missing(points: Sequence[Point], known: Known) -> list[Point]:
    """Return the points with the numbers that are not known, each number once."""
    have, missing = set(known), []
    for epoch, step, values in points:
        new = {name: value for name, value in values.items() if (name, step) not in have}
        have |= {(name, step) for name in new}
        if new:
            missing.append(Point(epoch, step, new))
    return missing


def _first_difference(known: Known, saved: SavedRun, target: Target) -> int | None:
    """Return the first step whose results differ in the target, or are not in the run. None: there is none.

    Steps after the last line of a run that goes on do not count: a resumed run repeats them.
    """
    wanted = {(name, step): target.rounded(x) for _, step, values in saved.points for name, x in values.items()}
    last = max((point.step for point in saved.points), default=0)
    steps = [
        step
        for (name, step), value in known.items()
        if name.endswith(JUDGED)
        and abs(value) <= safe_reading.LARGEST  # the run has no number where this is none
        and (step <= last or saved.state != "running")
        and wanted.get((name, step)) != value
    ]
    return min(steps, default=None)
