"""State dictionaries as bytes."""

from __future__ import annotations

import os
import struct
from collections import Counter

import numpy as np
import pytest
import torch
from safetensors.torch import save

from hvd_train.errors import CheckpointError
from hvd_train.script.pytorch import checkpoint, state_bytes
from hvd_train.script.pytorch.options import rate_of, text_of
from hvd_train.script.pytorch.state_bytes import KEY, _digest


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


def test_options_of_groups():
    """Numbers of NumPy, types, sets and functions, which stay those of the script that loads."""
    weight = torch.nn.Parameter(torch.ones(2))
    options = {"share": np.float32(0.5), "kind": torch.bfloat16, "names": {"b", "a"}, "function": abs}
    optimizer = torch.optim.Adafactor([{"params": [weight], "lr": None, **options}])
    (group,) = state_bytes.unpack(state_bytes.pack({"o": optimizer.state_dict()}))["o"]["param_groups"]
    assert {k: group[k] for k in options} == options | {"function": state_bytes.KEPT} and type(group["share"]) is float
    optimizer.load_state_dict(state_bytes.with_functions({"state": {}, "param_groups": [group]}, optimizer))
    assert {k: optimizer.param_groups[0][k] for k in options} == options and group["lr"] is None
    one, other = Counter.fromkeys, Counter().most_common  # where the second's object lies in memory is no difference
    assert text_of([one, other, {"b", "a"}]) == text_of([one, Counter().most_common, {"a", "b"}])
    assert text_of((object(), {"n": np.float32(0.5)})) == text_of([object(), {"n": 0.5}])
    assert rate_of(group) == "none" and rate_of({"lr": torch.tensor(0.5)}) == "0.5" == rate_of({"lr": np.float32(0.5)})


def test_files_keep_keys_apart():
    value = {"a/b": torch.ones(1), "a": {"b": torch.zeros(2)}, 1: torch.ones(3), "1": torch.ones(4)}
    value |= {"1'": torch.ones(5), None: [torch.ones(6)], "None/0": torch.ones(7)}
    back = state_bytes.unpack(state_bytes.pack(value))
    assert list(back) == list(value)
    shapes = [back["a/b"], back["a"]["b"], back[1], back["1"], back["1'"], back[None][0], back["None/0"]]
    assert [len(x) for x in shapes] == [1, 2, 3, 4, 5, 6, 7]


def test_files_hold_no_objects_and_no_faults():
    with pytest.raises(CheckpointError, match="a function cannot be saved; own/1"):
        state_bytes.pack({"own": [0, lambda: 1]})
    content = state_bytes.pack({"x": torch.arange(8.0)})
    flipped = bytes([*content[:-1], content[-1] ^ 1])
    for bad in (b"", b"123", content[:-4], flipped, content[:9]):
        with pytest.raises(ValueError, match="damaged"):
            state_bytes.unpack(bad)


def crafted(structure, **about):
    """A file of such a structure under a valid hash."""
    tensors = {"x": torch.ones(2)}
    return save(tensors, {KEY: structure, "sha256": _digest(structure, tensors), **about})


STRUCTURES = [
    "{}",
    '{"a": 1, "b": 2}',
    '{"deque": []}',
    '{"dtype": "load"}',
    '{"tensor": "y"}',
    '{"tensor": []}',
    '{"dict": 1}',
    '{"dict": [1]}',
]
STRUCTURES += ['{"dict": [[{"list": []}, 1]]}', '{"list": 3}', "[", '{"list": [' * 3000, '{"Counter": [["a", 1], 2]}']


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_foreign_structure_is_a_damaged_file(structure):
    with pytest.raises(ValueError, match="it is damaged, or not a file of ht.save"):
        state_bytes.unpack(crafted(structure))


@pytest.mark.parametrize("header", [b"[]", b"3", b'{"__metadata__": 3}', b'{"__metadata__": []}', b"[" * 9999])
def test_a_foreign_header_is_a_damaged_file(header):
    for length in (len(header), 1 << 62):
        with pytest.raises(ValueError, match="damaged"):
            state_bytes.unpack(struct.pack("<Q", length) + header)


STATES = {
    "number": 3, "list": [1], "no groups": {"state": {}}, "groups": {"state": {}, "param_groups": 3},
    "slots": {"state": {0: 5}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}, "text": "x", "none": None,
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_a_state_of_another_kind_is_one_line(tmp_path, name, part):
    model = torch.nn.Linear(2, 1)
    parts = {"model": model, "optimizer": torch.optim.Adam(model.parameters())}
    (tmp_path / "last").write_bytes(state_bytes.pack({part: STATES[name]}))
    with pytest.raises(CheckpointError, match=f"it does not fit this {part}: "):
        checkpoint.load(tmp_path / "last", **{part: parts[part]})


def test_what_is_no_file_of_a_script_is_one_line(tmp_path):
    (tmp_path / "list").write_bytes(state_bytes.pack([1]))
    os.mkfifo(tmp_path / "pipe")
    for name, words in (("list", "it is not a file of ht.save"), ("pipe", "no plain file")):
        with pytest.raises(CheckpointError, match=words):
            checkpoint.load(tmp_path / name)
