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


@pytest.mark.parametrize(
    ("framework", "model", "told"),
    [
        (
            "tensorflow",
            {"name": "keras_own_loss"},
            "the model's compute_loss is not used: its loss here is cross_entr",
        ),
        (
            "pytorch",
            {"name": "with_training_step"},
            "the model's training_step is not used: its loss here is cross_en",
        ),
        ("tensorflow", {"name": "keras_masking"}, "the model masks some of its outputs (layer 'masking"),
        ("tensorflow", {"name": "keras_masking", "sequences": False}, ""),
        ("tensorflow", {"name": "keras_subclass"}, ""),
    ],
)
def test_what_of_a_model_does_not_count_is_told(framework, model, told):
    """Losses of models, and masks of outputs: both were passed over without a word."""
    remarks = opened(framework, model | {"name": f"tests.own_models:{model['name']}"}).task.remarks
    assert [line[: len(told)] for line in remarks] == [told] * bool(told)


def test_variables_of_one_path_are_refused():
    with pytest.raises(ConfigError, match="two variables of the model are called 'head/kernel'"):
        opened("tensorflow", {"name": "tests.own_models:keras_towers"})
