"""Scripts with ``hvd_train.torch`` on real ranks, against one process, and their faults."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.launching import launch
from tests.limits import SECONDS
from tests.script.pytorch.cases.same import COMPILED, SAME
from tests.script.pytorch.cases.same_bits import SAME_BITS

HERE = Path(__file__).parent
TOLERANCE = 1e-9  # float64: the same maths in another order of sums


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """size -> the folder of that world's results and its ranks' facts; each is launched once."""
    done = {}

    def get(size: int):
        if size not in done:
            folder = tmp_path_factory.mktemp(f"torch{size}")
            run = launch(size, "mpirun", ["-m", "tests.script.pytorch.cases", str(folder)])
            assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-3000:]
            facts = [json.loads((folder / f"facts.{rank}.json").read_text()) for rank in range(size)]
            done[size] = folder, facts
        return done[size]

    return get


@pytest.fixture
def ranks(worlds):
    """The facts of two ranks."""
    return worlds(2)[1]


def furthest(one: Path, other: Path) -> float:
    a, b = np.load(one), np.load(other)
    assert set(a) == set(b)
    return max(float(np.abs(a[k] - b[k]).max() / max(1e-30, np.abs(a[k]).max())) for k in a if "tracked" not in k)


def test_ranks_train_as_one(worlds):
    (single, _), (folder, _) = worlds(1), worlds(2)
    distances = {name: furthest(single / f"{name}.0.npz", folder / f"{name}.0.npz") for name in SAME}
    assert max(distances.values()) < TOLERANCE, distances
    assert furthest(single / "sgd.0.npz", single / "zeros.0.npz") > 1e-3  # which is clipped


# What the guide recommends, with uneven batches: 19, 18 and 18 of 55 samples, and others.
ON_THREE = [
    "uneven", "tokens", "tokens of a batch sampler", "summed", "two loaders", "two losses", "by hand summed",
    "norm synchronized uneven", "batch sampler", "batches a step", "odd groups",
]  # fmt: skip


def distances_from_one(folder, size, launcher, names):
    """How far the weights of each case are from those of one rank."""
    for ranks in (1, size):  # a case's order of samples depends on the cases before it
        (folder / str(ranks)).mkdir()
        run = launch(ranks, launcher, ["-m", "tests.script.pytorch.cases", str(folder / str(ranks)), *names])
        assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-3000:]
    return {name: furthest(*(folder / str(ranks) / f"{name}.0.npz" for ranks in (1, size))) for name in names}


def test_three_ranks_train_as_one(tmp_path):
    distances = distances_from_one(tmp_path, 3, "horovodrun", ON_THREE)
    assert max(distances.values()) < TOLERANCE, distances


@pytest.mark.long("compiles C++ on each rank; other compilers of torch run each time")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_models_that_inductor_compiles(tmp_path):
    distances = distances_from_one(tmp_path, 2, "mpirun", [*COMPILED])
    assert max(distances.values()) < TOLERANCE, distances


def test_all_ranks_hold_the_same_bits(worlds, ranks):
    for name in SAME_BITS:
        assert len({rank[f"digest {name}"] for rank in ranks}) == 1, name
    names = ("not compressed", "fp16", "bf16", "int8", "int4", "topk", "powersgd")
    assert len({ranks[0][f"digest {name}"] for name in names}) == len(names)
    # The planted fault: without ht.distribute they differ.
    assert ranks[0]["digest apart"] != ranks[1]["digest apart"] and ranks[0]["broadcast"] == ranks[1]["broadcast"]
    distinct = ["sgd", "adam", "clip", "zeros", "scheduler", "two optimizers", "tied and frozen", "norm synchronized"]
    assert len({worlds(1)[1][0][f"digest {name}"] for name in distinct}) == len(distinct)


OVERFLOW = [[2.0, True], [1.0, False], [1.0, True]]  # the scale, and whether the step was made
CLOSE = pytest.approx(0, abs=1e-12)  # in 64 bits
FACTS = {
    "scaler": OVERFLOW,
    "scaler topk": OVERFLOW,
    # Part 0 on rank 0, part 2 on rank 1; part 1 nowhere: no gradient, and no step moves it.
    "dynamic": {"gradients": [0.5, None, 0.5], "untouched": True, "then": True},
    "resume": {"same": True, "found": {"epoch": 1, "best": float("inf")}, "left": []},
    "pickled": {"same": True, "class": True, "joined": True, "batches": 20},
    "transfers": {"plain": 3, "checkpointed": 3},
    "waits": ["1.bias", "1.weight", "4.bias", "4.weight"],
    "sums": [
        ["int", 7], ["int", 20], ["float", 0.2], ["int", (2**53 + 1) * 2], ["int", 2], ["float", 0.5], ["float", 4.0],
    ],
    "library metric": pytest.approx(3 / 5),
    # A tensor in, a tensor out; whole numbers stay whole, and overflow neither 8 bits nor 16.
    "equal generators": [48, True, 48, 48],
    "held": {
        "kept batches": [0, True],
        "restored statistics": [CLOSE, True],
        "later hooks": CLOSE,
        "held groups": [CLOSE, "torch.bool"],
        "mean and sum": [CLOSE, CLOSE],
        "reseeded": [2 * 3 * 27, 3],
    },
    "sums of tensors": [
        ["torch.int64", [[3, 0, 0], [0, 2, 0], [0, 0, 2]]],
        ["torch.int64", [400] * 2],
        ["torch.float32", torch.full((2, 2), 0.1).double().mul(2).float().tolist()],
        ["torch.float32", [120000.0] * 2],
        ["torch.int64", [[2, 0]]],
        2.0, 6.0, "ndarray", "it cannot add up a list; ht.sum; give numbers, tensors or arrays of numbers",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", FACTS)
def test_all_ranks_have(ranks, name):
    assert [rank[name] for rank in ranks] == [FACTS[name]] * 2


def test_alone_a_run_goes_on_with_the_same_bits(worlds):
    assert worlds(1)[1][0]["resume"] == FACTS["resume"]


def test_gradients_thrown_away_leave_no_trace(ranks):
    """In what a compressor keeps: not of the whole model's passes, nor of the half that a pass was not for."""
    for rank in ranks:
        for name, (without, whole, half) in rank["thrown away"].items():
            assert without == whole == half, name
        assert len(rank["thrown away"]) == len({digests[0] for digests in rank["thrown away"].values()}) == 4
        for by_optimizer, by_hand in rank["residual by hand"]:
            assert by_optimizer == by_hand


def test_statistics_are_never_compressed(worlds):
    variance = np.load(worlds(2)[0] / "norm wide.0.npz")["2.running_var"]
    assert len(variance) == 4500 and (variance > 0).all()


def batches_of(facts: list[dict], epoch: int, loader: int) -> list[list[int]]:
    """Global batches, sorted, from the ranks' batches."""
    ranks = [rank["looks"][epoch][loader] for rank in facts]
    return [sorted(i for part in parts for i in part) for parts in zip(*ranks, strict=True)]


def test_looks_of_one_rank_shift_nothing(worlds):
    """Each sample once an epoch, on one rank; other orders in each epoch, also after one left early, and loader."""
    alone, orders = (
        [batches_of(worlds(size)[1], epoch, loader) for epoch in range(4) for loader in range(2)] for size in (1, 2)
    )
    for batches in orders:
        counts = Counter(i for batch in batches for i in batch)
        assert set(counts.values()) == {1} and len(counts) == (996 if len(batches) == 83 else 51 * 12)
    assert [len(batches) for batches in orders] == [83, 83, 51, 51, 83, 83, 83, 83]
    assert len({str(batches[:51]) for batches in orders}) == 8 and orders == alone


def test_draws_differ_between_ranks_and_repeat(ranks):
    """Of torch, NumPy and random: in the loop, in a loader, in a loader's worker."""
    drawn = [rank["draws"] for rank in ranks]
    for one, again, _ in drawn:
        assert one == again
    assert one[0] != one[1]
    for place in range(3):
        for values in zip(*(np.ravel((first + [worker])[place]) for first, _, worker in drawn), strict=True):
            assert len(set(values)) == 2
    assert ranks[0]["sampled"] != ranks[1]["sampled"] and ranks[0]["masks"] != ranks[1]["masks"]


LOCAL = r"Adagrad\.step\(\): no parameter of this optimizer was given to ht\.distribute, so each rank trains them by"
DIVIDED = (
    r"ht\.sum before backward\(\), where gradients are weighted by the ranks' unequal numbers of samples; if the loss "
    r"is divided by this sum, use ht\.distribute\(average=False\), and do not divide by ht\.size\(\)"
)
ALONE = (
    r"a pass over this rank's part of the data made no step, and nothing was added up over ranks: each rank has its "
    r"own sum \(add them up: loss, count = ht\.sum\(loss, count\)\)"
)
# What rank 0 is warned of in each of several trainings; rank 1 never is.
WARNED = {
    "forgotten": [[], [LOCAL], [LOCAL]],
    "same work": [["all ranks computed the same gradients"], []],
    "plain tensors": [
        [r"1\.table: tensors of the model that are not buffers, and differ between ranks; ht\.distribute"]
    ],
    "late buffers": [["drawn: buffers that were registered after ht.distribute, and differ between ranks;"]],
    # 25 samples in parts of 6 on 2 ranks waited for 10 minutes: 3 backward passes of 13 samples, 2 of 12.
    "parts": [
        [
            r"the ranks' shares of a batch differ in length \(28, 27 samples\), and they split them into unequal "
            r"numbers.*rank 0 calls backward\(\) more often than rank 1; ht\.shard; this is exact if parts are weighted"
        ]
    ],
    # 1.561630 in place of 1.546361: each gradient of an uneven batch was multiplied by its rank's share, too.
    "divided": [[DIVIDED], [], []],
    # Each rank printed a loss of its own, and kept another best.
    "alone": [[ALONE], [], [], [], [ALONE]],
}


@pytest.mark.parametrize("name", WARNED)
def test_rank_0_is_warned(ranks, name):
    first, other = ([rank[name]] if len(WARNED[name]) == 1 else rank[name] for rank in ranks)
    assert list(map(len, first)) == list(map(len, WARNED[name])) and not any(other), first
    for messages, patterns in zip(first, WARNED[name], strict=True):
        assert all(map(re.match, patterns, messages)), messages


def test_caches_of_a_data_set_stay_each_ranks(ranks):
    assert all(0 < rank["own data"] < 60 for rank in ranks)


def test_a_slow_rank_is_named(ranks):
    line = r"step \d+: rank 1 is slow: the others wait for it \d\d% of each step, [\d.]+ ms, since step \d+\n"
    assert re.search(line, ranks[0]["slow"]) and not ranks[1]["slow"], ranks[0]["slow"]


def test_rank_0_alone_prints_and_shows_progress(ranks):
    printed, bar, batches = ranks[0]["main"]
    assert printed == "2 ranks, all\n" and "10/10" in bar and batches == 10 and ranks[1]["main"] == ["", "", 10]


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
    "gradients of torch.autograd.grad and torch.func.grad are of this rank alone: set p.grad before the step",
    "moved before a sum": "CommunicationError: the weights of rank.* differ .*; ht.sum; gradients of torch.autograd",
    "unequal closure": "ConfigError: the closure adds up losses of even and uneven batches, .*; LBFGS; set drop_last",
    "in a hook": "CommunicationError: the weights of rank.* differ .*; ht.sum; gradients of torch.autograd",
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
    "taken": "ConfigError: a hook of yours has set the gradient to None before .*; weight; call step",
    "within": r"ConfigError: the gradients of this backward\(\) are not reduced yet; SGD.step",
    "alone failed": "CommunicationError: an error ended backward.* on this rank alone",
    "mode": "ConfigError: mode='local_sgd' works only with hvd-train fit; ht.distribute; a script takes one of a",
    "damaged": "CheckpointError: it is damaged",
    "unfit": "CheckpointError: it does not fit this model: Error",
    "missing": "CheckpointError: there is no checkpoint; .*none.ckpt",
    "parts clipped": r"CommunicationError: the ranks' shares .*: rank 1 has changed its gradients, and .* backward",
    "parts joined": r"CommunicationError: the ranks' shares .*: forward with sync_batchnorm on rank 0, optimizer.step",
    "parts stepped": r"CommunicationError: the ranks' shares .*: backward\(\) on rank 0, the next batch on rank 1; ht",
}


@pytest.mark.parametrize("name", ERRORS)
def test_mistakes_are_raised_on_all_ranks(ranks, name):
    for rank in ranks:
        message = rank["errors"][name]
        assert message and re.match(ERRORS[name], message), message
        assert "\n" not in message or "the ranks differ" in ERRORS[name]


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
    ],
)
def test_a_fault_on_one_rank_ends_the_job(tmp_path, launcher, kind):
    code, text = FAULTS[kind]
    run = launch(2, launcher, [str(HERE / "faults.py"), kind], tmp_path, SECONDS)
    assert run.returncode != 0 and "trained" not in run.stdout
    assert code in (None, run.returncode)
    assert text in run.stderr + run.stdout
    assert ("Traceback" in run.stderr) == (kind == "raise")
