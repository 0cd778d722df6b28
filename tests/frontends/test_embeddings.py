"""Embeddings that N ranks would not train as one rank does."""

import pytest
from torch import nn

from hvd_train.errors import ConfigError
from hvd_train.frontends.pytorch.embeddings import dependent_on_batch
from tests.frontends.test_contract import CLASSES, built, sample_of
from tests.frontends.test_overlap import Hosts


def counting(**shape):
    return nn.Sequential(nn.Linear(12, 3), nn.ModuleDict({"words": nn.EmbeddingBag(5, 2, scale_grad_by_freq=True)}))


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (nn.Embedding(5, 2, padding_idx=0, sparse=True), ""),
        (nn.Embedding(5, 2, scale_grad_by_freq=True), "the model: scale_grad_by_freq would count"),
        (nn.Sequential(nn.ReLU(), nn.EmbeddingBag(5, 2, max_norm=1.0)), "1: max_norm would change"),
    ],
)
def test_the_layer_and_its_option_are_named(layer, says):
    found = dependent_on_batch(layer)
    assert found.startswith(says) and bool(found) == bool(says)


def test_two_ranks_refuse_it():
    words = "^1.words: scale_grad_by_freq would count the words of each rank's.*; leave the option out$"
    with pytest.raises(ConfigError, match=words):
        built("pytorch", sample_of((12,), CLASSES), Hosts(), model={"name": f"{__name__}:counting"})
