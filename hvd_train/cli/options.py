"""The options that several commands share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import click

from hvd_train.errors import ConfigError
from hvd_train.launch import launchers

FILE = click.Path(dir_okay=False, path_type=Path)


class NumberRange(click.FloatRange):
    """A finite number in a range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def together(*options: Callable) -> Callable:
    """Combine options into one decorator. The help lists them in this order."""

    def decorate(command: Callable) -> Callable:
        for option in reversed(options):  # decorators apply from the inside out
            command = option(command)
        return command

    return decorate


def launcher(in_allocation: bool = False) -> Callable:
    """Return the option ``--launcher``. ``in_allocation``: also with launchers that start ranks in an allocation."""
    offered = launchers.startable(in_allocation)
    names = [launchers.AUTO, *sorted(one.name for one in offered)]
    more = "".join(f" {one.name}: {one.help}." for one in offered if one.help)
    return click.option(
        "--launcher", type=click.Choice(names), default=launchers.AUTO, show_default=True, help=launchers.HELP + more
    )


config_file = click.option(
    "-c",
    "--config",
    "path",
    type=FILE,
    help="YAML file; 'hvd-train config' prints one.",
)
set_keys = click.option(
    "--set", "sets", metavar="KEY=VALUE", multiple=True, help="Set any key, for example optim.lr=0.1; repeatable."
)
configuration = together(config_file, set_keys)

PICTURES = (".png", ".svg", ".pdf")  # endings

num_proc = click.option(
    "-np",
    "--num-proc",
    type=click.IntRange(min=1),
    help="Start this many ranks on this host (without: this process alone).",
)
any_launcher = launcher()

AUTO_RANKS = "auto"


class _RanksOrAuto(click.IntRange):
    """A number of ranks, or AUTO_RANKS."""

    name = "integer|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value == AUTO_RANKS else super().convert(value, param, ctx)


num_proc_or_auto = click.option(
    "-np",
    "--num-proc",
    type=_RanksOrAuto(min=1),
    metavar="N|auto",
    help="Start this many ranks on this host; auto: as many as train fastest, measured before (without: this process "
    "alone).",
)


def hosts(command: Callable) -> Callable:
    """Add the options that name hosts. The command gets them as ``hosts``, or None."""

    @wraps(command)
    def parsed(hosts: str | None, hostfile: Path | None, network_interfaces: str | None, **others: Any) -> None:
        from hvd_train.launch.hosts import parse

        command(hosts=parse(hosts, hostfile, network_interfaces), **others)

    add = together(
        click.option("-H", "--hosts", metavar="HOST:SLOTS,...", help="The hosts of the ranks, over ssh (fit: of -np)."),
        click.option("--hostfile", type=FILE, help="The same as a file, a line 'HOST slots=N' each."),
        click.option("--network-interfaces", metavar="NAME,...", help="With several hosts: the networks between them."),
    )
    return add(parsed)


verbose = click.option(
    "-v", "--verbose", is_flag=True, help="Show the launcher's command and the frameworks' own logs."
)

quiet = click.option("-q", "--quiet", is_flag=True, help="Print warnings, errors and the last line alone.")

trained_run = click.option(
    "--run-dir",
    type=click.Path(file_okay=False),
    help="Run folder of the training; the configuration saved with the checkpoint is used.",
)
checkpoint = click.option(
    "--checkpoint",
    default="last",
    show_default=True,
    metavar="last|best|step-N|PATH",
    help="Which checkpoint to load.",
)
trust = click.option(
    "--trust", is_flag=True, help="Import the code (package.module:function) that the run folder names."
)
split = click.option(
    "--split",
    type=click.Choice(["train", "val", "test", "all"]),
    help="Part of the data (without: val of the run's own data, all of others).",
)
inference = together(trained_run, configuration, checkpoint, trust, split, num_proc, any_launcher, verbose)

trials = together(
    click.option(
        "--param",
        "params",
        metavar="KEY=VALUE,...",
        multiple=True,
        help="A key and its values; with --random also a range, 8..64 or log:1e-4..1e-1; repeatable.",
    ),
    click.option(
        "--random", "draws", type=click.IntRange(min=1), help="Draw this many trials (without: all combinations)."
    ),
    click.option("--seed", type=click.IntRange(min=0), help="Seed of the draws of --random (0)."),
    click.option("--folds", type=click.IntRange(min=2), help="Train each on this many folds; compare means."),
    click.option("--seeds", type=click.IntRange(min=2), help="Train each with this many seeds; compare means."),
)


def check_script(program: Sequence[str], configured: Any, command: str, keys: str) -> None:
    """Raise ConfigError for a script together with a configuration, or a configuration in place of a script.

    ``configured``: whether one of the options ``keys`` is given.
    """
    if program and configured:
        raise ConfigError("a script has no configuration", where=command, fix=f"leave out {keys}")
    if program and program[0].endswith((".yaml", ".yml")):
        raise ConfigError(f"{program[0]} is not a script", where=command, fix=f"give -c {program[0]}")


def seed_of_draws(draws: int | None, seed: int | None) -> int:
    """Return the seed of ``--random``. Raises ConfigError for a seed alone, which may be the training's."""
    if seed is not None and draws is None:
        fix = f"give --random, or --set seed={seed} for the seed of the training"
        raise ConfigError("--seed is the seed of --random, which is not given", fix=fix)
    return seed or 0
