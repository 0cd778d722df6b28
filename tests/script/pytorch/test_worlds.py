"""Scripts with ``hvd_train.torch`` on real ranks, against one process, and their faults."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.launching import launch
from tests.limits import SECONDS
from tests.script.pytorch.cases.same import SAME
from tests.script.pytorch.cases.same_bits import SAME_BITS

HERE = Path(__file__).parent
TOLERANCE = 1e-9  # float64: the same maths in another order of sums


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """(size, launcher) -> the folder of that world's results and its ranks' facts."""
    done = {}

    def get(size: int, launcher: str = "mpirun"):
        if (size, launcher) not in done:
            folder = tmp_path_factory.mktemp(f"{launcher}{size}")
            run = launch(size, launcher, ["-m", "tests.script.pytorch.cases", str(folder)])
            assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-3000:]
            facts = [json.loads((folder / f"facts.{rank}.json").read_text()) for rank in range(size)]
            done[size, launcher] = folder, facts
        return done[size, launcher]

    return get


LONG = pytest.mark.long("the other launcher, or another script of its kind, runs in every run")
# Three ranks that wait over Gloo for one another, on two cores which others use, took from one to seven minutes.
WORLDS = [(2, "mpirun")]
WORLDS += [pytest.param(world, marks=LONG) for world in ((3, "horovodrun"), (3, "mpirun"), (2, "horovodrun"))]


def furthest(one: Path, other: Path) -> float:
    a, b = np.load(one), np.load(other)
    assert set(a) == set(b)
    return max(float(np.abs(a[k] - b[k]).max() / max(1e-30, np.abs(a[k]).max())) for k in a if "tracked" not in k)


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_ranks_train_as_one(cases, world):
    (single, _), (folder, _) = cases(1), cases(*world)
    distances = {name: furthest(single / f"{name}.0.npz", folder / f"{name}.0.npz") for name in SAME}
    assert max(distances.values()) < TOLERANCE, distances
    assert furthest(single / "sgd.0.npz", single / "zeros.0.npz") > 1e-3  # which is clipped


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_all_ranks_hold_the_same_bits(cases, world):
    _, facts = cases(*world)
    for name in SAME_BITS:
        assert len({rank_facts[f"digest {name}"] for rank_facts in facts}) == 1, name
    names = ("not compressed", "fp16", "bf16", "int8", "int4", "topk", "powersgd")
    assert len({facts[0][f"digest {name}"] for name in names}) == len(names)
    # The planted fault: without ht.distribute they differ.
    assert len({rank_facts["digest apart"] for rank_facts in facts}) == world[0]
    assert len({rank_facts["broadcast"] for rank_facts in facts}) == 1


def test_the_cases_are_not_all_the_same_training(cases):
    _, facts = cases(1)
    distinct = ["sgd", "adam", "clip", "zeros", "scheduler", "two optimizers", "tied and frozen", "norm synchronized"]
    assert len({facts[0][f"digest {name}"] for name in distinct}) == len(distinct)


@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("name", ["scaler", "scaler topk"])
def test_all_ranks_leave_out_an_overflown_step(cases, world, name):
    _, facts = cases(*world)
    for rank_facts in facts:
        assert rank_facts[name] == [[2.0, True], [1.0, False], [1.0, True]]


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_parts_of_a_model_without_gradient(cases, world):
    """Part 0 on even ranks, part 2 on odd ones; part 1 nowhere: no gradient, and no step moves it."""
    size, facts = world[0], cases(*world)[1]
    even = (size + 1) // 2
    for rank_facts in facts:
        assert rank_facts["dynamic"]["gradients"] == [
            pytest.approx(even / size),
            None,
            pytest.approx((size - even) / size),
        ]
        assert rank_facts["dynamic"]["untouched"] and rank_facts["dynamic"]["then"]


@pytest.mark.parametrize("world", [(1, "mpirun"), *WORLDS], ids=str)
def test_resumed_training_is_the_same_bits(cases, world):
    for rank_facts in cases(*world)[1]:
        assert rank_facts["resume"] == {"same": True, "found": {"epoch": 1, "best": float("inf")}, "left": []}


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_gradients_thrown_away_leave_no_trace(cases, world):
    """In what a compressor keeps: not of the whole model's passes, nor of the half that a pass was not for."""
    for rank_facts in cases(*world)[1]:
        for name, (without, whole, half) in rank_facts["thrown away"].items():
            assert without == whole == half, name
        assert (
            len(rank_facts["thrown away"]) == len({digests[0] for digests in rank_facts["thrown away"].values()}) == 4
        )
        for by_optimizer, by_hand in rank_facts["residual by hand"]:
            assert by_optimizer == by_hand


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_statistics_are_never_compressed(cases, world):
    variance = np.load(cases(*world)[0] / "norm wide.0.npz")["2.running_var"]
    assert len(variance) == 4500 and (variance > 0).all()


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_a_synchronized_model_is_saved_whole(cases, world):
    for rank_facts in cases(*world)[1]:
        assert rank_facts["pickled"] == {"same": True, "class": True, "joined": True, "batches": 20}


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_a_checkpointed_model_is_exchanged_once(cases, world):
    for rank_facts in cases(*world)[1]:
        assert rank_facts["transfers"] == {"plain": 3, "checkpointed": 3}


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_masks_differ_between_ranks(cases, world):
    _, facts = cases(*world)
    assert len({str(rank_facts["masks"]) for rank_facts in facts}) == world[0]


def batches_of(facts: list[dict], epoch: int, loader: int) -> list[list[int]]:
    """Global batches, sorted, from the ranks' batches."""
    ranks = [rank_facts["looks"][epoch][loader] for rank_facts in facts]
    return [sorted(i for part in parts for i in part) for parts in zip(*ranks, strict=True)]


@pytest.mark.parametrize("world", [(1, "mpirun"), *WORLDS], ids=str)
def test_looks_of_one_rank_shift_nothing(cases, world):
    """Each sample once an epoch, on one rank; other orders in each epoch, also after one left early, and loader."""
    (_, single), (_, facts) = cases(1), cases(*world)
    orders = [batches_of(facts, epoch, loader) for epoch in range(4) for loader in range(2)]
    for batches in orders:
        counts = Counter(i for batch in batches for i in batch)
        assert set(counts.values()) == {1} and len(counts) == (996 if len(batches) == 83 else 51 * 12)
    assert [len(batches) for batches in orders] == [83, 83, 51, 51, 83, 83, 83, 83]
    assert len({str(batches[:51]) for batches in orders}) == 8
    assert orders == [batches_of(single, epoch, loader) for epoch in range(4) for loader in range(2)]


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_draws_differ_between_ranks_and_repeat(cases, world):
    """Of torch, NumPy and random: in the loop, in a loader, in a loader's worker."""
    _, facts = cases(*world)
    drawn = [rank_facts["draws"] for rank_facts in facts]
    for one, again, _ in drawn:
        assert one == again
    assert one[0] != one[1]
    for place in range(3):
        rows = [(first + [worker])[place] for first, _, worker in drawn]
        for values in zip(*map(np.ravel, rows), strict=True):
            assert len(set(values)) == len(values)
    assert len({str(rank_facts["sampled"]) for rank_facts in facts}) == world[0]


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_a_model_that_was_not_distributed_is_warned_of(cases, world):
    first, *others = [rank_facts["forgotten"] for rank_facts in cases(*world)[1]]
    message = (
        "Adagrad.step(): no parameter of this optimizer was given to ht.distribute, so each rank trains them by its own"
    )
    assert first == [[], [f"{message} gradients"], [f"{message} gradients"]]
    assert all(rank_facts == [[], [], []] for rank_facts in others)


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_ranks_that_do_the_same_work_are_warned_of(cases, world):
    (same, apart), *others = [rank_facts["same work"] for rank_facts in cases(*world)[1]]
    assert len(same) == 1 and same[0].startswith("all ranks computed the same gradients") and apart == []
    assert all(rank_facts == [[], []] for rank_facts in others)


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_tensors_that_are_no_buffers_are_warned_of(cases, world):
    (message,), *others = [rank_facts["plain tensors"] for rank_facts in cases(*world)[1]]
    assert message.startswith(
        "1.table: tensors of the model that are not buffers, and differ between ranks; ht.distribute"
    )
    assert all(rank_facts == [] for rank_facts in others)


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_buffers_that_come_late_and_differ_are_named(cases, world):
    (message,), *others = [rank_facts["late buffers"] for rank_facts in cases(*world)[1]]
    assert message.startswith("drawn: buffers that were registered after ht.distribute, and differ between ranks;")
    assert all(rank_facts == [] for rank_facts in others)


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_caches_of_a_data_set_stay_each_ranks(cases, world):
    assert all(0 < rank_facts["own data"] < 60 for rank_facts in cases(*world)[1])


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_a_slow_rank_is_named(cases, world):
    printed = [rank_facts["slow"] for rank_facts in cases(*world)[1]]
    line = r"step \d+: rank 1 is slow: the others wait for it \d\d% of each step, [\d.]+ ms, since step \d+\n"
    assert re.search(line, printed[0]) and not any(printed[1:]), printed


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_a_barrier_waits(cases, world):
    assert all(rank_facts["waits"] == ["1.bias", "1.weight", "4.bias", "4.weight"] for rank_facts in cases(*world)[1])


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_rank_0_alone_prints_and_shows_progress(cases, world):
    size, facts = world[0], cases(*world)[1]
    (printed, bar, batches), *others = [rank_facts["main"] for rank_facts in facts]
    assert printed == f"{size} ranks, all\n" and "10/10" in bar and batches == 10
    assert all(rank_facts == ["", "", 10] for rank_facts in others)


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_sums(cases, world):
    size, facts = world[0], cases(*world)[1]
    whole = [["int", 3 * size + sum(range(size))], ["int", 10 * size]]
    exact = [["int", (2**53 + 1) * size], ["int", size], ["float", 0.5], ["float", 2.0 * size]]
    expected = [*whole, ["float", float(np.sum([0.1] * size))], *exact]
    assert all(rank_facts["sums"] == expected for rank_facts in facts)


@pytest.mark.parametrize("world", [(1, "mpirun"), *WORLDS], ids=str)
def test_a_metric_of_torchmetrics_is_of_all_ranks(cases, world):
    size, facts = world[0], cases(*world)[1]
    right = sum(rank + 1 for rank in range(size)) / sum(rank + 2 for rank in range(size))
    assert [rank_facts["library metric"] for rank_facts in facts] == [pytest.approx(right)] * size


@pytest.mark.parametrize("world", [(1, "mpirun"), *WORLDS], ids=str)
def test_sums_of_several_numbers(cases, world):
    """A tensor in, a tensor out; whole numbers stay whole, and overflow neither 8 bits nor 16."""
    size, facts = world[0], cases(*world)[1]
    counts = [sum(1 for rank in range(size) for k in range(3 + rank) if k % 3 == label) for label in range(3)]
    expected = [
        ["torch.int64", np.diag(counts).tolist()],
        ["torch.int64", [200 * size] * 2],
        ["torch.float32", torch.full((2, 2), 0.1).double().mul(size).float().tolist()],
        ["torch.float32", [60000.0 * size] * 2],
        ["torch.int64", [[size, 0]]],
        float(size), 3.0 * size, "ndarray",
        "it cannot add up a list; ht.sum; give numbers, tensors or arrays of numbers",
    ]  # fmt: skip
    assert all(rank_facts["sums of tensors"] == expected for rank_facts in facts)


ERRORS = {
    "twice": "ConfigError: this model is distributed already",
    "another's": "ConfigError: SGD holds parameters that are not the model's",
    "frozen": "ConfigError: the model has no trainable parameter",
    "rate": "ConfigError: the ranks differ.*\n  optimizer 0, group 0, lr rank 0: 0.1\n",
    "layers": "ConfigError: the ranks differ.*\n  0.weight",
    "step alone": "ConfigError: the gradients of the last backward.* were not reduced; SGD.step.*ht.no_sync",
    "added": "ConfigError: a parameter of shape .3,. was added to the model after ht.distribute",
    "sparse": "ConfigError: its gradient is sparse; weight; make its layer with sparse=False",
    "converted": "ConfigError: it is torch.float64 on cpu now, and was torch.float32 on cpu; .*call model.to",
    "counted": "ConfigError: 0: scale_grad_by_freq would count the words of each rank's batch alone; ht.distribute",
    "shortened": "ConfigError: 0: max_norm would change the vectors of each rank's words on that rank alone; ht.dis",
    "no_sync": "ConfigError: this model is not distributed; ht.no_sync",
    "option": "ConfigError: ratio: must be <= 1.0, not 2.0; ht.distribute",
    "few": "DataError: . samples are too few for . ranks; ht.shard; start fewer ranks",
    "unequal": "ConfigError: the ranks differ.*\n  samples  .*rank 0: 40",
    "split": "ConfigError: the ranks differ.*\n  data: indices .*rank 0: .*; make and split data with a seed",
    "drawn": "ConfigError: the ranks differ.*\n  data: tensors",
    "plateau": r"CommunicationError: the weights of rank.* differ from .*, first in 1.weight "
    r"\(learning rate of SGD: 0\.\d+ on rank.* 0.* and 0.1 on rank.*1.*\); backward pass 10 of the model; .*ht.sum",
    "drift": "CommunicationError: the weights of rank 1 differ from those of ranks? 0.*, first in 4.bias; .* pass 4 ",
    "gathered": "CommunicationError: the weights of rank.* differ .*, first in codes; backward pass 2 .* in a buffer",
    "gathered anew": "CommunicationError: the weights of rank.* differ .*, first in codes; backward pass 2 ",
    "moved in a pass": "CommunicationError: the weights of rank.* differ .*; the end of a pass over ht.shard; "
    "gradients of torch.autograd.grad and torch.func.grad are of this rank alone: set p.grad, and call optimizer.step",
    "moved before a sum": "CommunicationError: the weights of rank.* differ .*; ht.sum; gradients of torch.autograd",
    "graph": r"ConfigError: backward\(create_graph=True\) keeps a graph of .*; 4.bias",
    "unsorted": r"ConfigError: the ranks differ.*\n  data: classes +rank 0.*; sort what [\s\S]*  data: index ",
    "shuffled": r"CommunicationError: the ranks differ \(order of data: files in loader .*Random\(epoch\).shuffle "
    "makes equal: .*; backward pass 2 of",
    "late": r"CommunicationError: the ranks differ \(learning rate of SGD: .*\); backward pass 4 of",
    "late stream": r"CommunicationError: the weights of rank.* \(learning rate of SGD: .*\); backward pass 4 of",
    "summed clipped": "ConfigError: a second backward.* before the step would count the first one's sum .* ht.no_sync",
    "twice summed": "ConfigError: a second backward.* before the step would count the first one's sum .* ht.no_sync",
    "summed again": r"ConfigError: a gradient was replaced after backward\(\) had summed it",
    "replaced": "ConfigError: a parameter of shape .7, 32. was added to the model after ht.distribute",
    "within": r"ConfigError: the gradients of this backward\(\) are not reduced yet; SGD.step",
    "alone failed": "CommunicationError: an error ended backward.* on this rank alone",
    "mode": "ConfigError: mode='local_sgd' works only with hvd-train fit; ht.distribute; a script takes one of a",
    "damaged": "CheckpointError: it is damaged",
    "unfit": "CheckpointError: it does not fit this model: Error",
    "missing": "CheckpointError: there is no checkpoint; .*none.ckpt",
}


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_mistakes_are_raised_on_all_ranks(cases, world):
    for rank_facts in cases(*world)[1]:
        for name, pattern in ERRORS.items():
            assert rank_facts["errors"][name] and re.match(pattern, rank_facts["errors"][name]), (
                name,
                rank_facts["errors"][name],
            )
            if "the ranks differ" not in pattern:
                assert "\n" not in rank_facts["errors"][name]


UNEQUAL = (
    r"CommunicationError: the ranks' shares of a batch differ in length \((28, 27|19, 18, 18) samples\), and they "
)


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_parts_of_uneven_shares_are_warned_of_once(cases, world):
    """25 samples in parts of 6 on 2 ranks waited for 10 minutes: 3 backward passes of 13 samples, 2 of 12."""
    first, *others = [rank_facts["parts"] for rank_facts in cases(*world)[1]]
    assert len(first) == 1 and re.match(UNEQUAL.partition(" ")[2] + "split them into unequal numbers", first[0])
    assert "rank 0 calls backward() more often than rank 1; ht.shard; this is exact if parts are weighted" in first[0]
    assert all(rank_facts == [] for rank_facts in others)


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_a_loss_that_is_divided_by_a_count_of_all_ranks_is_warned_of(cases, world):
    """1.561630 in place of 1.546361: each gradient of an uneven batch was multiplied by its rank's share, too."""
    first, *others = [rank_facts["divided"] for rank_facts in cases(*world)[1]]
    what = "ht.sum before backward(), where gradients are weighted by the ranks' unequal numbers of samples; "
    fix = "if the loss is divided by this sum, use ht.distribute(average=False), and do not divide by ht.size()"
    assert first == [[what + fix], [], []] and all(rank_facts == [[], [], []] for rank_facts in others)


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_a_validation_that_each_rank_keeps_is_warned_of(cases, world):
    """Each rank printed a loss of its own, and kept another best."""
    first, *others = [rank_facts["alone"] for rank_facts in cases(*world)[1]]
    message = "a pass over this rank's part of the data made no step, and nothing was added up over ranks: "
    cure = "each rank has its own sum (add them up: loss, count = ht.sum(loss, count))"
    assert first[0] == first[4] == [message + cure]
    assert first[1:4] == [[], [], []] and all(rank_facts == [[]] * 5 for rank_facts in others)


FAULTS = {
    "raise": (1, "a fault of the user's own"),
    "kill": (None, ""),
    "exit": (None, ""),
    "rate": (2, "error[rank 0]: the ranks differ"),
}


@pytest.mark.parametrize(
    ("launcher", "kind"),
    [
        ("mpirun", "raise"),
        ("mpirun", "kill"),
        ("horovodrun", "exit"),
        ("horovodrun", "rate"),
        pytest.param("mpirun", "exit", marks=LONG),
        pytest.param("mpirun", "rate", marks=LONG),
        pytest.param("horovodrun", "raise", marks=LONG),
        pytest.param("horovodrun", "kill", marks=LONG),
    ],
)
def test_a_fault_on_one_rank_ends_the_job(tmp_path, launcher, kind):
    code, text = FAULTS[kind]
    run = launch(2, launcher, [str(HERE / "faults.py"), kind], tmp_path, SECONDS)
    assert run.returncode != 0 and "trained" not in run.stdout
    assert code in (None, run.returncode)
    assert text in run.stderr + run.stdout
    assert ("Traceback" in run.stderr) == (kind == "raise")
