"""The learning rate as a pure function of (step, global batch)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hvd_train.config import Config, OptimConfig
from hvd_train.config.schedules import spec_of
from hvd_train.config.user_code import user_function
from hvd_train.errors import ConfigError, named_reason


def scale(optim: OptimConfig, global_batch: int) -> float:
    """Return the factor on ``optim.lr``: linear (Goyal et al. 2017), square root (Krizhevsky 2014), or 1."""
    if optim.lr_scaling == "none" or optim.lr_reference_batch is None:
        return 1.0
    ratio = global_batch / optim.lr_reference_batch
    return ratio if optim.lr_scaling == "linear" else math.sqrt(ratio)


@dataclass(frozen=True)
class Position:
    """The position of a step after the warm-up.

    ``done``: steps since the warm-up, out of ``length`` until the end of training. ``units``: ``done`` in
    ``optim.schedule_unit``. ``warmup``: steps of the warm-up.
    """

    done: int
    length: int
    units: float
    warmup: int

    @property
    def part(self) -> float:
        """Return the completed fraction after warm-up, at most 1."""
        return min(1.0, self.done / max(1, self.length))


def _between(first: float, last: float, part: float) -> float:
    """Return the rate at fraction ``part`` of a cosine decay from ``first`` to ``last``."""
    return last + (first - last) * (1 + math.cos(math.pi * part)) / 2


# Tolerance for rounded fractions of epochs (0.6 / 0.1 is 5.99...), smaller than any step.
NEARLY = 1 + 1e-10


def _step(at: Position, base: float, o: OptimConfig) -> float:
    return base * o.gamma ** math.floor(at.units / o.step_size * NEARLY)


def _multistep(at: Position, base: float, o: OptimConfig) -> float:
    return base * o.gamma ** sum(at.units >= milestone for milestone in o.milestones)


def _cosine_restarts(at: Position, base: float, o: OptimConfig) -> float:
    """SGDR (Loshchilov and Hutter 2017): cosine decay with restarts."""
    begin, length = 0.0, o.period
    while at.units * NEARLY >= begin + length:
        begin, length = begin + length, length * o.period_factor
    return _between(base, o.min_lr, max(0.0, at.units - begin) / length)


def _polynomial(at: Position, base: float, o: OptimConfig) -> float:
    return o.min_lr + (base - o.min_lr) * (1 - at.part) ** o.power


def _one_cycle(at: Position, base: float, o: OptimConfig) -> float:
    """Smith and Topin 2018, with two cosine phases as in torch's OneCycleLR."""
    first, top, last = base / o.start_divisor, o.rise * at.length - 1, max(1, at.length - 1)
    if at.done <= top:
        return _between(first, base, at.done / top if top else 1.0)  # a rise of one step ends at the maximum
    return _between(base, first / o.end_divisor, min(1.0, (at.done - top) / max(1.0, last - top)))


def _inverse_sqrt(at: Position, base: float, o: OptimConfig) -> float:
    """Vaswani et al. 2017: steps^-1/2, with the base rate at the end of the warm-up."""
    warmup = max(1, at.warmup)
    return base * math.sqrt(warmup / max(warmup, at.warmup + at.done + 1))


# (position, base rate, optim) -> rate, which is clipped below at ``min_lr``.
FORMULAS: dict[str, Callable[[Position, float, OptimConfig], float]] = {
    "constant": lambda at, base, o: base,
    "step": _step,
    "multistep": _multistep,
    "exponential": lambda at, base, o: base * o.gamma**at.units,
    "cosine": lambda at, base, o: _between(base, o.min_lr, at.part),
    "cosine_restarts": _cosine_restarts,
    "linear": lambda at, base, o: o.min_lr + (base - o.min_lr) * (1 - at.part),
    "polynomial": _polynomial,
    "one_cycle": _one_cycle,
    "inverse_sqrt": _inverse_sqrt,
}


@dataclass(frozen=True)
class Schedule:
    """``rate(step)`` for step 0, 1, ...: warm-up rises linearly to the base rate, then the schedule begins.

    With base = lr * scale and W warm-up steps, step < W has base (step + 1) / W. Then follow the rates of ``FORMULAS``,
    never below min_lr.

    ``ends_at_step``: the length of the training is given in steps; ``warmup``: see ``mixed_warmup``.
    """

    optim: OptimConfig
    global_batch: int
    steps_per_epoch: int
    total_steps: int
    ends_at_step: bool = False
    warmup: float = 0.0

    @classmethod
    def of(cls, config: Config, steps: int, ranks: int) -> Schedule:
        """Return the schedule of a training with this many steps in a whole epoch, and ranks."""
        global_batch = config.global_batch(ranks)
        limit = min(config.limit_train_batches or steps, steps)
        totals = [config.max_steps, config.max_epochs and config.max_epochs * limit]
        total = min(total for total in totals if total)
        return cls(config.optim, global_batch, limit, total, total == config.max_steps)

    @property
    def warmup_steps(self) -> int:
        if self.warmup:
            return round(self.warmup * (1 if self.counts_steps else self.steps_per_epoch))
        return self.optim.warmup_steps or round(self.optim.warmup_epochs * self.steps_per_epoch)

    @property
    def by_step(self) -> bool:
        """Return whether rates depend only on the step number, and nothing happens at the end of an epoch."""
        spec = spec_of(self.optim.schedule)
        return self.optim.schedule_unit == "steps" or not spec.units

    @property
    def counts_steps(self) -> bool:
        """Return whether rates depend on the run's step number rather than the position in epochs."""
        spec = spec_of(self.optim.schedule)
        from_start = not spec.to_end and (spec.units or not self.optim.warmup_epochs)
        return self.by_step and (self.ends_at_step or from_start)

    @property
    def mixed_warmup(self) -> float:
        """Return the warm-up converted to the unit of the schedule (steps or epochs) if it is given in the other one;
        else 0.

        A resumed run keeps this length: with another number of ranks epochs have other steps, and the rate would jump.
        """
        if not self.warmup_steps or bool(self.optim.warmup_steps) == self.counts_steps:
            return 0.0
        return self.warmup_steps / (1 if self.counts_steps else self.steps_per_epoch)

    @property
    def warmup_as_given(self) -> list[Any]:
        """Return the configured warm-up and the unit of the schedule."""
        return [self.optim.warmup_epochs, self.optim.warmup_steps, self.counts_steps]

    def rate(self, step: int) -> float:
        optim, warmup = self.optim, self.warmup_steps
        base = optim.lr * scale(optim, self.global_batch)
        if step < warmup:
            return base * (step + 1) / warmup
        done = step - warmup
        unit = 1 if optim.schedule_unit == "steps" else self.steps_per_epoch
        at = Position(done, self.total_steps - warmup, done / unit, warmup)
        if ":" in optim.schedule:
            return max(base * self._factor(done, at.length), optim.min_lr)
        return max(FORMULAS[optim.schedule](at, base, optim), optim.min_lr)

    @cached_property
    def _function(self) -> Callable[..., Any]:
        return user_function(self.optim.schedule, f"optim.schedule: {self.optim.schedule}")

    def _factor(self, step: int, total: int) -> float:
        """Call the user's function with those of step, total_steps, steps_per_epoch that it accepts, after warm-up."""
        where, function = f"optim.schedule: {self.optim.schedule}", self._function
        values = {"step": step, "total_steps": total, "steps_per_epoch": self.steps_per_epoch}
        try:
            takes = inspect.signature(function).parameters
            factor = float(function(**{name: values[name] for name in takes if name in values}))
        except Exception as error:
            reason = named_reason(error)
            fix = (
                "it is called with step=, total_steps= and steps_per_epoch=, as it takes them, and gives a factor on lr"
            )
            raise ConfigError(
                f"the function failed at step {step}: {reason}", where=where, fix=fix, common=True
            ) from error
        if not (math.isfinite(factor) and factor >= 0):
            fix = "give a number >= 0, which lr is multiplied by"
            raise ConfigError(f"the function gives {factor} at step {step}", where=where, fix=fix, common=True)
        return factor

    def notes(self) -> list[str]:
        """Return a line for each part of the schedule that begins after the end of training."""
        optim, unit = self.optim, self.optim.schedule_unit
        length = self.total_steps / (1 if unit == "steps" else self.steps_per_epoch)
        places = {"step": [optim.step_size], "multistep": optim.milestones, "cosine_restarts": [optim.period]}
        warmup = self.warmup_steps / (1 if unit == "steps" else self.steps_per_epoch)
        notes = []
        if self.warmup_steps >= self.total_steps:
            notes.append(f"the warm-up takes {self.warmup_steps} steps, and the training {self.total_steps}")
        elif late := [place for place in places.get(optim.schedule, []) if warmup + place >= length]:
            listed = ", ".join(f"{place:g}" for place in late)
            notes.append(
                f"schedule {optim.schedule}: {unit} {listed} are not before the end of the training, {length:g}"
            )
        return [f"note: optim.{note}" if note.startswith("schedule") else f"note: {note}" for note in notes]
