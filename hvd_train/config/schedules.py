"""The names of the schedules of the learning rate. ``core/schedule`` has their formulas."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ScheduleSpec:
    """A schedule: the value of ``optim.schedule``.

    ``options``: the keys of ``optim`` that are its. ``units``: whether they count ``optim.schedule_unit``. ``to_end``:
    whether it runs to the end of the training, so that a rate depends on the training's length.
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
    """Return the spec of a schedule. A function of the user gets the training's length, so it may run to the end."""
    return SCHEDULES.get(schedule) or ScheduleSpec(to_end=True)
