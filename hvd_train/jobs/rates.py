"""Draw the learning rates of a training without starting it."""

from __future__ import annotations

from pathlib import Path

from hvd_train.config import Config
from hvd_train.config.user_code import look_in
from hvd_train.core.learning_rate import Schedule
from hvd_train.data.catalog import open_data
from hvd_train.data.loader import Loader
from hvd_train.report.plots import rates

MOST = 20_000  # maximum number of points; longer trainings are subsampled


def draw_rates(config: Config, ranks: int, picture: Path) -> str:
    """Draw the learning rate of every step of a training on ``ranks`` ranks. Returns lines that describe it.

    Opens the data for the number of samples. Plateaus are not simulated.
    """
    look_in(config.code_dir)
    train, replicas = open_data(config.data, config.task).train, config.replicas(ranks)
    loader = Loader(train, global_batch=config.global_batch(replicas), seed=config.seed)
    schedule = Schedule.of(config, loader.steps_per_epoch, replicas)
    steps = range(0, schedule.total_steps, -(-schedule.total_steps // MOST))
    values = [schedule.rate(step) for step in steps]
    rates(steps, values, schedule.steps_per_epoch, f"optim.schedule: {config.optim.schedule}", picture)
    first, last, top = values[0], schedule.rate(schedule.total_steps - 1), max(values)
    size = config.batch_words(ranks) if config.by_tokens else f"of {schedule.global_batch} samples"
    length = f"{schedule.total_steps:,} steps {size}, {schedule.steps_per_epoch:,} an epoch"
    rate = f"learning rate {first:.3g} at first, {top:.3g} at most, {last:.3g} at last"
    return "\n".join([f"{length}: {rate}", *schedule.notes(), f"picture: {picture}"])
