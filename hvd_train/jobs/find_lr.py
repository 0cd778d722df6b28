"""Learning rate range test (Smith 2017): increase the rate each step until the loss grows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvd_train.config import Config, OptimConfig
from hvd_train.core import train_state
from hvd_train.core.control_sync import StopSource
from hvd_train.core.learning_rate import scale
from hvd_train.core.reductions import ordered_sum
from hvd_train.core.step import StepRunner
from hvd_train.core.training import Training
from hvd_train.data.loader import Step
from hvd_train.errors import ConfigError, amount
from hvd_train.jobs.connect import connect
from hvd_train.jobs.job import Job, opened_job
from hvd_train.report.plots import range_test
from hvd_train.run_folder.log import NullLog
from hvd_train.run_folder.terminal import say

MEMORY = 0.9  # of the running mean of losses, because losses of single steps are too noisy
TOO_HIGH = 4.0  # factor on the lowest loss above which training has diverged, so that the test ends
SHARE = 0.2  # share of the steps over which a slope is fitted
LEAST = 5  # minimum steps for a slope
NOISE = 5.0  # significance of a slope in standard deviations: exceeded by 1 of 2,000 tests of 40 steps without learning
ROUNDING = 1e-6  # share of the first loss; smaller decreases do not count


@dataclass(frozen=True)
class Rates:
    """The rates to try: ``steps`` values in geometric progression."""

    first: float
    last: float
    steps: int

    def at(self, step: int) -> float:
        return self.first * (self.last / self.first) ** (step / max(1, self.steps - 1))


class RangeTest(Training):
    """A training whose learning rate increases every step."""

    rates: Rates

    def learning_rate(self, place: int, step: int) -> float:
        return self.rates.at(step)


def suggestion(rates: list[float], losses: list[float]) -> float | None:
    """Return the rate at which the loss falls fastest against log(rate); None if there is only noise.

    ``losses``: of each step. The slope at a rate is a least-squares fit to the losses around it. Losses after the
    lowest window do not count, because after divergence a very high loss may fall fast. The noise is estimated from
    differences of successive losses.
    """
    width = max(LEAST, int(SHARE * len(losses)) | 1)
    if width > len(losses):
        return None
    means = np.convolve(losses, np.full(width, 1 / width), "valid")
    fall = np.array(losses[: int(np.argmin(means)) + width])
    places = np.arange(width) - (width - 1) / 2
    slopes = np.convolve(fall, places[::-1], "valid") / (places @ places)
    # A difference has sqrt(2) times the deviation of one loss; the median absolute normal value is 0.6745 deviations.
    noise = float(np.median(np.abs(np.diff(losses)))) / 0.6745 / math.sqrt(2)
    noise = max(noise, ROUNDING * abs(losses[0]))
    best = int(np.argmin(slopes))
    return rates[best + width // 2] if slopes[best] < -NOISE * noise / math.sqrt(places @ places) else None


def smooth(losses: list[float]) -> list[float]:
    """Return the exponential running means of losses, corrected for their start at zero."""
    means, mean = [], 0.0
    for count, loss in enumerate(losses, 1):
        mean = MEMORY * mean + (1 - MEMORY) * loss
        means.append(mean / (1 - MEMORY**count))
    return means


def find_lr(config: Config, rates: Rates, picture: Path | None, verbose: bool) -> int:
    """Try the rates on all ranks, print a suggestion for ``optim.lr``, and draw the picture."""
    data: dict[str, Any] = config.model_dump(mode="json")
    data |= {"max_steps": rates.steps, "max_epochs": None, "early_stopping": None, "swa": None, "on_nonfinite": "stop"}
    data["optim"] |= {"plateau": None}
    with opened_job(Config.model_validate(data), verbose) as job:
        tried, losses = _try(job, rates)
        if job.communicator.rank == 0:
            means = smooth(losses)
            rate = suggestion(tried, losses)
            factor = scale(config.optim, config.global_batch(job.session.groups.data.size))
            lines = _lines(tried, means, rate, factor)
            if rate is not None:
                lines += _of_groups(config.optim, rate / factor)
            say("\n".join(lines), styled=True)
            if picture:
                range_test(tried, losses, means, rate, picture)
                say(f"picture: {picture}")
    return 0


def _try(job: Job, rates: Rates) -> tuple[list[float], list[float]]:
    """Run a step with each rate until the loss is too high. Returns (rates, losses), equal on all ranks."""
    config = job.config
    update, compression = connect(job, config.exchange.compression)
    log, source = NullLog(), StopSource()
    parts = job.data.train, job.data.val
    training = RangeTest(config, job.frontend, update, *parts, Path(config.run_dir), log, compression, source, None)
    training.rates = rates
    train_state.restore(training, None)
    runner, task = StepRunner(training), job.frontend.task
    tried: list[float] = []
    losses: list[float] = []
    for step in _steps(training):
        rate, sums, _ = runner.run(step)
        local = np.sum([job.frontend.ops.to_numpy(x) for x in sums], axis=0)
        total = ordered_sum(local, training.groups.sums)
        loss = task.results(total)["loss"]
        if math.isnan(loss) and task.finite(total):  # this batch has no label that counts
            continue
        if not math.isfinite(loss) or (losses and smooth([*losses, loss])[-1] > TOO_HIGH * min(smooth(losses))):
            break
        tried.append(rate)
        losses.append(loss)
    if not tried:
        what = f"the loss is {loss} at the first rate, {rates.first:g}"
        raise ConfigError(what, where="find-lr", fix="give a smaller --from, and look for NaN in the data", common=True)
    return tried, losses


def _steps(training: Training) -> Iterator[Step]:
    """Yield the batches of as many epochs as needed."""
    p = training.progress
    while True:
        with closing(training.train_loader.epoch(p.epoch, 0)) as steps:
            for step in steps:
                if p.step >= training.schedule.total_steps:
                    return
                yield step
        p.epoch, p.consumed = p.epoch + 1, 0


def _lines(tried: list[float], means: list[float], rate: float | None, factor: float) -> list[str]:
    """Describe the result. ``factor``: of ``optim.lr_scaling`` on ``optim.lr``."""
    first = min(LEAST, len(means) - 1)  # earlier running means cover too few losses
    lowest = first + int(np.argmin(means[first:]))
    lines = [
        f"{amount(len(tried), 'step')}, learning rate {tried[0]:.1e} to {tried[-1]:.1e}; "
        f"lowest loss {means[lowest]:.4f} at {tried[lowest]:.1e}"
    ]
    if rate is None:
        what = "no suggestion: the loss falls no more than it varies from batch to batch"
        return [*lines, f"{what}; give more --steps, a larger batch, or another --from and --to"]
    scaled = "" if factor == 1 else f"; optim.lr_scaling multiplies optim.lr by {factor:g}"
    return [*lines, f"suggestion: --set optim.lr={rate / factor:.2g} (the loss falls fastest at {rate:.2g}{scaled})"]


def _of_groups(optim: OptimConfig, rate: float) -> list[str]:
    """List the rates of ``optim.groups`` for the suggested ``optim.lr``, at the ratio that was tested."""
    rates = [
        f"optim.groups.{number}.lr to {rate * group.lr / optim.lr:.2g}"
        for number, group in enumerate(optim.groups)
        if group.lr is not None
    ]
    title = "optim.groups were tried at their ratio to optim.lr: with it set"
    return [f"{title} {' and '.join(rates)}"] if rates else []
