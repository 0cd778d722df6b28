"""Steps of a sharded optimizer that an error ends, in one process."""

from __future__ import annotations

import copy
from collections import defaultdict

import pytest
import torch

from hvd_train.errors import ConfigError
from hvd_train.frontends.serial import Serial
from hvd_train.script.pytorch.sharded import ShardedStep


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


class Gathering(Serial):
    """Notes the lengths of what is gathered."""

    def __init__(self):
        self.lengths = []

    def allgather_async(self, x, name):
        self.lengths.append(len(x))
        return x


def test_frozen_parameters_that_still_have_a_gradient_are_gathered():
    """Each rank moved its part alone, and the ranks' weights went apart."""
    frozen, trained = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([{"params": [frozen]}, {"params": [trained]}], lr=0.5, momentum=0.9)
    communicator = Gathering()
    ShardedStep(optimizer, communicator, frozenset())
    for p in (frozen, trained):
        p.grad = torch.ones_like(p)
    optimizer.step()
    frozen.requires_grad_(False)
    communicator.lengths.clear()
    optimizer.zero_grad(set_to_none=False)  # the momentum goes on to move it
    before = frozen.tolist()
    optimizer.step()
    assert frozen.tolist() != before and communicator.lengths == [3, 2]
    communicator.lengths.clear()
    optimizer.zero_grad()
    trained.grad = torch.ones(2)
    optimizer.step()
    assert communicator.lengths == [2]


def test_the_state_of_a_whole_parameter_is_refused():
    """It was a new, empty dictionary: what a script reset in it stayed as it was. The cures work."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.9)
    ShardedStep(optimizer, Serial(), frozenset())

    def step():
        weight.grad = torch.ones(3)
        optimizer.step()

    step()
    state = optimizer.state
    uses = [lambda: state[weight], lambda: weight in state, lambda: state.get(weight), lambda: state.pop(weight)]
    uses += [lambda: state.update(x=1) or state.setdefault(weight, {}), lambda: state.__setitem__(weight, {})]
    for use in [*uses, lambda: state.__delitem__(weight)]:
        with pytest.raises(ConfigError, match=r"optimizer.state of a parameter of shape \(3,\): .*; change what optim"):
            use()
    del state["x"]
    whole = optimizer.state_dict()
    whole["state"][0]["momentum_buffer"].fill_(3.0)
    optimizer.load_state_dict(whole)
    assert [x["momentum_buffer"].tolist() for x in optimizer.state.values()] == [[3.0] * 3]
    for slots in optimizer.state.values():
        slots["momentum_buffer"].zero_()
    before = weight.detach().clone()
    step()
    assert (before - weight).tolist() == [0.5] * 3
    optimizer.state = defaultdict(dict)  # a reset, too
    before = weight.detach().clone()
    step()
    assert (before - weight).tolist() == [0.5] * 3
    with pytest.raises(ConfigError, match="optimizer.state of a parameter"):
        optimizer.state[weight].clear()
    assert type(copy.deepcopy(optimizer.state)) is defaultdict
