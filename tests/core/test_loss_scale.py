"""The loss scale: halves at an overflow, doubles after 2000 good steps, and stays a power of two."""

from __future__ import annotations

import math

import numpy as np

from hvd_train.core.loss_scale import FIRST_SCALE, GROWTH_STEPS, next_scale


def test_halves_and_doubles():
    assert next_scale(1024.0, 17, False) == (512.0, 0)
    assert next_scale(1024.0, 17, True) == (1024.0, 18)
    assert next_scale(1024.0, GROWTH_STEPS - 1, True) == (2048.0, 0)


def test_stays_a_power_of_two():
    rng, scale, good = np.random.default_rng(0), FIRST_SCALE, 0
    for finite in rng.random(10_000) > 0.002:
        scale, good = next_scale(scale, good, bool(finite))
        assert math.log2(scale) % 1 == 0 and 0 <= good < GROWTH_STEPS
