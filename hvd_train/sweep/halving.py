"""Successive halving (Jamieson and Talwalkar 2016): all trials train for a few epochs, and the best of them continue.

Each trial uses the learning rate schedule of its full length. It pauses at the end of a rung and resumes from its
checkpoint, so a completed trial has the same bits as an uninterrupted run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hvd_train.sweep.folder import Sweep, decide_rung, state, survivors
from hvd_train.sweep.trials import Trial


def turn(sweep: Sweep) -> tuple[list[Trial], int | None]:
    """Return (the trials to run next, the epoch at which they pause). No trials: the sweep has ended.

    When a rung has ended, it decides and records which trials continue. Call it in one process only.
    """
    # A rung is decided once, when all its trials have completed it. Later readers use the recorded decision.
    while True:
        rung, going = survivors(sweep)
        states = [(trial, state(sweep, trial)) for trial in going]
        todo = [trial for trial, one in states if one.word != "failed" and one.rung <= rung]
        if todo or rung + 1 == len(sweep.rungs):
            return todo, sweep.rungs[rung].end
        if all(one.word == "failed" for _, one in states):
            return [], None  # --resume runs them again
        decide_rung(sweep, best_first(sweep, going)[: sweep.rungs[rung + 1].size])


def best_first(sweep: Sweep, trials: Sequence[Trial]) -> list[Trial]:
    """Sort trials by their last value of ``checkpoint.monitor``, best first, ties by number.

    Trials without a finite value are left out.
    """
    ranked = []
    for trial in trials:
        one, rule = state(sweep, trial), trial.config.checkpoint
        value: Any = one.summary.get(rule.monitor)
        if isinstance(value, int | float) and math.isfinite(value):
            ranked.append((value if trial.config.mode_of(rule) == "min" else -value, trial.number))
    return [sweep.trials[number] for _, number in sorted(ranked)]
