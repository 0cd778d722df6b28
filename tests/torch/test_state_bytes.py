"""State dictionaries as bytes."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from hvd_train.errors import CheckpointError
from hvd_train.torch import state_bytes


def test_files_give_back_every_bit():
    value = {
        "half": torch.tensor([1.5, float("nan"), -0.0], dtype=torch.bfloat16),
        "view": torch.arange(6.0).reshape(2, 3).T,
        3: [1e-310, float("inf"), True, None, "text", (1, 2)],
        "empty": torch.zeros(0, 4),
        "truth": torch.tensor(True),
        "milestones": Counter({5: 2}),
    }
    back = state_bytes.unpack(state_bytes.pack(value))
    assert list(back) == list(value) and back[3] == value[3] and isinstance(back[3][5], tuple)
    assert type(back["milestones"]) is Counter and back["milestones"] == value["milestones"]
    for key in ("half", "view", "empty", "truth"):
        assert back[key].dtype == value[key].dtype and back[key].shape == value[key].shape
    assert (back["half"].view(torch.int16) == value["half"].view(torch.int16)).all()
    assert (back["view"] == value["view"]).all()


def test_files_keep_keys_apart():
    value = {"a/b": torch.ones(1), "a": {"b": torch.zeros(2)}, 1: torch.ones(3), "1": torch.ones(4)}
    value |= {"1'": torch.ones(5), None: [torch.ones(6)], "None/0": torch.ones(7)}
    back = state_bytes.unpack(state_bytes.pack(value))
    assert list(back) == list(value)
    shapes = [back["a/b"], back["a"]["b"], back[1], back["1"], back["1'"], back[None][0], back["None/0"]]
    assert [len(x) for x in shapes] == [1, 2, 3, 4, 5, 6, 7]


def test_files_hold_no_objects_and_no_faults():
    with pytest.raises(CheckpointError, match="a set cannot be saved; own/1"):
        state_bytes.pack({"own": [0, {1}]})
    content = state_bytes.pack({"x": torch.arange(8.0)})
    flipped = bytes([*content[:-1], content[-1] ^ 1])
    for bad in (b"", b"123", content[:-4], flipped, content[:9]):
        with pytest.raises(ValueError, match="damaged"):
            state_bytes.unpack(bad)
