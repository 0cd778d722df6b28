"""Successive halving (Jamieson and Talwalkar 2016): all trials train a little, and the best of them go on.

Each trial keeps to the learning rates of its full length; it is left at the end of a rung and goes on from its
checkpoint, so that one which comes to the end has the bits of a run that nobody left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hvd_train.sweep.folder import Sweep, decide_rung, state, survivors
from hvd_train.sweep.plan import Trial


def turn(sweep: Sweep) -> tuple[list[Trial], int | None]:
    """Return (the trials to run next, the epoch at which they pause). No trials: the sweep has ended.

    If a rung has ended, this decides which trials continue. Call it in one process only.
    """
    # A rung is decided when all its trials have ended it. Written down, the decision stands for every later reader.
    while True:
        rung, going = survivors(sweep)
        states = [(trial, state(sweep, trial)) for trial in going]
        todo = [trial for trial, one in states if one.word != "failed" and one.rung <= rung]
        if todo or rung + 1 == len(sweep.rungs):
            return todo, sweep.rungs[rung].end
        if all(one.word == "failed" for _, one in states):
            return [], None  # --resume tries them again
        decide_rung(sweep, best_first(sweep, going)[: sweep.rungs[rung + 1].size])


def best_first(sweep: Sweep, trials: Sequence[Trial]) -> list[Trial]:
    """Sort trials by ``checkpoint.monitor`` at the end of what each has trained, equal ones by number.

    Trials without a result are left out.
    """
    ranked = []
    for trial in trials:
        one, rule = state(sweep, trial), trial.config.checkpoint
        value: Any = one.summary.get(rule.monitor)
        if isinstance(value, int | float) and math.isfinite(value):
            ranked.append((value if trial.config.mode_of(rule) == "min" else -value, trial.number))
    return [sweep.trials[number] for _, number in sorted(ranked)]
