"""What a run of a study measured, read from its run folder. The warm-up does not count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvd_train.config.modes import ALLREDUCE, EVERY_STEP
from hvd_train.core.shares import IN_STEPS
from hvd_train.errors import CheckpointError, TrainError
from hvd_train.insight import recorded_steps
from hvd_train.insight.factors import Factors, factors
from hvd_train.run_folder import layout, metrics_file, safe_reading, step_times
from hvd_train.scaling.study import Target

WARM = 0.25  # share of the steps at the beginning, when graphs are traced and buffers allocated
MOST_STEPS = 1 << 20  # of a run that are kept; longer runs keep this many in proportion


@dataclass(frozen=True)
class Run:
    """A run's steps after the warm-up.

    ``milliseconds``: of each step, as the mean over ranks; steps that ran in one call share its time evenly.
    ``samples``: of all ranks in a step, on average. ``parts``: {part of a step: seconds of each rank}. ``factors``: of
    efficiency, None if they are not known. ``steps_per_epoch``: of the whole training. ``hosts``: number of hosts.
    ``cores``: that the ranks use. ``crowded``: more ranks on a host than it has cores.
    """

    milliseconds: np.ndarray
    samples: float
    parts: Mapping[str, Sequence[float]]
    factors: Factors | None
    steps_per_epoch: int
    hosts: int
    cores: int
    crowded: bool

    @property
    def rate(self) -> float:
        """Return samples/s of all ranks."""
        return 1000 * self.samples / float(self.milliseconds.mean())


def read(run_dir: Path) -> Run | None:
    """Read a run that has ended; None if its folder does not hold what a run writes."""
    with suppress(TrainError, OSError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
        summary = safe_reading.json_object(run_dir / layout.SUMMARY)
        environment = safe_reading.json_object(run_dir / "environment.json")
        warm = int(WARM * summary["steps"])
        whole, timed = recorded_steps.read(run_dir), recorded_steps.read(run_dir, warm)
        counts = np.maximum(timed.weights * timed.steps, 1)
        counts = np.ceil(counts * min(MOST_STEPS / counts.sum(), 1)).astype(int)
        exchange = safe_reading.yaml_object(run_dir / "config.yaml").get("exchange") or {}
        ranks, local = int(environment["ranks"]), int(environment["ranks_on_this_host"])
        threads, cores = int(environment["threads"]), int(environment["cores"])
        hosts = len(set(timed.hosts)) or -(-ranks // local)
        most = max(Counter(timed.hosts).values(), default=local)  # ranks of a host
        bound = {(host, core) for host, own in zip(timed.hosts, timed.cores, strict=True) for core in own}
        return Run(
            np.repeat(1000 * timed.step_seconds, counts),
            summary["train_samples"] / summary["steps"],
            _parts(whole.windows, warm),
            factors(timed) if ranks == 1 or exchange.get("mode", ALLREDUCE) in EVERY_STEP else None,
            int(summary["steps_per_epoch"]),
            hosts,
            min(ranks * threads, len(bound) or hosts * cores),
            most > cores,
        )
    return None


def _parts(rows: Sequence[Mapping[str, Any]], warm: float) -> dict[str, list[float]]:
    """Return the seconds of each rank in each part of a step, after the first ``warm`` steps."""
    before = next((row for row in reversed(rows[:-1]) if row["step"] <= warm), None)
    parts = {}
    for name in IN_STEPS:
        end = np.array(rows[-1]["seconds"][name], dtype=float)
        begin = np.array(before["seconds"][name], dtype=float) if before else np.zeros_like(end)
        parts[name] = np.maximum(end - begin, 0.0).tolist()
    return parts


Curve = Sequence[tuple[float, float, float]]


@dataclass(frozen=True)
class Training:
    """A training to a target.

    ``curve``: (samples, seconds, value) of each evaluation. ``losses``: the same with the validation loss.
    ``reached``: samples and seconds of the first evaluation that reached the target. Seconds are those of steps that
    count, without start, evaluation and saving.
    """

    curve: Curve
    losses: Curve
    reached: tuple[float, float] | None
    ended: bool


def read_training(run_dir: Path, target: Target, batch: int) -> Training | None:
    """Read a training, also one that has not ended; None if it was not evaluated yet. ``batch``: the global batch."""
    with suppress(CheckpointError, OSError, KeyError, TypeError, ValueError):
        rows, _ = metrics_file.read(run_dir)
        times = [row for row in step_times.read(run_dir) if safe_reading.number(row.get("counted"))]
        seconds, seen = _increasing([(row["step"], row["counted"]) for row in times]), _samples(rows)
        curves: list[list[tuple[float, float, float]]] = [[], []]
        for row in rows if times else ():
            samples = float(np.interp(row["step"], *seen)) if seen else float(row["step"] * batch)
            for curve, name in zip(curves, (target.name.removeprefix("val_"), "loss"), strict=True):
                if row["event"] == "val" and safe_reading.number(value := row.get(name)):
                    curve.append((samples, float(np.interp(row["step"], *seconds)), float(value)))
        values, losses = curves
        reached = next(((samples, taken) for samples, taken, x in values if target.reached(x)), None)
        if values:
            return Training(values, losses, reached, (run_dir / layout.SUMMARY).exists())
    return None


def _samples(rows: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]] | None:
    """Return (steps, samples up to each), from the training's log lines."""
    steps, samples = [0.0], [0.0]
    for row in rows:
        if row["event"] == "train" and row["step"] > steps[-1]:
            steps.append(row["step"])
            samples.append(samples[-1] + row["samples"])
    return (steps, samples) if len(steps) > 1 else None


def _increasing(pairs: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Return (steps, seconds) in the order of steps; of a step that was repeated, the last seconds count."""
    last = dict(sorted(pairs, key=lambda pair: pair[0]))
    return [0.0, *last], [0.0, *last.values()]
