"""The part of the configuration that a front-end gets."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from hvd_train.config.keys.config import Config
from hvd_train.config.keys.model import ModelConfig
from hvd_train.config.keys.optim import OptimConfig
from hvd_train.config.keys.parallel import ParallelConfig
from hvd_train.config.keys.task import TaskConfig
from hvd_train.config.modes import MODES


@dataclass(frozen=True)
class FrontEndConfig:
    """The settings of model, precision, device and optimizer. Most names are keys of the configuration.

    ``restores``: all weights come from a checkpoint. ``overlap``: gradients are exchanged during backward.
    ``micro_batches``: the number of parts of a step's batch. ``checks_gradients``: skip a step if a gradient on some
    rank is not finite. ``averages_weights``: averages of the weights are kept. ``gathers_statistics``: batch
    normalization's statistics are recomputed for these averages. ``exact``: N ranks train as one rank does.
    """

    model: ModelConfig
    task: TaskConfig
    optim: OptimConfig
    parallel: ParallelConfig
    precision: str
    seed: int
    device: str
    devices: list[int] | None
    sync_batchnorm: bool
    steps_per_execution: int | Literal["auto"]
    restores: bool
    overlap: bool | Literal["auto"]
    micro_batches: int
    checks_gradients: bool
    averages_weights: bool
    gathers_statistics: bool
    exact: bool

    @classmethod
    def of(cls, config: Config) -> FrontEndConfig:
        return cls(
            **{one.name: getattr(config, one.name) for one in fields(cls) if hasattr(config, one.name)},
            overlap=config.exchange.overlap,
            averages_weights=bool(config.ema or config.swa or config.optim.schedule_free),
            gathers_statistics=bool(config.swa),
            exact=MODES[config.exchange.mode].exact,
        )
