"""Subclasses of Keras' Model, whose layers get their weights when they are called: all of them are trained."""

from __future__ import annotations

import pytest

from hvd_train.errors import ConfigError
from tests.frontends.test_contract import batch, opened, stepped, weights

NAME = "tests.own_models:keras_subclass"


@pytest.mark.parametrize("early", [False, True])
def test_all_layers_of_a_subclass_are_trained(early):
    frontend = opened("tensorflow", {"name": NAME, "early": early})
    before = weights(frontend)
    assert len(before) == 4 + early
    stepped(frontend, [batch(), batch(1)])
    after = weights(frontend)
    assert all((after[key] != before[key]).any() for key in before), "each weight moves"


def test_a_layer_that_is_called_in_training_alone_is_refused():
    frontend = opened("tensorflow", {"name": NAME, "aux": True})
    with pytest.raises(ConfigError, match="got its weights within the first step, and they would not be trained"):
        stepped(frontend, [batch()])


def test_variables_of_one_path_are_refused():
    with pytest.raises(ConfigError, match="two variables of the model are called 'head/kernel'"):
        opened("tensorflow", {"name": "tests.own_models:keras_towers"})
