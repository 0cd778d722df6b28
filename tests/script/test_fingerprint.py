"""Contents of data sets that ranks compare."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils import data

from hvd_train.script.shared.dataloader import fingerprint


class Holding(data.Dataset):
    """A data set of the user's own with some attributes."""

    def __init__(self, count=40, **held):
        self.count = count
        vars(self).update(held)

    def __len__(self):
        return self.count


FORTY = list(range(40))
TELLING = [
    (["a", "b"], ["b", "a"]),
    ({"a", "b"}, {"a", "c"}),
    ({"a": 0, "b": 1}, {"a": 1, "b": 0}),
    (FORTY, FORTY[::-1]),
    ({"train": FORTY, "rest": 1}, {"train": FORTY[1:], "rest": 1}),
    ([("/a/x.png", 0), ("/a/y.png", 1)], [("/a/y.png", 1), ("/a/x.png", 0)]),
    ([Path("/a/x"), Path("/a/y")], [Path("/a/y"), Path("/a/x")]),
    ([{"file": "x"}, {"file": "y"}], [{"file": "y"}, {"file": "x"}]),
    (np.arange(5), np.arange(5)[::-1]),
    (np.array(["a", "b"], object), np.array(["b", "a"], object)),
    (torch.arange(5), torch.arange(5).int()),
    (torch.eye(2, dtype=torch.bfloat16), torch.eye(2, dtype=torch.bfloat16).flip(0)),
    ([torch.ones(2), torch.zeros(2)], [torch.zeros(2), torch.ones(2)]),
    (data.TensorDataset(torch.ones(2)), data.TensorDataset(torch.zeros(2))),
    (Holding(files=["a", "b"]), Holding(files=["b", "a"])),
    (data.ConcatDataset([FORTY, FORTY]), data.ConcatDataset([FORTY, FORTY[::-1]])),
]
SILENT = [
    (1, 2),
    ("a", "b"),
    ((0, 2), (1, 2)),
    ([0.1, 0.2], [0.3]),
    ({"rank": 0, "size": 2}, {"rank": 1, "size": 2}),
    (["/tmp/r0/a", "/tmp/r0/b"], ["/tmp/r1/a", "/tmp/r1/b"]),
    ({"a": 0, "b": 1}, {"b": 1, "a": 0}),
    ([object()] * 3, [object()] * 2),
    ({object()}, {object(), object()}),
    (torch.tensor(1), torch.tensor(2)),
    ([], ["a"]),
    (torch.ones(2).to_sparse(), torch.zeros(2).to_sparse()),
]


@pytest.mark.parametrize(("one", "other", "differ"), [(*x, True) for x in TELLING] + [(*x, False) for x in SILENT])
def test_what_a_data_set_tells(one, other, differ):
    digests = fingerprint.content(Holding(held=one)), fingerprint.content(Holding(held=other))
    assert (digests[0] != digests[1]) == differ
    if not isinstance(one, data.Dataset):
        assert fingerprint.content(Holding(cached=one)) == {}


def test_a_data_set_that_holds_itself():
    own = Holding(files=["a", "b"])
    own.again, own.files[0] = own, own.files
    assert list(fingerprint.content(own)) == ["data: files"]


@pytest.mark.parametrize(
    "make", [list, lambda x: [str(k) for k in x], lambda x: [[k] for k in x], np.array, torch.tensor]
)
def test_what_a_script_shuffles(make):
    """In its place or anew; not what is filled, nor what holds no entry for each sample."""
    samples = Holding(1000, files=make(range(1000)), few=make(range(10)), other=[None] * 1000)
    orders = fingerprint.Orders(data.Subset(samples, range(5)))
    assert orders.moved() == {}
    samples.other[::3], samples.few = range(334), samples.few[:5]
    assert orders.moved() == {}
    digests = []
    for _ in range(2):
        order = np.random.permutation(1000).tolist()
        samples.files = [samples.files[k] for k in order] if isinstance(samples.files, list) else samples.files[order]
        digests.append(orders.moved())
        assert list(digests[-1]) == ["data: files"] and orders.moved() == digests[-1]
    assert digests[0] != digests[1]
    samples.files[::2] = samples.files[1::2]
    assert orders.moved() == {}
