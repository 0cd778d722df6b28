"""The ways to train in parallel that are compared, from the tables of modes and compressors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvd_train.compression.table import COMPRESSORS
from hvd_train.config import Config
from hvd_train.config.modes import ALLREDUCE, MODES
from hvd_train.config.names import did_you_mean
from hvd_train.errors import ConfigError

SYNCHRONOUS, SHARDED, PIPELINE, PLAIN = "synchronous", "sharded", "pipeline", "none"
WITH_CHANGES = "int8"  # compressor for modes that exchange weight changes instead of gradients
WORDS = (SYNCHRONOUS, SHARDED, *(name for name in COMPRESSORS if name != PLAIN), *MODES, PIPELINE)


@dataclass(frozen=True)
class Way:
    """A way to train: a mode, a compressor, with or without sharded optimizer or pipeline."""

    name: str
    mode: str = ALLREDUCE
    compression: str = PLAIN
    sharded: bool = False
    pipeline: bool = False

    @property
    def exact(self) -> str:
        """Say whether N ranks train as one rank does."""
        return "no" if not MODES[self.mode].exact else "yes" if self.compression == PLAIN else "nearly"

    def interval(self, config: Config) -> int:
        """Return the number of steps between two synchronizations."""
        key = MODES[self.mode].interval
        return getattr(config.exchange, key) if key else 1

    def keys(self, config: Config, ranks: int) -> dict[str, Any]:
        """Return the configuration of this way: ``config`` without the options of other ways.

        All ways have the same global batch, also if several ranks hold one model.
        """
        data: dict[str, Any] = config.model_dump(mode="json")
        used = {*MODES[self.mode].options, *COMPRESSORS[self.compression].options}
        tables = [row.options for row in MODES.values()] + [row.options for row in COMPRESSORS.values()]
        others = {option for options in tables for option in options} - used
        exchange = {key: value for key, value in data["exchange"].items() if key not in others}
        exchange |= {"mode": self.mode, "compression": self.compression, "compression_error_every_n_steps": 0}
        data |= {"exchange": exchange, "batch_size": None, "noise_scale_every_n_steps": 0}
        data["global_batch_size"] = config.global_batch_size_on(ranks)
        data["optim"] |= {"sharded": self.sharded}
        if not self.pipeline:
            data["parallel"] |= {"pipeline": 1, "microbatches": None, "split": "auto"}
        elif config.parallel.pipeline == 1:
            data["parallel"] |= {"pipeline": stages(ranks), "microbatches": None}
        return data


def stages(ranks: int) -> int:
    """Return the smallest number of stages above 1 that divides the ranks."""
    return next(count for count in range(2, ranks + 1) if ranks % count == 0)


def standard() -> list[str]:
    """Return the names of the ways that are compared by default."""
    names = [SYNCHRONOUS, SHARDED, *(name for name, one in COMPRESSORS.items() if one.compared)]
    for mode, one in MODES.items():
        if mode != ALLREDUCE:
            names += [mode, *([f"{mode}+{WITH_CHANGES}"] if one.deltas and one.compression else [])]
    return [*names, PIPELINE]


def way(name: str) -> Way:
    """Return the way with this name: a word, or several, such as ``outer+topk``. Raises ConfigError."""
    fields: dict[str, Any] = {}
    for word in name.split("+"):
        if word not in WORDS:
            raise ConfigError(did_you_mean(word, WORDS), where="--modes")
        mode = ALLREDUCE if word == SYNCHRONOUS else word
        key = word if word in (SHARDED, PIPELINE) else "compression" if word in COMPRESSORS else "mode"
        if key in fields:
            what = f"{word} does not go together with another {key}"
            raise ConfigError(what, where=f"--modes {name}", fix="separate ways by commas")
        fields[key] = {SHARDED: True, PIPELINE: True}.get(word, mode)
    return Way(name, **fields)


def ways(names: str | None, ranks: int) -> Sequence[Way]:
    """Return the ways in a comma-separated list, or the default ones. Raises ConfigError."""
    if ranks < 2:
        raise ConfigError("a single rank has nothing to exchange", where="-np", fix="give -np 2, or more")
    return [way(name) for name in dict.fromkeys(names.split(",") if names else standard())]
