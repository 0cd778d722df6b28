"""The table of learning rate schedules. The formulas are in ``core/learning_rate.py``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ScheduleSpec:
    """A schedule: a value of ``optim.schedule``.

    ``options``: its keys of ``optim``. ``units``: whether these are in ``optim.schedule_unit``. ``to_end``: whether it
    runs to the end of the training, so that rates depend on the training's length.
    """

    options: tuple[str, ...] = ()
    units: bool = False
    to_end: bool = False


SCHEDULES = {
    "constant": ScheduleSpec(),
    "step": ScheduleSpec(("step_size", "gamma"), units=True),
    "multistep": ScheduleSpec(("milestones", "gamma"), units=True),
    "exponential": ScheduleSpec(("gamma",), units=True),
    "cosine": ScheduleSpec(to_end=True),
    "cosine_restarts": ScheduleSpec(("period", "period_factor"), units=True),
    "linear": ScheduleSpec(to_end=True),
    "polynomial": ScheduleSpec(("power",), to_end=True),
    "one_cycle": ScheduleSpec(("rise", "start_divisor", "end_divisor"), to_end=True),
    "inverse_sqrt": ScheduleSpec(),
}


def spec_of(schedule: str) -> ScheduleSpec:
    """Return the spec of a schedule. A user's function gets the training's length, so it counts as ``to_end``."""
    return SCHEDULES.get(schedule) or ScheduleSpec(to_end=True)
