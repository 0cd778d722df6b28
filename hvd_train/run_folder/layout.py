"""The files of a run folder. It holds one run: whether another may replace it, and how the old one is moved aside."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvd_train import files
from hvd_train.checkpoint import store
from hvd_train.errors import CheckpointError, ConfigError
from hvd_train.run_folder import safe_reading

SUMMARY = "summary.json"
REQUEUED = "requeued.json"  # the step from which the job was requeued last
VOCABULARY = "vocabulary.json"  # of a text whose words are numbered
RUN = (
    "checkpoints", "tensorboard", "loggers", "metrics.jsonl", "metrics.csv", "steps.jsonl", SUMMARY, "config.yaml",
    "environment.json", VOCABULARY, REQUEUED,
)  # fmt: skip


def check_free(run_dir: Path, resume: str | None, overwrite: bool) -> None:
    """Raise ConfigError for a folder with another run, unless the user asks to replace it."""
    used = holds_run(run_dir)
    missing = resume is not None and not Path(resume).exists()  # reported when it is read
    if used and not overwrite and not missing and not goes_on(run_dir, resume):
        other = f", and {resume} is not of it" if resume else ""
        fix = "give --resume auto to go on, --overwrite to start anew, or another --run-dir"
        raise ConfigError(f"the run folder holds a run already{other}", where=str(run_dir), fix=fix)


def holds_run(run_dir: Path) -> bool:
    """Return whether a training has written something here that is worth keeping."""
    metrics = run_dir / "metrics.jsonl"
    return (metrics.exists() and metrics.stat().st_size > 0) or bool(store.find(run_dir / "checkpoints"))


def goes_on(run_dir: Path, resume: str | None) -> bool:
    """Return whether ``resume`` names this folder's run or one of its checkpoints."""
    if resume in (None, "auto", "last", "best"):
        return resume is not None
    named = Path(str(resume)).resolve()
    return named == run_dir.resolve() or named.is_relative_to((run_dir / "checkpoints").resolve())  # may be a link


def summary_steps(run_dir: Path) -> int:
    """Return the number of steps in a run's summary; 0 without a readable summary."""
    with suppress(OSError, CheckpointError):
        steps = safe_reading.json_object(run_dir / SUMMARY).get("steps")
        return steps if isinstance(steps, int) else 0
    return 0


# ---- moving an old run aside


def leave(run_dir: Path, names: Sequence[str]) -> Path:
    """Move these files of the run into ``left-XXXX``."""
    left = run_dir / f"left-{secrets.token_hex(4)}"
    left.mkdir()
    _move([run_dir / name for name in names], left)
    return left


def retire(run_dir: Path) -> Path:
    """Move the run's files and folders into ``replaced-XXXX``; ``bring_back`` undoes it, ``drop`` makes it final."""
    replaced = run_dir / f"replaced-{secrets.token_hex(4)}"
    replaced.mkdir()
    _move([run_dir / name for name in RUN if (run_dir / name).exists()], replaced)
    return replaced


def drop(replaced: Path) -> None:
    """Remove what ``retire`` returned."""
    # Renamed first, so that a kill in between leaves nothing that ``bring_back`` would restore.
    gone = replaced.with_name(replaced.name.replace("replaced-", "removed-"))
    os.rename(replaced, gone)
    shutil.rmtree(gone, ignore_errors=True)


def bring_back(run_dir: Path) -> None:
    """Restore files that a new run moved aside and did not replace, and remove its own partial files.

    It also works after a kill.
    """
    for gone in run_dir.glob("removed-*"):
        shutil.rmtree(gone, ignore_errors=True)
    for replaced in run_dir.glob("replaced-*"):
        for path in replaced.iterdir():
            begun = run_dir / path.name
            shutil.rmtree(begun) if begun.is_dir() else begun.unlink(missing_ok=True)
        _move(list(replaced.iterdir()), run_dir)
        replaced.rmdir()


def _move(paths: Sequence[Path], to: Path) -> None:
    for path in paths:
        os.rename(path, to / path.name)


def keep_failure(run_dir: Path, name: str, text: str) -> str:
    """Write a traceback or a stack into ``failures``. Returns its path, or None if it cannot be written in time."""
    path = run_dir / "failures" / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}.txt"
    written = []

    def write() -> None:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
            written.append(path)

    return str(path) if files.within(write, files.ANSWER_SECONDS) and written else ""


def put(path: Path, values: dict[str, Any] | str) -> None:
    text = values if isinstance(values, str) else json.dumps(values, indent=2) + "\n"
    files.put(path, text.encode())
