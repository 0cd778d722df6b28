"""Embeddings that N ranks would not train as one rank does."""

import pytest
from torch import nn

from hvd_train.frontends.pytorch.embeddings import dependent_on_batch
from tests.ranks.job import Job, settings

MODEL = """
from torch import nn

def model(**shape):
    return nn.Sequential(nn.Linear(64, 10), nn.ModuleDict({"words": nn.EmbeddingBag(5, 2, scale_grad_by_freq=True)}))
"""


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


def test_two_ranks_refuse_it(tmp_path):
    (tmp_path / "words.py").write_text(MODEL)
    job = Job("-np", tmp_path, *settings(tmp_path / "run"), "--set", "model={name: 'words:model'}")
    code, _, err = job.end()
    assert code == 2 and err.startswith(
        "error[rank 0]: 1.words: scale_grad_by_freq would count the words of each rank's"
    ), err
    assert err.count("\n") == 1 and err.endswith("; leave the option out\n")
