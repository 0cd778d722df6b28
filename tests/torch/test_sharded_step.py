"""Steps of a sharded optimizer that an error ends, in one process."""

from __future__ import annotations

import pytest
import torch

from hvd_train.errors import ConfigError
from hvd_train.frontends.serial import Serial
from hvd_train.torch.sharded import ShardedStep


class Careful(torch.optim.SGD):
    """Raises an error of its own where a gradient is not finite, and else steps as its base class does."""

    def step(self, closure=None):
        if not all(p.grad.isfinite().all() for group in self.param_groups for p in group["params"]):
            raise ValueError("not finite")
        return super().step(closure)


def test_a_step_that_an_error_has_ended_is_not_passed_over():
    """The steps after it would move nothing, and say nothing."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = Careful([weight], lr=0.5)
    ShardedStep(optimizer, Serial(), frozenset())
    for _ in range(2):  # a step within a step is none that was ended
        weight.grad = torch.ones(3)
        optimizer.step()
    assert weight.tolist() == [0, 0, 0]
    weight.grad = torch.full((3,), torch.nan)
    with pytest.raises(ValueError, match="not finite"):
        optimizer.step()
    weight.grad = torch.ones(3)
    for _ in range(2):
        with pytest.raises(ConfigError, match="an error has ended the last optimizer.step"):
            optimizer.step()
    assert weight.tolist() == [0, 0, 0]
