"""A scaling study: its folder, the configurations of its runs, and what is on disk of them.

The folder holds ``study.json`` (what is measured), ``study.yaml`` (the configuration), and for each number of ranks a
folder with a run folder for each measured run (``run-0``) and each training to the target (``seed-0``).
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvd_train.config import Config, digest, load_config, resolved_yaml
from hvd_train.config.names import did_you_mean
from hvd_train.errors import CheckpointError, ConfigError, amount, listing
from hvd_train.files import content, put
from hvd_train.insight.calibration import check_samples
from hvd_train.insight.plan import MOST_COUNT, STRONG, WEAK
from hvd_train.mode_comparison.turns import short_training
from hvd_train.run_folder import layout, lock, safe_reading
from hvd_train.sweep import array
from hvd_train.sweep.folder import CONFIG, FAILED, State
from hvd_train.sweep.folder import state as trial_state
from hvd_train.sweep.trials import Trial

STUDY, BASE = "study.json", "study.yaml"


@dataclass(frozen=True)
class Target:
    """The value of a metric that trainings should reach, such as val_accuracy 0.97. ``better``: min or max."""

    name: str
    value: float
    better: str

    def reached(self, value: object) -> bool:
        return safe_reading.number(value) and (value >= self.value if self.better == "max" else value <= self.value)

    def __str__(self) -> str:
        return f"{self.name}={self.value:g}"


@dataclass(frozen=True)
class Study:
    """What is measured: short runs of ``config`` on each number of ``ranks``, and trainings to a target.

    ``kind``: strong (the global batch stays) or weak (a rank's batch stays). ``steps``: of each short run; None: not
    decided yet. ``seeds``: number of trainings to the target for each number of ranks.
    """

    folder: Path
    config: Config
    ranks: Sequence[int]
    kind: str = STRONG
    steps: int | None = None
    target: Target | None = None
    seeds: int = 1

    def batch(self, ranks: int) -> int:
        """Return the global batch on so many ranks."""
        if self.kind == STRONG:
            return self.config.global_batch(1)
        return self._rank_batch() * self.config.replicas(ranks) * self.config.accumulate_grad_batches

    def _rank_batch(self) -> int:
        """Return the samples of a rank and micro-batch, the same on all numbers of ranks."""
        parts = self.config.replicas(self.ranks[0]) * self.config.accumulate_grad_batches
        size = self.config.batch_size
        return size if isinstance(size, int) else (self.config.global_batch_size or 0) // parts

    def check(self) -> None:
        """Raise ConfigError if a number of ranks does not suit the configuration."""
        check_samples(self.config)
        if self.config.batch_size is not None and not isinstance(self.config.batch_size, int):
            what = f"batch_size is {self.config.batch_size}, and a study compares sizes that are known"
            raise ConfigError(what, fix="--set batch_size=32, for example")
        stages, accumulate = self.config.parallel.pipeline, self.config.accumulate_grad_batches
        wrong = [n for n in self.ranks if n % stages]
        if wrong:
            what = f"{amount(wrong[0], 'rank')} cannot hold models of {stages} pipeline stages"
            raise ConfigError(what, where="--ranks", fix=f"give multiples of {stages}")
        parts = [self.config.replicas(n) * accumulate for n in self.ranks]
        if self.kind == WEAK:
            size, first = self.config.global_batch_size, parts[0]
            if size and size % first:
                what = f"global_batch_size {size} cannot be divided over {self.ranks[0]} ranks"
                raise ConfigError(what, where="--weak", fix="set batch_size, the samples of a rank, instead")
            return
        size, unit = self.batch(1), math.lcm(*parts)
        if size % unit:
            bad = [n for n, part in zip(self.ranks, parts, strict=True) if size % part]
            sizes = sorted({max(size // unit, 1) * unit, (size // unit + 1) * unit})
            key = "global_batch_size" if self.config.global_batch_size else "batch_size"
            each = 1 if key == "global_batch_size" else accumulate
            values = " or ".join(f"{key}={x // each}" for x in sizes)
            what = f"a global batch of {size} samples cannot be divided over {listing(bad)} ranks"
            fix = f"--set {values}, or another multiple of {unit // each}; or --weak, where each rank keeps its batch"
            raise ConfigError(what, where="--strong", fix=fix)

    # ---- runs

    def short_run(self, ranks: int, number: int, steps: int | None = None) -> Trial:
        """Return the ``number``-th short run. Raises ConfigError."""
        run_dir = self._folder(ranks) / f"run-{number}"
        return self._trial(short_training(self._data(ranks), steps or self.steps or 0, run_dir), ranks, number)

    def pilot(self, steps: int) -> Trial:
        """Return a first run of ``steps`` steps. Its speed decides how many steps the other runs take."""
        run_dir = self._folder(self.ranks[0]) / "pilot"
        return self._trial(short_training(self._data(self.ranks[0]), steps, run_dir), self.ranks[0], 0)

    def training(self, ranks: int, number: int) -> Trial:
        """Return the ``number``-th whole training, with a seed of its own. Raises ConfigError."""
        data = self._data(ranks) | {"tensorboard": False, "loggers": [], "early_stopping": None}
        data |= {"seed": self.config.seed + number, "run_dir": str(self._folder(ranks) / f"seed-{number}")}
        return self._trial(load_config(base=data), ranks, number)

    def _folder(self, ranks: int) -> Path:
        return self.folder / f"ranks-{ranks:04d}"

    def _trial(self, config: Config, ranks: int, number: int) -> Trial:
        return Trial(number, {"ranks": ranks}, config)

    def _data(self, ranks: int) -> dict[str, Any]:
        sizes = {"batch_size": None, "global_batch_size": self.batch(ranks)}
        return self.config.model_dump(mode="json") | sizes

    def numbers(self, ranks: int, kind: str) -> list[int]:
        """Return the numbers of the runs on disk; ``kind``: run or seed."""
        found = [path.name.partition("-")[2] for path in self._folder(ranks).glob(f"{kind}-*")]
        return sorted(int(number) for number in found if re.fullmatch("0|[1-9][0-9]{0,8}", number))

    def state(self, trial: Trial) -> State:
        """Read the state of a run from its folder."""
        return trial_state(array.of(self.folder, [trial]), trial)

    # ---- on disk

    def save(self) -> None:
        """Write what is measured. Raises CheckpointError."""
        values: dict[str, Any] = {"kind": self.kind, "ranks": list(self.ranks)}
        values |= {"steps": self.steps, "seeds": self.seeds}
        values |= {"target": [self.target.name, self.target.value, self.target.better] if self.target else None}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            put(self.folder / BASE, resolved_yaml(self.config).encode())
            put(self.folder / STUDY, json.dumps(values, indent=1).encode() + b"\n")
        except OSError as error:
            raise CheckpointError(f"the study cannot be written: {error.strerror}", where=str(self.folder)) from error

    def begin(self, resume: bool) -> Study:
        """Begin the study in its folder, or go on with the one there; return what is to be measured.

        Ranks, seeds and a target may be added; runs that have failed will be tried again. Raises ConfigError.
        """
        path = self.folder / STUDY
        if not resume:
            if path.exists():
                fix = "--resume measures what is missing; or give another --run-dir"
                raise ConfigError("the folder holds a study already", where=str(self.folder), fix=fix)
            if layout.holds_run(self.folder):
                fix = f"give the study a folder of its own, for example --run-dir {self.folder}-scale"
                raise ConfigError("the folder holds a run", where=str(self.folder), fix=fix)
            self.save()
            return self
        if not path.exists():
            raise ConfigError("there is no study to continue", where=str(path), fix="leave out --resume")
        before = load(self.folder)
        fix = "give the same configuration and options, or another --run-dir"
        same = before.kind == self.kind and _digest(before.config) == _digest(self.config)
        steps, target = self.steps or before.steps, self.target or before.target
        if not same or before.steps not in (None, steps) or before.target not in (None, target):
            raise ConfigError("the folder holds another study", where=str(path), fix=fix)
        ranks = tuple(sorted({*before.ranks, *self.ranks}))
        whole = replace(self, ranks=ranks, steps=steps, target=target, seeds=max(before.seeds, self.seeds))
        whole.check()
        # A weak study takes the batch of a rank from the fewest ranks, if the configuration has none.
        if any(whole.batch(n) != before.batch(n) for n in before.ranks):
            what = f"a study that began with {amount(before.ranks[0], 'rank')} cannot get fewer"
            raise ConfigError(
                what, where="--ranks", fix="set batch_size in place of global_batch_size, in another folder"
            )
        for failed in self.folder.glob(f"ranks-*/*/{FAILED}"):
            failed.unlink(missing_ok=True)
        whole.save()
        return whole


def load(folder: Path) -> Study:
    """Read the study in a folder, which may have been moved. Raises ConfigError and CheckpointError."""
    path = folder / STUDY
    try:
        values = safe_reading.parsed(content(path))
        target, ranks = values["target"], values["ranks"]
        counts = [*ranks, values["seeds"], *([] if values["steps"] is None else [values["steps"]])]
        if not ranks or not all(type(n) is int and n > 0 for n in counts) or max(ranks) > MOST_COUNT:
            raise ValueError("it names no ranks, or numbers that are none")
        if values["kind"] not in (STRONG, WEAK) or target and not _is_target(*target):
            raise ValueError("it names no kind of study, or another target")
        config, target = load_config(folder / BASE), Target(*target) if target else None
        return Study(folder, config, tuple(sorted({*ranks})), values["kind"], values["steps"], target, values["seeds"])
    except FileNotFoundError as error:
        raise ConfigError("the folder holds no study", where=str(folder), fix="give the --run-dir of one") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"the study cannot be used: {reason}", where=str(path)) from error


def _is_target(name: object, value: object, better: object) -> bool:
    return isinstance(name, str) and safe_reading.number(value) and better in ("min", "max")


def _digest(config: Config) -> str:
    """Return a hash of the configuration, whatever the folder is called."""
    return digest(config.resolved().model_copy(update={"run_dir": "study"}))


def prepare(trial: Trial) -> None:
    """Write a run's configuration into its folder, for ``fit -c``. Raises CheckpointError."""
    run_dir = Path(trial.config.run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        put(run_dir / CONFIG, resolved_yaml(trial.config).encode())
    except OSError as error:
        raise CheckpointError(f"the run folder cannot be written: {error.strerror}", where=str(run_dir)) from error


def discard(trial: Trial) -> None:
    """Remove a run that has not ended. Raises CheckpointError if it goes on."""
    run_dir = Path(trial.config.run_dir)
    if lock.state(run_dir) == "held":
        fix = "wait for its end, for example of a job that --slurm has submitted"
        raise CheckpointError("this run is at work", where=str(run_dir), fix=fix)
    if not (run_dir / layout.SUMMARY).exists():
        shutil.rmtree(run_dir, ignore_errors=True)


def parse_target(text: str, config: Config) -> Target:
    """Parse ``val_accuracy=0.97``. Raises ConfigError."""
    name, _, value = (part.strip() for part in text.partition("="))
    known: Mapping[str, Any] = {f"val_{metric}": config.task.better.get(metric) for metric in config.task.names}
    number = None
    with suppress(ValueError):
        number = float(value)
    if number is None or not math.isfinite(number):
        raise ConfigError("a target has the form NAME=NUMBER", where=f"--target {text}", fix="as in val_accuracy=0.97")
    if name not in known:
        raise ConfigError(did_you_mean(name, list(known)), where=f"--target {text}")
    rules = [rule for rule in (config.checkpoint, config.early_stopping) if rule and rule.monitor == name]
    better = known[name] or next((rule.mode for rule in rules if rule.mode != "auto"), None)
    if better is None:
        what, fix = f"whether a larger {name} is better is not known", "set checkpoint.monitor and checkpoint.mode"
        raise ConfigError(what, where=f"--target {text}", fix=fix)
    return Target(name, number, better)
