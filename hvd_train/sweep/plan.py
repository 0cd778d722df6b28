"""Which trials a sweep has: a grid of listed values, or random draws."""

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
from hvd_train.errors import ConfigError

NUMBER = r"([-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)"
RANGE = re.compile(rf"(log:)?{NUMBER}\.\.{NUMBER}")


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``: whole ones if both are; drawn evenly, or evenly on a logarithmic scale."""

    low: float
    high: float
    log: bool

    def draw(self, chance: random.Random) -> float:
        if self.log:
            found = math.exp(chance.uniform(math.log(self.low), math.log(self.high)))
        elif isinstance(self.low, int) and isinstance(self.high, int):
            return chance.randint(self.low, self.high)
        else:
            found = chance.uniform(self.low, self.high)
        return float(f"{found:.6g}")


@dataclass(frozen=True)
class Trial:
    number: int
    values: Mapping[str, Any]
    config: Config  # its run folder is the trial's

    @property
    def name(self) -> str:
        return Path(self.config.run_dir).name

    @property
    def told(self) -> str:
        return ", ".join(f"{key}={json.dumps(value)}" for key, value in self.values.items())


def plan(
    path: Path | None, sets: Sequence[str], params: Sequence[str], draws: int | None, seed: int, folder: Path
) -> list[Trial]:
    """All trials, their configurations checked. Every rank makes the same."""
    spaces = dict(_parsed(param, draws is not None) for param in params)
    if not spaces:
        raise ConfigError("no parameter is given", where="sweep", fix="for example --param optim.lr=0.1,0.01")
    if len(spaces) < len(params):
        raise ConfigError("a parameter stands twice", where="--param", fix="list all its values in one")
    chance, found = random.Random(seed), []
    if draws is None:
        listed = [space for space in spaces.values() if isinstance(space, list)]
        combinations = [dict(zip(spaces, values, strict=True)) for values in itertools.product(*listed)]
    else:
        combinations = [{key: _draw(space, chance) for key, space in spaces.items()} for _ in range(draws)]
    for number, values in enumerate(combinations):
        own = [f"{key}={json.dumps(value)}" for key, value in values.items()]
        try:
            config = load_config(path, [*sets, *own], run_dir=str(folder / f"trial-{number:03d}"))
        except ConfigError as error:
            text = str(error)
            for setting in own:
                text = text.replace(f"--set {setting}", f"--param {setting}")
            raise ConfigError(text) from error
        found.append(Trial(number, values, config))
    return found


def _parsed(param: str, random_: bool) -> tuple[str, list[Any] | Range]:
    key, equals, text = (part.strip() for part in param.partition("="))
    if not equals or not key or not text:
        raise ConfigError("not of the form KEY=VALUE,VALUE", where=f"--param {param}")
    drawn = RANGE.fullmatch(text)
    if drawn:
        if not random_:
            raise ConfigError("a range is for --random N", where=f"--param {param}", fix="list values, or add --random")
        low, high = (yaml_number(end) for end in drawn.groups()[1:])
        if not low < high or (drawn[1] and low <= 0):
            raise ConfigError("an empty range" if not low < high else "a logarithm of 0", where=f"--param {param}")
        return key, Range(low, high, bool(drawn[1]))
    try:
        values = yaml.safe_load(f"[{text}]")
    except yaml.YAMLError as error:
        raise ConfigError("the values are not valid YAML", where=f"--param {param}") from error
    return key, [_number_or(value) for value in values]


def yaml_number(text: str) -> int | float:
    return int(text) if re.fullmatch(r"[-+]?\d+", text) else float(text)


def _number_or(value: Any) -> Any:
    """YAML 1.1 takes 1e-5 for a word."""
    return float(value) if isinstance(value, str) and re.fullmatch(NUMBER, value) else value


def _draw(space: list[Any] | Range, chance: random.Random) -> Any:
    return space.draw(chance) if isinstance(space, Range) else chance.choice(space)
