"""Loss scaling: 16-bit numbers round small gradients to zero, so the loss is multiplied and the gradient divided."""

from __future__ import annotations

FIRST_SCALE = 2.0**16
GROWTH_STEPS = 2000


def next_scale(scale: float, good_steps: int, finite: bool) -> tuple[float, int]:
    """Return the new (scale, steps since it last changed) after a step.

    An overflow halves the scale, and 2000 steps without one double it.

    Scales are powers of two, so that scaling is exact (Micikevicius et al. 2018, "Mixed Precision Training").
    """
    if not finite:
        return scale / 2, 0
    return (scale * 2, 0) if good_steps + 1 == GROWTH_STEPS else (scale, good_steps + 1)
