"""The rungs of successive halving: the number of trials, and the epoch to which they train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hvd_train.errors import ConfigError
from hvd_train.sweep.trials import Trial

SAME = ("max_epochs", "check_val_every_n_epoch", "checkpoint")


class Rung(NamedTuple):
    """A rung: ``size`` trials train to epoch ``end``; None: to the end of the training."""

    end: int | None
    size: int


def ladder(trials: Sequence[Trial], eta: int | None) -> list[Rung]:
    """Make as many rungs as trials and epochs allow, each ``eta`` times as long as the one before.

    Without ``eta`` there is one rung. Rungs end at regular evaluations, because an additional one would change the bits
    of the run.
    """
    if eta is None:
        return [Rung(None, len(trials))]
    for key in SAME:
        if any(getattr(trial.config, key) != getattr(trials[0].config, key) for trial in trials):
            raise ConfigError(
                f"{key} differs between trials, which --halving compares at the same epochs", where=f"--param {key}"
            )
    config = trials[0].config
    if config.max_epochs is None:
        raise ConfigError("--halving divides the epochs, and max_epochs is not set", fix="set it")
    if not config.checkpoint.monitor.startswith("val_"):
        what = f"--halving compares evaluations, and checkpoint.monitor is {config.checkpoint.monitor}"
        raise ConfigError(what, fix="set it to val_loss, for example")
    every = config.check_val_every_n_epoch
    units, halvings = config.max_epochs // every, 0  # units: evaluations
    # The last rung is the whole training. Each rung before is 1 / eta as long and has eta times as many trials.
    while eta ** (halvings + 1) <= min(units, len(trials)):
        halvings += 1
    if not halvings:
        what = f"too few trials ({len(trials)}) or evaluations ({units} a trial) to continue 1 in {eta}"
        raise ConfigError(what, where="--halving", fix="give more values or epochs, or leave it out")
    ends = [every * (units // eta ** (halvings - k)) for k in range(halvings)]
    return [Rung(end, len(trials) // eta**k) for k, end in enumerate([*ends, None])]


def describe(rungs: Sequence[Rung]) -> str:
    """Describe the rungs as text: ``8 trials to epoch 1, 4 to epoch 2, 2 to the end``."""
    return ", ".join(
        f"{rung.size}{' trials' * (k == 0)} to {f'epoch {rung.end}' if rung.end else 'the end'}"
        for k, rung in enumerate(rungs)
    )
