"""The measurements of a study: a point for each number of ranks, from all runs on disk, and the laws through them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median

import numpy as np

from hvd_train.core.noise_scale import t_quantile
from hvd_train.errors import amount, printable
from hvd_train.insight.factors import Factors
from hvd_train.insight.plan import Aim, Trainings
from hvd_train.insight.scaling_laws import AMDAHL, UNIVERSAL, Fit, fit, too_few
from hvd_train.scaling.runs import Run, Training, read, read_training
from hvd_train.scaling.study import Study
from hvd_train.sweep.trials import Trial

EXACT = 0.001  # deviation of a law that goes through all points


@dataclass(frozen=True)
class Point:
    """What was measured on a number of ranks. ``problem``: why a run failed. ``batch``: the global batch."""

    ranks: int
    batch: int
    runs: Sequence[Run]
    problem: str = ""
    trainings: Mapping[int, Training] = field(default_factory=dict)  # by number

    @property
    def milliseconds(self) -> tuple[float, float]:
        """Return the median and the 95th percentile of all steps of all runs."""
        # Runs count alike, however many of their steps were timed.
        parts = [np.quantile(one.milliseconds, [0.5, 0.95]) for one in self.runs]
        middle, high = np.median(parts, axis=0)
        return float(middle), float(high)

    @property
    def rate(self) -> float:
        """Return the median samples/s of the runs."""
        return median(one.rate for one in self.runs)

    @property
    def uncertainty(self) -> float | None:
        """Return half the 90 % interval of a step's time, as a share of it; None for a single run."""
        means = [float(one.milliseconds.mean()) for one in self.runs]
        if len(means) < 2:
            return None
        spread = float(np.std(means, ddof=1)) / math.sqrt(len(means))
        return t_quantile(len(means) - 1) * spread / float(np.mean(means))

    @property
    def shares(self) -> dict[str, float]:
        """Return the share of each part of a step, over all ranks and runs."""
        sums: dict[str, float] = {}
        for run in self.runs:
            for name, seconds in run.parts.items():
                sums[name] = sums.get(name, 0.0) + math.fsum(seconds)
        total = math.fsum(sums.values())
        return {name: x / total for name, x in sums.items()} if total else {}

    @property
    def factors(self) -> Factors | None:
        """Return the factors of efficiency in the run whose steps' time is the middle one; None: not known."""
        runs = sorted(self.runs, key=lambda one: one.rate)
        return runs[len(runs) // 2].factors if runs else None

    @property
    def crowded(self) -> bool:
        """Return whether ranks share a core."""
        return any(one.crowded for one in self.runs)

    def to_target(self) -> tuple[float | None, float | None, int, int]:
        """Return the medians of (samples, seconds) to the target, and how many trainings reached it, of how many.

        A training that has ended without reaching it counts as later than all others. The medians are None if half of
        the trainings or more did so.
        """
        samples, seconds = self.way()
        reached = sum(map(math.isfinite, samples))
        if 2 * reached <= len(samples):
            return None, None, reached, len(samples)
        return median(samples), median(seconds), reached, len(samples)

    def way(self) -> tuple[list[float], list[float]]:
        """Return the samples and the seconds of each training to the target; inf: it ended without reaching it."""
        ended = [one for one in self.trainings.values() if one.ended or one.reached]
        samples, seconds = ([one.reached[k] if one.reached else math.inf for one in ended] for k in (0, 1))
        return samples, seconds


@dataclass(frozen=True)
class Measured:
    """All points of a study, those without a run as well."""

    study: Study
    points: Sequence[Point]

    @property
    def known(self) -> list[Point]:
        """Return the points that have a run."""
        return [one for one in self.points if one.runs]

    def speedup(self, one: Point) -> float:
        """Return how many times as fast as the fewest ranks it is, times their number.

        So the fewest ranks count as perfect, if that is not one rank.
        """
        first = self.known[0]
        return first.ranks * one.rate / first.rate

    def efficiency(self, one: Point) -> float:
        return self.speedup(one) / one.ranks

    def hours(self, one: Point) -> float:
        """Return the hours of the configured training's steps; without start, evaluation and saving."""
        config, run = self.study.config, one.runs[0]
        epochs = (config.max_epochs or math.inf) * run.steps_per_epoch
        # The same samples on all numbers of ranks.
        steps = (config.max_steps or math.inf) * self.known[0].batch / one.batch
        return min(epochs, steps) * median(float(x.milliseconds.mean()) for x in one.runs) / 3.6e6

    @cached_property
    def fits(self) -> tuple[list[Fit], list[str]]:
        """The laws fitted to the points whose ranks have cores of their own, and notes about them."""
        points = {one.ranks: [run.rate for run in one.runs] for one in self.known if not one.crowded}
        found = [fit(points, name) for name in (AMDAHL, UNIVERSAL)]
        # A law that misses the points has been contradicted, however few they are.
        hit = [name for name, one in zip((AMDAHL, UNIVERSAL), found, strict=True) if not one or one.error <= EXACT]
        notes = [note for name in hit if (note := too_few(name, len(points)))]
        return [one for one in found if one], notes

    def notes(self) -> list[str]:
        """Return sentences about points that are incomplete, or mean something else than they seem to."""
        # The reason of a failure comes from a log.
        notes = [
            f"{amount(one.ranks, 'rank')}: {printable(one.problem, one_line=True)}"
            for one in self.points
            if one.problem
        ]
        if self.known and (fewest := self.known[0].ranks) > 1:
            notes.append(f"speed-up: {fewest} ranks count as {fewest} times as fast as one, which was not measured")
        missing = [one.ranks for one in self.points if not one.runs and not one.problem]
        if missing:
            notes.append(f"not measured yet: {' and '.join(map(str, missing))} ranks; --resume goes on")
        crowded = [one.ranks for one in self.known if one.crowded]
        if crowded:
            notes.append(
                f"*: on {' and '.join(map(str, crowded))} ranks some share a core; the laws leave these points out"
            )
        same = [one.ranks for one in self.known if not one.crowded and one.runs[0].cores == self.known[0].runs[0].cores]
        if len(same) > 1:
            numbers = " and ".join(map(str, same))
            notes.append(
                f"{numbers} ranks use the same number of cores, as fewer ranks have more threads; "
                "--set threads=1 shows what more cores bring"
            )
        if target := self.study.target:
            for one in self.points:
                ended = [x for x in one.trainings.values() if x.ended]
                never = [x for x in ended if not x.reached]
                if never:
                    best = (max if target.better == "max" else min)(x for run in never for *_, x in run.curve)
                    notes.append(
                        f"{amount(one.ranks, 'rank')}: {len(never)} of {amount(len(ended), 'training')} did not reach "
                        f"{target} (best {best:.4g})"
                    )
        return notes


def measured(study: Study) -> Measured:
    """Read all runs of a study."""
    points = []
    for ranks in study.ranks:
        runs: list[Run] = []
        problems: list[str] = []
        trainings: dict[int, Training] = {}
        for number in study.numbers(ranks, "run"):
            trial = study.short_run(ranks, number, study.steps or 1)
            run = _read(study, trial, problems)
            runs += [run] if run else []
        if study.target:
            for number in study.numbers(ranks, "seed"):
                trial = study.training(ranks, number)
                if (one := study.state(trial)).word == "failed":
                    problems.append(f"seed {trial.config.seed}: {one.error}")
                training = read_training(Path(trial.config.run_dir), study.target, study.batch(ranks))
                trainings |= {number: training} if training else {}
        points.append(Point(ranks, study.batch(ranks), runs, problems[0] if problems else "", trainings))
    return Measured(study, points)


def aim(measured: Measured) -> Aim | None:
    """Return the target of a study, with its trainings; None: it has none."""
    if measured.study.target is None:
        return None
    return Aim(str(measured.study.target), {one.ranks: Trainings(one.batch, *one.way()) for one in measured.points})


def _read(study: Study, trial: Trial, problems: list[str]) -> Run | None:
    state = study.state(trial)
    if state.word == "failed":
        problems.append(f"failed: {state.error}")
    if state.word != "done":
        return None
    run = read(Path(trial.config.run_dir))
    if run is None:
        what = f"the run folder {trial.config.run_dir} is damaged"
        problems.append(f"{what}; remove it, and --resume measures it again")
    return run
