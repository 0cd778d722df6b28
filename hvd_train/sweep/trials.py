"""Plan the trials of a sweep: a grid of listed values, or random draws."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hvd_train.config import Config, load_config
from hvd_train.config.reading import YamlLoader
from hvd_train.errors import ConfigError

NUMBER = r"([-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)"
RANGE = re.compile(rf"(log:)?{NUMBER}\.\.{NUMBER}")


@dataclass(frozen=True)
class Range:
    """A range to draw numbers from, uniformly or log-uniformly; integers if both ends are integers and not log."""

    low: float
    high: float
    log: bool

    def draw(self, generator: random.Random) -> float:
        if self.log:
            value = math.exp(generator.uniform(math.log(self.low), math.log(self.high)))
        elif isinstance(self.low, int) and isinstance(self.high, int):
            return generator.randint(self.low, self.high)
        else:
            value = generator.uniform(self.low, self.high)
        return float(f"{value:.6g}")


@dataclass(frozen=True)
class Trial:
    """A training of a sweep: its number from 0, its values of the varied keys, and its complete configuration."""

    number: int
    values: Mapping[str, Any]
    config: Config  # its run folder is the trial's

    @property
    def name(self) -> str:
        return Path(self.config.run_dir).name

    @property
    def description(self) -> str:
        """Return the values as text: ``optim.lr=0.1, batch_size=32``."""
        return ", ".join(f"{key}={json.dumps(value)}" for key, value in self.values.items())


def plan(
    path: Path | None,
    sets: Sequence[str],
    params: Sequence[str],
    draws: int | None,
    seed: int,
    folder: Path,
    repeats: Mapping[str, Sequence[Any]] | None = None,
) -> list[Trial]:
    """Make all trials and check their configurations; every rank makes the same ones.

    ``draws``: the number of random trials; None: the whole grid. ``repeats``: {key: values} over which each combination
    is repeated. Raises ConfigError.
    """
    spaces, repeats = dict(_parsed(param, draws is not None) for param in params), repeats or {}
    if not spaces and (draws is not None or not repeats):
        raise ConfigError(
            "no parameter is given", where="sweep", fix="give one or more, for example --param optim.lr=0.1,0.01"
        )
    if len(spaces) < len(params):
        raise ConfigError("a parameter stands twice", where="--param", fix="list all its values in one")
    # All ranks draw with the same seed in the order of the parameters, so they make the same trials.
    generator = random.Random(seed)
    trials: list[Trial] = []
    if draws is None:
        listed = [space for space in spaces.values() if isinstance(space, list)]
        combinations = [dict(zip(spaces, values, strict=True)) for values in itertools.product(*listed)]
    else:
        combinations = [{key: _draw(space, generator) for key, space in spaces.items()} for _ in range(draws)]
    again = [dict(zip(repeats, values, strict=True)) for values in itertools.product(*repeats.values())]
    for number, values in enumerate({**one, **repeat} for one in combinations for repeat in again):
        settings = [f"{key}={json.dumps(value)}" for key, value in values.items()]
        try:
            config = load_config(path, [*sets, *settings], run_dir=str(folder / f"trial-{number:03d}"))
        except ConfigError as error:
            # Values are passed as --set, but the message should name the user's option, --param.
            text = str(error)
            for setting in settings:
                text = text.replace(f"--set {setting}", f"--param {setting}")
            raise ConfigError(text) from error
        trials.append(Trial(number, values, config))
    _check_comparable(trials)
    return trials


def _check_comparable(trials: Sequence[Trial]) -> None:
    """Refuse to choose the best trial by the loss if trials have different losses."""
    tasks = {json.dumps(one.config.task.model_dump(mode="json", exclude={"metrics"})) for one in trials}
    monitor = trials[0].config.checkpoint.monitor
    if len(tasks) > 1 and monitor.endswith("loss"):
        what = f"{monitor} decides which trial is best, and the trials have different losses"
        fix = "choose by a metric: --set checkpoint.monitor=val_accuracy, or one of your task.metrics"
        raise ConfigError(what, where="--param task", fix=fix)


def _parsed(param: str, random_: bool) -> tuple[str, list[Any] | Range]:
    key, equals, text = (part.strip() for part in param.partition("="))
    if not equals or not key or not text:
        raise ConfigError("a parameter has the form KEY=VALUE,VALUE", where=f"--param {param}")
    drawn = RANGE.fullmatch(text)
    if drawn:
        if not random_:
            raise ConfigError("a range is for --random N", where=f"--param {param}", fix="list values, or add --random")
        low, high = (yaml_number(end) for end in drawn.groups()[1:])
        if not low < high or (drawn[1] and low <= 0):
            what = "the range is empty" if not low < high else "log: needs a range above 0"
            raise ConfigError(what, where=f"--param {param}", fix="give LOW..HIGH, for example log:1e-4..1e-1")
        return key, Range(low, high, bool(drawn[1]))
    try:
        values = YamlLoader(f"[{text}]").get_single_data()  # as --set reads a value
    except yaml.YAMLError as error:
        raise ConfigError("the values are not valid YAML", where=f"--param {param}") from error
    return key, values


def yaml_number(text: str) -> int | float:
    return int(text) if re.fullmatch(r"[-+]?\d+", text) else float(text)


def _draw(space: list[Any] | Range, generator: random.Random) -> Any:
    return space.draw(generator) if isinstance(space, Range) else generator.choice(space)
