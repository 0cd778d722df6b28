"""Which weights are averaged when: every weight in turn, and all of them with fraction 1 or every step."""

from __future__ import annotations

import pytest

from hvd_train.config.keys import ExchangeConfig
from hvd_train.core.apart import due, parts
from hvd_train.protocol import TensorSpec

SPECS = [TensorSpec(f"t{i}", (n,), "float32") for i, n in enumerate((100, 1, 50, 200, 3, 3, 400, 10))]
NAMES = [spec.name for spec in SPECS]


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.25, 0.3, 0.5, 1.0])
def test_every_weight_is_in_one_part(fraction):
    found = parts(SPECS, fraction)
    assert [name for part in found for name in part] == NAMES
    assert len(found) <= -(-1 // fraction)


def test_equal_tensors_make_equal_parts():
    specs = [TensorSpec(str(i), (10,), "float32") for i in range(12)]
    assert [len(part) for part in parts(specs, 0.25)] == [3, 3, 3, 3]


@pytest.mark.parametrize("fraction", [0.1, 0.25, 1.0])
def test_partial_goes_round(fraction):
    exchange = ExchangeConfig(mode="partial", partial_fraction=fraction)
    cycle = len(parts(SPECS, fraction))
    for first in (1, 5, 1000):
        seen = [name for step in range(first, first + cycle) for name in due(exchange, SPECS, step)]
        assert sorted(seen) == sorted(NAMES)


@pytest.mark.parametrize("every", [1, 3])
def test_local_sgd_averages_all_every_so_many_steps(every):
    exchange = ExchangeConfig(mode="local_sgd", local_steps=every)
    for step in range(1, 10):
        assert due(exchange, SPECS, step) == (NAMES if step % every == 0 else [])


def test_gradients_that_travel_need_no_average():
    assert due(ExchangeConfig(), SPECS, 1) == []
