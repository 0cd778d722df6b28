"""The names of the schedules of the learning rate. ``core/schedule`` has their formulas."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A schedule: the value of ``optim.schedule``.

    ``options``: the keys of ``optim`` that are its. ``units``: whether they count ``optim.schedule_unit``. ``to_end``:
    whether it runs to the end of the training, so that a rate depends on the training's length.
    """

    options: tuple[str, ...] = ()
    units: bool = False
    to_end: bool = False


SCHEDULES = {
    "constant": Row(),
    "step": Row(("step_size", "gamma"), units=True),
    "multistep": Row(("milestones", "gamma"), units=True),
    "exponential": Row(("gamma",), units=True),
    "cosine": Row(to_end=True),
    "cosine_restarts": Row(("period", "period_factor"), units=True),
    "linear": Row(to_end=True),
    "polynomial": Row(("power",), to_end=True),
    "one_cycle": Row(("rise", "start_divisor", "end_divisor"), to_end=True),
    "inverse_sqrt": Row(),
}


def row_of(schedule: str) -> Row:
    """Return the row of a schedule. A function of the user gets the training's length, so it may run to the end."""
    return SCHEDULES.get(schedule) or Row(to_end=True)
