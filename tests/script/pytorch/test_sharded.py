"""Scripts with ``ht.distribute(sharded=True)`` on real ranks: the numbers of whole slots, on any number of ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.launching import ROOT, launch
from tests.script.pytorch.cases.sharded import TRAININGS

TOLERANCE = 1e-9  # float64: the same maths in another order of sums
# Kernels that round the last few entries of a tensor otherwise, and 32 bits.
OTHER_ROUNDING, SINGLE = {"adam fused", "scaled"}, {"scaled"}
LONG = pytest.mark.long("two ranks run it in every run, and the shares of more are tested in one process")
WORLDS = [(2, "mpirun"), pytest.param((3, "horovodrun"), marks=LONG)]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """(size, launcher) -> the folder of that world's results and its ranks' facts."""
    done, root = {}, tmp_path_factory.mktemp("sharded")

    def get(size: int, launcher: str = "mpirun"):
        if size not in done:
            folder = root / str(size)
            folder.mkdir()
            run = launch(size, launcher, ["-m", "tests.script.pytorch.sharded_worker", str(folder)])
            assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-3000:]
            done[size] = folder, [json.loads((folder / f"facts.{rank}.json").read_text()) for rank in range(size)]
        return done[size]

    get(1)  # whose checkpoint the others go on from
    return get


def furthest(one: Path, other: Path) -> float:
    a, b = np.load(one), np.load(other)
    assert set(a) == set(b)
    return max(float(np.abs(a[k] - b[k]).max() / max(1e-30, np.abs(a[k]).max())) for k in a)


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_bits_are_those_of_whole_slots(worlds, world):
    for facts in worlds(*world)[1]:
        same = facts["same bits"] | facts["scripts"]
        assert {name for name, equal in same.items() if not equal} <= OTHER_ROUNDING
    _, facts = worlds(*world)
    assert all(rank["digests"] == facts[0]["digests"] for rank in facts)


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_ranks_train_as_one(worlds, world):
    (single, _), (folder, _) = worlds(1), worlds(*world)
    compared = [name for name in TRAININGS if name not in SINGLE | {"compressed"}]  # what is left out differs
    distances = {name: furthest(single / f"{name}.npz", folder / f"{name}.npz") for name in compared}
    assert max(distances.values()) < TOLERANCE, distances


@pytest.mark.parametrize("world", [(1, "mpirun"), *WORLDS], ids=str)
def test_saved_slots_are_whole_and_go_on_with_the_same_bits(worlds, world):
    for facts in worlds(*world)[1]:
        assert facts["gone on"] == [facts["begun"]] * 2 and facts["kept"] and facts["slots"]["same"]


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_a_checkpoint_goes_on_on_another_number_of_ranks(worlds, world):
    folder, _ = worlds(*world)
    found = sorted(folder.glob("from *.npz"))
    assert len(found) > 1
    assert max(furthest(folder / "from 1.npz", path) for path in found) < TOLERANCE


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_each_rank_keeps_its_part_of_the_slots(worlds, world):
    size, (_, facts) = world[0], worlds(*world)
    counts = [rank["slots"]["entries"] for rank in facts]
    whole = counts[0][0]
    assert all(own == whole for own, _ in counts)
    # Each of 4 weights has a number of steps besides; a group is divided by itself.
    assert all(abs(part - whole / size) <= 12 for _, part in counts), counts


REFUSED = {
    "lbfgs": "LBFGS cannot be divided: it keeps '_params' .list. beside its groups and slots",
    "muon": "Muon cannot be divided: a step on parts of tensors fails",
    "adafactor": "Adafactor cannot be divided: a step on parts of tensors differs from the whole",
    "trusted": "Trusted cannot be divided: a step on parts of tensors differs from the whole .* not elementwise",
    "of size": "OfSize cannot be divided: a step on parts of tensors differs from the whole",
    "late": "Late cannot be divided: a step on parts of tensors differs from the whole",
    "by place": "ByPlace cannot be divided: a step on a tensor depends on its place in the group",
    "lookahead": "Lookahead cannot be divided: it keeps 'inner' .SGD. beside its groups and slots",
    "schedule free": "ScheduleFree cannot be divided: its method 'eval' may need whole slots",
    "none": "sharded=True needs an optimizer, and none was given",
    "moved": r"a parameter of shape .* memory format; .*; call model.to\(...\) before ht.distribute",
}


@pytest.mark.parametrize("world", [(1, "mpirun"), *WORLDS], ids=str)
def test_what_cannot_be_divided_is_refused_on_all_ranks(worlds, world):
    for facts in worlds(*world)[1]:
        for name, message in facts["refused"].items():
            assert re.match(REFUSED[name], message), message
        assert len(facts["refused"]) == len(REFUSED) - (world[0] == 1)  # alone nothing is divided, and nothing moves


KILLED = """
import os, sys
import torch
import hvd_train.torch as ht
from tests.script.pytorch.cases.models import digest, fit
from tests.script.pytorch.cases import sharded

sharded.begin()
model, optimizer, schedule, batches = sharded.job(True)
parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "batches": batches}
for epoch in range(ht.load(sys.argv[1], missing_ok=True, **parts).get("epoch", 0), 3):
    if len(sys.argv) > 2 and epoch == 1 and ht.rank() == 1:
        os.kill(os.getpid(), 9)
    fit(model, optimizer, scheduler=schedule, batches=batches)
    ht.save(sys.argv[1], **parts, epoch=epoch + 1)
ht.print(digest(model))
"""


def test_a_rank_that_is_killed(tmp_path):
    """The script goes on from its file to the bits of one that nobody killed."""
    (tmp_path / "train.py").write_text(KILLED)
    cut = launch(2, "mpirun", ["train.py", "cut.safetensors", "kill"], tmp_path)
    assert cut.returncode != 0 and (tmp_path / "cut.safetensors").exists()
    ends = [launch(2, "mpirun", ["train.py", name], tmp_path) for name in ("cut.safetensors", "whole.safetensors")]
    assert [end.returncode for end in ends] == [0, 0], ends
    assert ends[0].stdout and ends[0].stdout == ends[1].stdout


def test_the_guides_example(tmp_path):
    """As shown, on two ranks."""
    page, call = (ROOT / "hvd_train" / "guide" / "own-script.md").read_text(), "optimizer, sharded=True"
    (block,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if call in block]
    (tmp_path / "train.py").write_text(block)
    run = launch(2, "mpirun", ["train.py"], tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]
    assert re.fullmatch(r"optimizer state of this rank: (\d+) of \d+ numbers\n", run.stdout), run.stdout
    assert (tmp_path / "sharded.safetensors").exists()
