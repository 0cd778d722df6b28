"""The page "Fine-tuning" of the guide: its examples run as shown, and print what it says."""

from __future__ import annotations

import argparse
import re
import shlex

import numpy as np
import pytest

from tests.cli.test_guide import PAGES, as_typed, blocks

TEXT = PAGES["fine-tuning"]
BEFORE, HEAD, GROUPS, OWN = blocks(TEXT, "yaml")
TABLE, NUMBERED, PARTS = (block[1:] for block in TEXT.split("```")[1::2] if block.startswith("\n"))  # what is printed
LONG = pytest.mark.long("the first example runs each time; test_parameter_groups and test_user_optimizer show the rest")


def test_a_new_head_on_the_layers_of_another_run(tmp_path):
    """The second run is that of the page, on two ranks, and then one in the other framework."""
    first, second = (shlex.split(block) for block in blocks(TEXT, "sh")[:2])
    (tmp_path / "job.yaml").write_text(BEFORE)
    (tmp_path / "head.yaml").write_text(HEAD)
    as_typed(first, tmp_path)
    for more in ([], ["--set", "framework=tensorflow", "--run-dir", "runs/other"]):
        printed = as_typed([*second, *more], tmp_path)
        assert TABLE in printed
        assert "epoch 4: 4 tensors of 4 are trained from here on\n" in printed
        assert float(re.search(r"^done: validation .*accuracy ([\d.]+)", printed, re.MULTILINE)[1]) > 0.8


def test_the_weights_of_a_checkpoint_that_holds_more(tmp_path, monkeypatch):
    """What the page says how to do, where a file is refused."""
    import torch

    from hvd_train.frontends.pytorch.weight_files import WEIGHT_FILES

    monkeypatch.chdir(tmp_path)
    content = {"model_state_dict": {"a": torch.ones(2)}, "args": argparse.Namespace(lr=0.1), "best": np.float64(0.9)}
    torch.save(content, "theirs.pt")
    with pytest.raises(ValueError, match="it holds argparse.Namespace, .*, and to read these could run code"):
        WEIGHT_FILES[".pt"](tmp_path / "theirs.pt")
    code, _ = blocks(TEXT, "python")
    exec(code, {})
    assert WEIGHT_FILES[".pt"](tmp_path / "weights.pt")[""]["a"].tolist() == [1, 1]


@LONG
def test_other_rates_and_an_optimizer_of_yours(tmp_path):
    _, code = blocks(TEXT, "python")
    (tmp_path / "mine.py").write_text(code)
    for number, (block, shown) in enumerate(((GROUPS, PARTS), (OWN, "\ndone: "))):
        (tmp_path / "job.yaml").write_text(block)
        printed = as_typed(["hvd-train", "fit", "-c", "job.yaml", "--run-dir", f"runs/{number}", "-np", "2"], tmp_path)
        assert shown in printed
    listed = as_typed(["hvd-train", "fit", "-c", "job.yaml", "--run-dir", "runs/2", "--check"], tmp_path)
    assert "names for optim.groups: fc1.kernel, fc1.bias, fc2.kernel, fc2.bias\n" in listed
