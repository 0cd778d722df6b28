"""Real worlds of 1 to 4 ranks under both launchers and both frameworks, compared in float64."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ranks.cases import TRAININGS

TOLERANCE = 1e-9  # relative, in float64: another order of sums costs about 1e-14 here
FRAMEWORKS = ["pytorch", "tensorflow"]
WORLDS = [("mpirun", 2), ("horovodrun", 2), ("mpirun", 3), ("horovodrun", 3), ("mpirun", 4)]


def distance(a: dict, b: dict) -> tuple[float, str]:
    """Largest relative difference over the tensors of two trees, and where."""
    assert a.keys() == b.keys()
    return max((np.linalg.norm(a[k] - b[k]) / max(np.linalg.norm(a[k]), 1e-12), k) for k in a)


@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.parametrize(("launcher", "size"), WORLDS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_n_ranks_equal_one(worlds, framework, launcher, size, training):
    one = worlds(framework, launcher, 1).trees(training)[0]
    for tree in worlds(framework, launcher, size).trees(training):
        assert distance(one, tree)[0] < TOLERANCE, distance(one, tree)


@pytest.mark.parametrize("training", TRAININGS)
def test_pytorch_equals_keras(worlds, training):
    trees = [worlds(framework, "mpirun", 2).trees(training)[0] for framework in FRAMEWORKS]
    assert distance(*trees)[0] < TOLERANCE, distance(*trees)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("launcher", "size"), WORLDS)
def test_all_ranks_end_with_the_same_bits(worlds, framework, launcher, size):
    for training in TRAININGS:
        first, *others = worlds(framework, launcher, size).trees(training)
        for other in others:
            assert all((first[k] == other[k]).all() for k in first)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_two_ranks_give_the_same_bits_under_both_launchers(worlds, framework):
    for training in TRAININGS:
        a, b = (worlds(framework, launcher, 2).json(training)[0] for launcher in ("mpirun", "horovodrun"))
        assert a["weights_sha256"] == b["weights_sha256"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("launcher", "size"), [("", 1), *WORLDS])
def test_every_sample_counts_once(worlds, framework, launcher, size):
    results = worlds(framework, launcher, size)
    for summary in results.json("sgd"):
        assert summary["train_samples"] == 2 * 1438 + 2 * 50  # 29 steps an epoch, 60 in all
        assert summary["val_samples"] == 359
    one = worlds(framework, launcher, 1).json("evaluation")[0]
    for result in results.json("evaluation"):
        assert result["samples"] == 1438
        assert result["loss"] == pytest.approx(one["loss"], rel=1e-12)
        assert result["accuracy"] == one["accuracy"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("launcher", "size"), WORLDS)
def test_communicator_verbs(worlds, framework, launcher, size):
    for rank, out in enumerate(worlds(framework, launcher, size).json("verbs")):
        assert (out["rank"], out["size"]) == (rank, size)
        assert out["sum"] == [x * size * (size + 1) / 2 for x in range(5)]
        assert out["gather"] == [[r, r] for r in range(size) for _ in range(r + 1)]
        assert out["broadcast"] == f"from {size - 1}"
        assert out["empty"] == ""
        assert out["bytes"] == ["x" * r for r in range(size)]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("launcher", "size"), WORLDS)
@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("model", "ConfigError", ["the ranks differ", "model"]),
        ("seed", "ConfigError", ["the ranks differ", "config"]),
        ("data", "ConfigError", ["the ranks differ", "data"]),
        ("unbuildable", "ConfigError", ["no model 'nothing'"]),
    ],
)
def test_a_rank_that_differs_stops_all(worlds, framework, launcher, size, case, kind, words):
    told = worlds(framework, launcher, size).json(f"disagree-{case}")
    assert len({t["text"] for t in told}) == 1
    for t in told:
        assert (t["type"], t["common"]) == (kind, True)
        assert all(word in t["text"] for word in words)
        assert t["ranks"] == [size - 1] or f"rank {size - 1}" in t["text"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_rank_that_fails_stops_all(worlds, framework):
    told = worlds(framework, "mpirun", 2).json("one_fails")
    assert told == [{"type": "DataError", "text": "the file is gone; x.npz", "ranks": [1]}] * 2


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("launcher", "size"), WORLDS)
def test_average_of_named_weights(worlds, framework, launcher, size):
    for result in worlds(framework, launcher, size).json("average"):
        assert result["named"] < 1e-12
        assert result["others"] == 0


# ---- the border, proved by toys


@pytest.mark.parametrize("toy", ["toy-threshold", "toy-powersgd", "full-threshold", "full-powersgd", "toy-partial"])
@pytest.mark.parametrize(("launcher", "size"), [("mpirun", 2), ("mpirun", 3), ("horovodrun", 2)])
def test_both_frameworks_compress_alike(worlds, launcher, size, toy):
    trees = [worlds(framework, launcher, size).trees(toy)[0] for framework in FRAMEWORKS]
    if toy == "toy-powersgd":  # matrices lie transposed in PyTorch: another basis, the same law
        return
    assert distance(*trees)[0] < TOLERANCE, distance(*trees)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("full", ["full-threshold", "full-powersgd", "toy-partial"])
def test_a_compressor_that_drops_nothing_equals_none(worlds, framework, full):
    """Also partial synchronization of all weights after each step: for plain SGD it is gradient averaging."""
    one = worlds(framework, "", 1).trees("full-threshold")[0]
    for size in (2, 3):
        for tree in worlds(framework, "mpirun", size).trees(full):
            assert distance(one, tree)[0] < TOLERANCE, distance(one, tree)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("toy", ["toy-threshold", "toy-powersgd"])
def test_compression_keeps_what_it_drops(worlds, framework, toy):
    for result in worlds(framework, "mpirun", 2).json(toy):
        assert result["residual"] > 0
