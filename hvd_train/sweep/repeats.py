"""Repeats: trials that differ only in the fold of the data or in the seed, and are compared by their mean."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvd_train.errors import ConfigError
from hvd_train.sweep.folder import Sweep, state
from hvd_train.sweep.trials import Trial

FOLD, SEED = "data.fold", "seed"
OPTIONS = {FOLD: "--folds", SEED: "--seeds"}


def repeats(
    folds: int | None, seeds: int | None, seed: int, params: Sequence[str] = (), halving: int | None = None
) -> dict[str, list[Any]]:
    """Return {key: values} over which each combination is repeated; ``seed``: the first of the seeds.

    Raises ConfigError with halving, or if --param varies the same key.
    """
    spaces: dict[str, list[Any]] = {}
    if folds:
        spaces[FOLD] = [[part, folds] for part in range(folds)]
    if seeds:
        spaces[SEED] = [seed + k for k in range(seeds)]
    if spaces and halving:
        what = "--halving continues with the best trials, but repeats are compared by their mean at the end"
        raise ConfigError(what, fix=f"leave out {OPTIONS[next(iter(spaces))]}")
    for key in spaces:
        if any(param.partition("=")[0].strip() == key for param in params):
            raise ConfigError("the key is varied twice", where=f"--param {key}", fix=f"leave it out, or {OPTIONS[key]}")
    return spaces


@dataclass(frozen=True)
class Group:
    """The trials of one combination of values. ``means``: {metric: (mean, standard deviation or nan)}.

    ``ended``: the number of trials with a result; ``counts``: {metric: the number of trials in its mean}, which leaves
    out trials without a value.
    """

    trials: list[Trial]
    values: Mapping[str, Any]
    means: Mapping[str, tuple[float, float]]
    ended: int
    counts: Mapping[str, int]

    @property
    def description(self) -> str:
        return ", ".join(f"{key}={json.dumps(value)}" for key, value in self.values.items()) or "all trials"


def groups(sweep: Sweep) -> list[Group]:
    """Group the trials by combination, in order, and average each metric over the trials that have a result."""
    members: dict[str, dict[str, Trial]] = {}
    for trial in sweep.trials:
        group = members.setdefault(json.dumps(_values(trial, sweep.repeats)), {})
        # --random may draw a combination twice. Its seeds and folds are the same, so it counts once.
        same = json.dumps(dict(trial.values))
        if same not in group or state(sweep, group[same]).word != "done":
            group[same] = trial
    return [_group(sweep, list(trials.values())) for trials in members.values()]


def _values(trial: Trial, repeated: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in trial.values.items() if key not in repeated}


def _group(sweep: Sweep, trials: list[Trial]) -> Group:
    summaries = [one.summary for one in (state(sweep, trial) for trial in trials) if one.word == "done"]
    names = [key for key in dict.fromkeys(key for one in summaries for key in one) if key.startswith("val_")]
    means, counts = {}, {}
    for name in names:
        values = [one[name] for one in summaries if isinstance(one.get(name), int | float)]
        if name != "val_samples" and values:
            counts[name] = len(values)
            means[name] = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan
    return Group(trials, _values(trials[0], sweep.repeats), means, len(summaries), counts)


def best_group(sweep: Sweep) -> Group | None:
    """Return the combination with the best mean of ``checkpoint.monitor``, preferring those where no trial lacks it."""
    rule, config = sweep.trials[0].config.checkpoint, sweep.trials[0].config
    sign = 1 if config.mode_of(rule) == "min" else -1
    known = [one for one in groups(sweep) if math.isfinite(one.means.get(rule.monitor, (math.nan, 0.0))[0])]
    known = [one for one in known if one.counts[rule.monitor] == len(one.trials)] or known
    return min(known, key=lambda one: sign * one.means[rule.monitor][0], default=None)


def notes(sweep: Sweep) -> list[str]:
    """Return a line for each mean that includes fewer trials than the table shows."""
    return [
        f"{name} of {one.description} is not a number in {one.ended - count} of {one.ended} trials: its mean is of the "
        "others"
        for one in groups(sweep)
        for name, count in one.counts.items()
        if count < one.ended
    ]


def rows(sweep: Sweep) -> tuple[list[str], list[list[Any]]]:
    """Return (header, rows) for means.csv: values, number of trials, means and deviations of each combination."""
    combinations = groups(sweep)
    metrics = list(dict.fromkeys(name for one in combinations for name in one.means))
    header = [*combinations[0].values, "trials", *(word for name in metrics for word in (name, f"{name}_deviation"))]
    lines = []
    for one in combinations:
        values = cells(one.values)
        numbers = [number for name in metrics for number in one.means.get(name, (math.nan, math.nan))]
        lines.append([*values, one.ended, *(None if math.isnan(x) else x for x in numbers)])
    return header, lines


def shown(sweep: Sweep) -> tuple[list[str], list[list[str]]]:
    """Return (header, rows) as text for the terminal, with mean ± deviation."""
    combinations = groups(sweep)
    metrics = list(dict.fromkeys(name for one in combinations for name in one.means))
    header = [*combinations[0].values, "trials", *metrics]
    lines = []
    for one in combinations:
        means = [cell(*one.means[name]) if name in one.means else "" for name in metrics]
        lines.append([*map(str, cells(one.values)), str(one.ended), *means])
    return header, lines


def cells(values: Mapping[str, Any]) -> list[Any]:
    """Return a trial's values as table cells: numbers and strings unchanged, others as JSON."""
    return [x if isinstance(x, int | float | str) else json.dumps(x) for x in values.values()]


def cell(mean: float, deviation: float) -> str:
    return f"{mean:.4f}" + ("" if math.isnan(deviation) else f" ± {deviation:.4f}")
