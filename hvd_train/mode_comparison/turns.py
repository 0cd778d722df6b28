"""Train in each way for a short while, in turns, with new ranks each time."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from hvd_train.config import Config, load_config, resolved_yaml
from hvd_train.errors import ConfigError
from hvd_train.launch import logged
from hvd_train.launch.launchers.installed import python
from hvd_train.mode_comparison.ways import Way
from hvd_train.run_folder import metrics_file

LINES = 24  # log lines of a training, each a point of its curve

# The words of a command for each rank -> (command that starts the ranks, its environment).
Start = Callable[[list[str]], tuple[list[str], dict[str, str]]]


@dataclass(frozen=True)
class Limits:
    """The length of a training: at most ``steps``, and at most ``seconds`` (0: no limit); the number of turns."""

    steps: int
    seconds: float = 0.0
    turns: int = 2


@dataclass
class Result:
    """The measurements of a way; ``problem``: why it cannot run; ``code``: the exit code of its command.

    ``figures``: of each turn, as ``jobs/measure.py`` writes them; ``curve``: (samples of all ranks, mean loss since the
    previous point) of the longest turn.
    """

    way: Way
    figures: list[dict[str, Any]] = field(default_factory=list)
    curve: list[tuple[int, float]] = field(default_factory=list)
    problem: str = ""
    code: int = 0

    def middle(self, name: str) -> float:
        """Return the median of a figure over the turns."""
        return median(one[name] for one in self.figures)

    @property
    def samples(self) -> int:
        return self.curve[-1][0]

    @property
    def seconds_per_sample(self) -> float:
        return self.middle("seconds_per_sample")


def on_ranks(words: Sequence[str]) -> Start:
    """Return a function that starts ranks with these options of ``fit``, such as ``-np 2``."""

    def start(measured: list[str]) -> tuple[list[str], dict[str, str]]:
        return [*python("hvd_train"), *measured, *words], dict(os.environ)

    return start


@contextmanager
def folder_of(config: Config, shared: bool) -> Iterator[Path]:
    """Yield a temporary folder; ``shared``: next to the run folder, so that other hosts see it too."""
    beside = Path(config.run_dir).absolute().parent
    created = [path for path in (beside, *beside.parents) if not path.exists()] if shared else []
    if shared:
        beside.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="hvd-train-modes-", dir=beside if shared else None) as name:
            yield Path(name)
    finally:
        with suppress(OSError):  # another run has begun there
            for path in created:
                path.rmdir()


def trial(config: Config, way: Way, ranks: int, limits: Limits, run_dir: Path) -> Config:
    """Return the configuration of a short training that writes only its log. Raises ConfigError."""
    data = way.keys(config, ranks) | {"hooks": [], "log_every_n_steps": max(limits.steps // LINES, 1)}
    return short_training(data, limits.steps, run_dir)


def short_training(data: dict[str, Any], steps: int, run_dir: Path) -> Config:
    """Return the configuration ``data``, changed to a few steps that write only their log. Raises ConfigError."""
    data = data | {"max_steps": steps, "max_epochs": None, "early_stopping": None, "swa": None}
    data |= {"tensorboard": False, "loggers": []}
    data |= {"check_val_every_n_epoch": steps, "limit_val_batches": 1, "run_dir": str(run_dir)}
    no_saves = {"every_n_epochs": 0, "every_n_steps": 0, "snapshot_every_n_steps": 0}
    data["checkpoint"] = data["checkpoint"] | no_saves | {"save_top_k": 0, "save_last": False}
    data["optim"] = data["optim"] | {"plateau": None}
    return load_config(base=data)


def measure(
    config: Config,
    ways: Sequence[Way],
    ranks: int,
    limits: Limits,
    start: Start,
    folder: Path,
    report: Callable[[str], None],
) -> list[Result]:
    """Train in each way, in turns, with all files in ``folder``; ``report`` gets a line for each training.

    Raises SystemExit if a signal has stopped a training, and ConfigError if no way can run.
    """
    results = [Result(way) for way in ways]
    for turn in range(limits.turns):
        for one in results:
            if one.problem:
                continue
            run_dir = folder / f"{turn}-{one.way.name}"
            run_dir.mkdir(parents=True)
            try:
                _train(one, trial(config, one.way, ranks, limits, run_dir / "run"), limits, start, run_dir)
            except ConfigError as error:
                one.problem, one.code = str(error), error.exit_code
            outcome = one.problem or f"{one.figures[-1]['ms']:,.1f} ms a step"
            report(f"turn {turn + 1} of {limits.turns}, {one.way.name}: {outcome}")
    if all(one.problem for one in results):
        raised = ConfigError(f"no way of training runs, the first for this: {results[0].problem}")
        raised.exit_code = results[0].code
        raise raised
    return results


def _train(one: Result, config: Config, limits: Limits, start: Start, folder: Path) -> None:
    """Train once, and add the measurements to the result."""
    file, output, log = (folder / name for name in ("trial.yaml", "figures.json", "output.log"))
    file.write_text(resolved_yaml(config))
    words = ["measure", "-c", str(file), "--seconds", f"{limits.seconds:g}", "-o", str(output)]
    code = logged.run(*start(words), log)
    if code in logged.STOPPED:
        sys.exit(code)
    if code or not output.exists():
        one.problem, one.code = logged.reason(log, code), code or 1
        return
    figures, curve, samples = json.loads(output.read_bytes()), [], 0
    for row in metrics_file.read(Path(config.run_dir))[0]:
        if row["event"] == "train":
            samples += row["samples"]
            if row["loss"] is not None:  # null: the loss was not finite, and the step was skipped
                curve.append((samples, row["loss"]))
    if figures["ms"] is None or not curve:
        one.problem, one.code = "it ended before anything was measured; give more --steps or --seconds", 2
        return
    one.figures.append(figures)
    if not one.curve or samples > one.samples:
        one.curve = curve
