"""Steps of an optimizer in local training, in one process."""

from __future__ import annotations

import torch

from hvd_train.config import ExchangeConfig
from hvd_train.frontends.serial import Serial
from hvd_train.script.pytorch.local_training import LocalModel


class Nested(torch.optim.SGD):
    """An optimizer of a user, with a step of its base class within its step."""

    def step(self, closure=None):
        return super().step(closure)


def test_a_step_within_a_step_counts_once():
    model = torch.nn.Linear(2, 1)
    torch.optim.SGD(model.parameters())  # the first of them lets SGD's own step call hooks
    optimizer = Nested(model.parameters(), lr=0.1)
    local = LocalModel(model, [], optimizer, ExchangeConfig(mode="outer", outer_steps=2), Serial(), number=0, every=0)
    for steps in (1, 2, 3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert local.taken == steps and local.update.diverged == (steps != 2)


def test_a_part_of_the_model_that_is_loaded_stays_loaded():
    """The outer step moves the weights from there by 1.33 times what the rank has learned."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    LocalModel(model, [], optimizer, ExchangeConfig(mode="outer", outer_steps=1), Serial(), number=0, every=0)
    model[0].load_state_dict({"weight": torch.full((2, 2), 5.0)})
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert (model[0].weight == 5).all()
