"""The calibration of ``hvd-train plan``: short real work of a configuration, by ranks started for it."""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from hvd_train.compression.table import COMPRESSORS
from hvd_train.config import Config, resolved_yaml
from hvd_train.config.modes import ALLREDUCE
from hvd_train.errors import ConfigError, amount
from hvd_train.insight.prediction import Compressed, Model, Point, ring
from hvd_train.jobs.trial import trial
from hvd_train.launch import logged
from hvd_train.launch.launchers.installed import python

# Seconds of steps in one world: a part of all seconds, within limits.
PART, LEAST_SECONDS, MOST_SECONDS = 0.05, 0.7, 4.0
ALWAYS = 2  # worlds, however few seconds there are
BLOCKS = 6  # of consecutive calls, whose means show how a host's speed varies
MISTAKES = (2, 3)  # exit codes of a configuration, or of data, that cannot be used
LEAST_WORLD = 120.0  # seconds that a world gets, however few are left: ranks may take long to start

Placement = tuple[int, int]  # (ranks, threads of each) on one host
# (options of the ranks' command, words) -> (command that starts them, its environment).
Start = Callable[[list[str]], tuple[list[str], dict[str, str]]]


@dataclass
class Calibration:
    """The figures of each placement, a list of runs, as ``jobs/calibrate.py`` writes them.

    ``cores``: of this host, or its GPUs if those compute. ``problems``: {placement: (reason, exit code)} of those that
    could not be measured. ``seconds``: that it took. ``stopped``: the exit code if a signal has ended it, else 0.
    """

    cores: int
    figures: dict[Placement, list[dict[str, Any]]] = field(default_factory=dict)
    problems: dict[Placement, tuple[str, int]] = field(default_factory=dict)
    seconds: float = 0.0
    stopped: int = 0

    @property
    def samples(self) -> int:
        """Return the number of training samples."""
        return next(run["samples"] for runs in self.figures.values() for run in runs)

    def of_ranks(self, least: int = 1) -> list[dict[str, Any]]:
        """Return the runs of at least so many ranks, the fewest first."""
        return [run for (ranks, _), runs in sorted(self.figures.items()) for run in runs if ranks >= least]

    def model(self, compression: str = "none") -> Model:
        """Return the model of a step. ``compression``: of the configuration."""
        points = {key: [point_of(run, key) for run in runs] for key, runs in self.figures.items()}
        several = [run for run in self.of_ranks(2) if "sent" in run]
        gathers = gathering(compression)
        sent = several[0]["sent"] / _copies(several[0]["ranks"], gathers) if several else 0.0
        return Model(points, self.cores, sent, several[0]["messages"] if several else 0, gathers)

    def compressors(self) -> dict[str, Compressed]:
        """Return the exchanges with each compressor that was tried, on two ranks."""
        runs = [run["compressors"] for run in self.of_ranks(2) if run["ranks"] == 2 and run.get("compressors")]
        names = [name for name in COMPRESSORS if any(name in run for run in runs)]
        return {
            name: Compressed(
                min(run[name][0] for run in runs if name in run),
                next(run[name][1] for run in runs if name in run),
                gathering(name),
            )
            for name in names
        }


def gathering(compression: str) -> bool:
    """Return whether each rank sends its compressed gradient to each other one."""
    return COMPRESSORS[compression].made_by.startswith("sparse:") if compression in COMPRESSORS else False


def _copies(ranks: int, gathers: bool) -> float:
    return ranks - 1 if gathers else ring(ranks)


def point_of(run: Mapping[str, Any], placement: Placement) -> Point:
    """Return the point of one run."""
    ranks, threads = placement
    calls = np.array(run["calls"], dtype=float)  # (ranks, calls, [steps, seconds, waited])
    batch, weights = run["batch"] / ranks, calls[0, :, 0]
    own, step = _own(calls), float(np.average(calls[:, :, 1].mean(axis=0), weights=weights))
    mean, slope = float(np.average(own.mean(axis=0), weights=weights)), None
    if run.get("other") and run["other"][1][0]:
        other = np.array(run["other"][1], dtype=float)
        theirs = float(np.average(_own(other).mean(axis=0), weights=other[0, :, 0]))
        slope = (mean - theirs) / (batch - run["other"][0] / ranks)
    exchange, empty = (median(run[name]) if run.get(name) else 0.0 for name in ("exchange", "empty"))
    # Without another batch: as many samples, as much time.
    slope = mean / batch if slope is None else slope
    error = _error(calls[:, :, 1].mean(axis=0) * weights, weights)
    return Point(ranks, threads, batch, own, weights, step, slope, exchange, min(empty, exchange), error)


def _error(seconds: np.ndarray, steps: np.ndarray) -> float:
    """Return the relative standard error of the mean step, from the means of blocks of consecutive calls."""
    blocks = [block for block in np.array_split(np.arange(len(steps)), BLOCKS) if len(block)]
    means = np.array([seconds[block].sum() / steps[block].sum() for block in blocks])
    return float(np.std(means, ddof=1) / np.sqrt(len(means)) / means.mean()) if len(means) > 1 else 0.0


def _own(calls: np.ndarray) -> np.ndarray:
    return np.maximum(calls[:, :, 1] - calls[:, :, 2], 1e-9)


TRIED = 4  # ranks a core, up to which numbers of ranks that are asked for are tried; more are extrapolated


def host_cores() -> int:
    """Return the cores of this host that this process may use."""
    return len(os.sched_getaffinity(0))


def placements(cores: int, threads: int | str, ranks: Sequence[int] = ()) -> list[Placement]:
    """Return the placements to measure, the most telling ones first: ends, then the middle.

    ``threads``: of the configuration. ``ranks``: those to measure; empty: powers of two up to the cores.
    """

    def share(count: int) -> Placement:
        return count, max(cores // count, 1) if threads == "auto" else int(threads)

    counts = list(ranks) or sorted({2**k for k in range(cores.bit_length())} | {cores})
    if not ranks and cores == 1:
        counts.append(2)  # an exchange takes two
    ends = [counts[0], *[n for n in counts if n == 2], counts[-1]]
    rest = sorted(counts, key=lambda n: abs(n * n - counts[-1]))
    ordered = [share(n) for n in dict.fromkeys([*ends, *rest])]
    alone = [(1, 1)] if threads == "auto" and cores > 1 and not ranks else []
    return [*ordered[:2], *alone, *ordered[2:]]


def check(config: Config) -> None:
    """Raise ConfigError for a configuration that cannot be predicted."""
    cannot = "plan predicts synchronous training, in which all ranks exchange gradients in each step"
    if config.exchange.mode != ALLREDUCE:
        fix = "hvd-train modes measures the other ways"
        raise ConfigError(cannot, where=f"exchange.mode: {config.exchange.mode}", fix=fix)
    check_samples(config)
    if config.parallel.pipeline > 1 or config.parallel.devices_per_rank > 1:
        raise ConfigError(cannot, where="parallel", fix="leave out parallel.pipeline and parallel.devices_per_rank")


def check_samples(config: Config) -> None:
    """Raise ConfigError for batches by tokens: predictions and studies count the samples of a step."""
    if config.by_tokens:
        what = "plan, scale and -np auto count the samples of a step, of which each batch by tokens has others"
        raise ConfigError(what, where="data.lengths.max_tokens", fix="set global_batch_size in its place")


def on_ranks(launcher: str) -> Start:
    """Return a function that starts this program with the ranks' options."""

    def start(words: list[str]) -> tuple[list[str], dict[str, str]]:
        return [*python("hvd_train"), *words, "--launcher", launcher], dict(os.environ)

    return start


@contextmanager
def folder_of(config: Config, shared: bool) -> Iterator[Path]:
    """Yield a temporary folder; ``shared``: next to the run folder, so that other hosts see it too."""
    beside = Path(config.run_dir).absolute().parent
    if shared:
        beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hvd-train-plan-", dir=beside if shared else None) as name:
        yield Path(name)


def measure(
    config: Config,
    wanted: Sequence[Placement],
    seconds: float,
    start: Start,
    folder: Path,
    report: Callable[[str], None],
) -> Calibration:
    """Measure the placements in turns until ``seconds`` are over, at least the first two.

    Raises SystemExit if a signal has stopped the first one, and ConfigError if nothing could be measured.
    """
    result, began, longest = Calibration(host_cores()), time.monotonic(), 0.0
    steps = min(max(PART * seconds, LEAST_SECONDS), MOST_SECONDS)
    worlds, missing = 0, list[Placement]()
    for number in itertools.count():
        turn, placement = number // len(wanted), wanted[number % len(wanted)]
        left = seconds - (time.monotonic() - began)
        if turn and (left < longest or not result.figures):
            break
        most = max(result.cores, 2) if result.cores != host_cores() else TRIED * result.cores
        if placement in result.problems or (result.figures and placement[0] > most):
            continue  # of GPUs there may be fewer than cores
        if worlds >= ALWAYS and left < longest:
            missing.append(placement)
            continue
        world = time.monotonic()
        name = folder / f"{turn}-{placement[0]}-{placement[1]}"
        try:
            code = _measure_one(result, config, placement, steps, max(left, LEAST_WORLD), start, name)
        except SystemExit as stop:
            if not result.figures:
                raise
            result.stopped = int(stop.code or 1)
            report("stopped: the plan has what was measured until now")
            break
        longest, worlds = max(longest, time.monotonic() - world), worlds + 1
        report(_outcome(result, placement))
        if not result.figures and code in MISTAKES:
            break  # the others would fail alike
    result.seconds = time.monotonic() - began
    for placement in missing:
        report(f"{described(placement)}: no time was left; --seconds gives more")
    if not result.figures:
        reason, code = next(iter(result.problems.values()))
        error = ConfigError(f"nothing could be measured: {reason}", where=described(next(iter(result.problems))))
        error.exit_code = code
        raise error
    return result


def described(placement: Placement) -> str:
    return f"{amount(placement[0], 'rank')} of {amount(placement[1], 'thread')}"


def _outcome(result: Calibration, placement: Placement) -> str:
    name = described(placement)
    if placement in result.problems:
        return f"{name}: not measured: {result.problems[placement][0]}"
    point = point_of(result.figures[placement][-1], placement)
    return f"{name}: {1000 * point.step:,.1f} ms a step, {placement[0] * point.batch / point.step:,.0f} samples/s"


def _measure_one(
    result: Calibration,
    config: Config,
    placement: Placement,
    steps: float,
    most: float,
    start: Start,
    folder: Path,
) -> int:
    """Run one world, and add its figures, also those of a world that failed after its steps. Returns its exit code."""
    ranks, threads = placement
    folder.mkdir(parents=True)
    file, output, log = (folder / name for name in ("trial.yaml", "figures.json", "output.log"))
    file.write_text(resolved_yaml(trial(config, threads, folder / "run")))
    words = ["calibrate", "-np", str(ranks), "-c", str(file), "--seconds", f"{steps:g}", "-o", str(output)]
    code = logged.run(*start(words), log, most)
    if code in logged.STOPPED:
        sys.exit(code)
    figures = {}
    with suppress(OSError, ValueError):
        figures = json.loads(output.read_bytes())
    if figures.get("calls") and figures["calls"][0]:
        result.figures.setdefault(placement, []).append(figures)
        result.cores = figures.get("gpus") or result.cores
    elif placement not in result.figures:
        slow = f"{most:.0f} s were too few for some steps; give more --seconds", 2
        result.problems[placement] = slow if code in (logged.TOO_LONG, 0) else (logged.reason(log, code), code)
    return code


def rehearse(
    config: Config, ranks: int, own: Sequence[float], seconds: float, start: Start, folder: Path
) -> list[float]:
    """Run ranks that sleep the times ``own`` and exchange for real; return the seconds of their steps.

    Raises SystemExit if a signal has stopped them, and ConfigError if they failed.
    """
    folder.mkdir(parents=True)
    file, times, output, log = (folder / name for name in ("trial.yaml", "own.json", "figures.json", "output.log"))
    file.write_text(resolved_yaml(trial(config, 1, folder / "run")))
    times.write_text(json.dumps([round(one, 7) for one in own]))
    words = ["calibrate", "-np", str(ranks), "-c", str(file), "--seconds", f"{seconds:g}", "-o", str(output)]
    code = logged.run(*start([*words, "--rehearse", str(times)]), log)
    if code in logged.STOPPED:
        sys.exit(code)
    if code or not output.exists():
        error = ConfigError(f"the rehearsal failed: {logged.reason(log, code)}", where=f"--rehearse {ranks}")
        error.exit_code = code or 1
        raise error
    return json.loads(output.read_bytes())["steps"]
