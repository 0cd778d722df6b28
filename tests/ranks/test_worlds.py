"""Real worlds of 1 to 4 ranks under both launchers and both frameworks, compared in float64."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.ranks.cases import (
    AVERAGED,
    COMPRESSED,
    DELAYED,
    EVERY_SIZE,
    FULL,
    LARGEST,
    LOOSE,
    MIXED,
    RESHARDED,
    SHARDED,
    TRAININGS,
    TWO_PHASE,
)

TOLERANCE = 1e-9  # relative, in float64: another order of sums costs about 1e-14 here
FRAMEWORKS = ["pytorch", "tensorflow"]
LONG = pytest.mark.long("the other launcher on as many ranks; test_launchers compares the bits of both in every run")
# TensorFlow traces each case on each rank.
FEW = pytest.mark.long("fewer ranks run these in every run, and more of them show no other way through")
EVERY = [("mpirun", 2, ()), ("horovodrun", 2, LONG), ("mpirun", 3, LONG), ("horovodrun", 3, ()), ("mpirun", 4, ())]


def worlds_of(framework: str, name: str, *more: str) -> list:
    """(*more, launcher, size) of the worlds for a test of the case ``name``; which of them are long."""
    largest = LARGEST[framework] if name in EVERY_SIZE else 2
    return [pytest.param(*more, *world, marks=mark or (FEW if world[1] > largest else ())) for *world, mark in EVERY]


WORLDS, FEWER = ([one for f in FRAMEWORKS for one in worlds_of(f, name, f)] for name in ("sgd", "topk"))
BOTH, BOTH_FEWER = (worlds_of("tensorflow", name) for name in ("sgd", "topk"))
GRID = [one for training in TRAININGS for f in FRAMEWORKS for one in worlds_of(f, training, training, f)]
ALONE = [(framework, "", 1) for framework in FRAMEWORKS]


def distance(a: dict, b: dict) -> tuple[float, str]:
    """Largest relative difference over the tensors of two trees, and where."""
    assert a.keys() == b.keys()
    return max((np.linalg.norm(a[k] - b[k]) / max(np.linalg.norm(a[k]), 1e-12), k) for k in a)


@pytest.mark.parametrize(("training", "framework", "launcher", "size"), GRID)
def test_n_ranks_equal_one(worlds, framework, launcher, size, training):
    one = worlds(framework, launcher, 1).trees(training)[0]
    for tree in worlds(framework, launcher, size).trees(training):
        assert distance(one, tree)[0] < TOLERANCE, distance(one, tree)


@pytest.mark.parametrize(("framework", "launcher", "size"), [*ALONE, *FEWER])
def test_a_sharded_optimizer_moves_weights_and_slots_as_a_whole_one(worlds, framework, launcher, size):
    world = worlds(framework, launcher, size)
    for training, sharded in SHARDED.items():
        for tree in world.trees(sharded):
            assert distance(world.trees(training)[0], tree)[0] < TOLERANCE, distance(world.trees(training)[0], tree)


@pytest.mark.parametrize(("framework", "launcher", "size"), [*ALONE, *FEWER])
def test_a_run_goes_on_with_a_sharded_optimizer_and_back(worlds, framework, launcher, size):
    world = worlds(framework, launcher, size)
    for name in RESHARDED:
        for tree in world.trees(f"{name}-rest"):
            assert distance(world.trees("adam-short")[0], tree)[0] < TOLERANCE


@pytest.mark.parametrize("training", TRAININGS)
def test_pytorch_equals_keras(worlds, training):
    trees = [worlds(framework, "mpirun", 2).trees(training)[0] for framework in FRAMEWORKS]
    assert distance(*trees)[0] < TOLERANCE, distance(*trees)


@pytest.mark.parametrize(("framework", "launcher", "size"), FEWER)
def test_tasks_tell_the_same_in_every_world(worlds, framework, launcher, size):
    """What labels leave out counts on no rank; names are those of the task."""
    names = {"masked": ["loss", "accuracy"], "curves": ["loss", "weighted", "mse", "r2"]}
    names["words"] = ["loss", "next_loss", "words_loss", "words_accuracy", "words_f1"]
    for training, own in names.items():
        one = worlds("pytorch", "", 1).json(training)[0]
        assert [key[4:] for key in one if key.startswith("val_") and key != "val_samples"] == own
        for other in worlds(framework, launcher, size).json(training):
            assert all(other[f"val_{name}"] == pytest.approx(one[f"val_{name}"], rel=TOLERANCE) for name in own)


@pytest.mark.parametrize(("framework", "launcher", "size"), WORLDS)
def test_batch_normalization_apart_depends_on_the_world(worlds, framework, launcher, size):
    """Or the test of "norm" could not fail; running statistics are equal on all ranks all the same."""
    one, other = (worlds(framework, launcher, n).trees("norm-apart") for n in (1, size))
    assert distance(one[0], other[0])[0] > 1e-3
    assert {"statistics|norm.mean", "statistics|norm.variance"} <= one[0].keys()
    assert all((other[0][k] == tree[k]).all() for tree in other for k in tree)
    assert distance(worlds(framework, launcher, 1).trees("norm")[0], one[0])[0] < TOLERANCE, "one rank is whole"
    fixed = worlds(framework, launcher, 1).trees("norm-fixed")[0]
    assert not fixed["statistics|norm.mean"].any() and (fixed["statistics|norm.variance"] == 1).all()


@pytest.mark.parametrize(("launcher", "size"), BOTH)
def test_batch_normalization_apart_is_the_same_in_both_frameworks(worlds, launcher, size):
    trees = [worlds(framework, launcher, size).trees("norm-apart")[0] for framework in FRAMEWORKS]
    assert distance(*trees)[0] < TOLERANCE, distance(*trees)


@pytest.mark.parametrize(("training", "framework", "launcher", "size"), GRID)
def test_all_ranks_end_with_the_same_bits(worlds, training, framework, launcher, size):
    first, *others = worlds(framework, launcher, size).trees(training)
    for other in others:
        assert all((first[k] == other[k]).all() for k in first)


@pytest.mark.parametrize(("launcher", "size"), BOTH_FEWER)
def test_steps_of_one_call_give_the_same_bits(worlds, launcher, size):
    results = worlds("tensorflow", launcher, size)
    for one, four in zip(results.json("steps-1"), results.json("steps-4"), strict=True):
        assert one["weights_sha256"] == four["weights_sha256"] and one["residual"] == four["residual"]


@pytest.mark.parametrize(("launcher", "size"), BOTH_FEWER)
def test_ranks_that_group_their_steps_apart_still_meet(worlds, launcher, size):
    one = worlds("tensorflow", launcher, 1).json("calls")[0]
    first, *others = worlds("tensorflow", launcher, size).json("calls")
    assert all(other == first for other in others)
    assert first == pytest.approx(one, rel=TOLERANCE)


@pytest.mark.parametrize(("launcher", "size"), BOTH_FEWER)
def test_ranks_that_group_their_steps_apart_meet_where_counts_are_data(worlds, launcher, size):
    """The counts of a step travel before it: a rank that still owed the step before would be waited for, for ever."""
    results = worlds("tensorflow", launcher, size)
    for usual, apart in zip(results.json("words"), results.json("words-calls"), strict=True):
        assert apart["weights_sha256"] == usual["weights_sha256"]


@LONG
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_two_ranks_give_the_same_bits_under_both_launchers(worlds, framework):
    for training in TRAININGS:
        a, b = (worlds(framework, launcher, 2).json(training)[0] for launcher in ("mpirun", "horovodrun"))
        assert a["weights_sha256"] == b["weights_sha256"]


@pytest.mark.parametrize(("framework", "launcher", "size"), [*ALONE, *WORLDS])
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


@pytest.mark.parametrize(("framework", "launcher", "size"), [*ALONE, *WORLDS])
def test_metrics_of_the_order_of_all_outputs_are_those_of_scikit_learn(worlds, framework, launcher, size):
    metrics = pytest.importorskip("sklearn.metrics")
    ranks = worlds(framework, launcher, size).json("evaluation-areas")
    z, y = (np.concatenate([one[name] for one in ranks]) for name in ("outputs", "labels"))
    assert len(z) == 200
    for one in ranks:
        assert one["auc"] == pytest.approx(metrics.roc_auc_score(y, z), rel=1e-12)
        assert one["average_precision"] == pytest.approx(metrics.average_precision_score(y, z), rel=1e-12)
        assert one["f1"] == pytest.approx(metrics.f1_score(y, z > 0), rel=1e-12)
        assert one["accuracy"] == pytest.approx(metrics.accuracy_score(y, z > 0), rel=1e-12)


@pytest.mark.parametrize(("framework", "launcher", "size"), WORLDS)
def test_communicator_verbs(worlds, framework, launcher, size):
    for rank, out in enumerate(worlds(framework, launcher, size).json("verbs")):
        assert (out["rank"], out["size"]) == (rank, size)
        assert out["sum"] == [x * size * (size + 1) / 2 for x in range(5)]
        assert out["gather"] == [[r, r] for r in range(size) for _ in range(r + 1)]
        assert out["broadcast"] == f"from {size - 1}"
        assert out["large"]
        assert out["empty"] == ""
        assert out["bytes"] == ["x" * r for r in range(size)]
        assert all(out[f"{name} {whole}"] for name in ("gathered", "nothing") for whole in (True, False))
        assert out["mean"] == [[["mixed"], True, (size - 1) / 2]] * 3


@pytest.mark.parametrize(("framework", "launcher", "size"), WORLDS)
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


@pytest.mark.parametrize(("framework", "launcher", "size"), WORLDS)
def test_average_of_named_weights(worlds, framework, launcher, size):
    for result in worlds(framework, launcher, size).json("average"):
        assert result["named"] < 1e-12
        assert result["others"] == 0


@pytest.mark.parametrize(("framework", "launcher", "size"), [*ALONE, *WORLDS])
def test_parts_go_to_their_ranks_and_are_added_in_rank_order(worlds, framework, launcher, size):
    """In uneven parts, up to 64 MiB; 3 and 4 ranks take the largest with --long."""
    for name in ["shards", "shards-traced"] if framework == "tensorflow" else ["shards"]:
        for out in worlds(framework, launcher, size).json(name):
            assert out["tensors"] >= 15 and not out["wrong"]


# ---- compression


@pytest.mark.parametrize(("framework", "launcher", "size"), [*ALONE, *WORLDS])
def test_two_phases_have_the_bits_of_ranks_that_are_threads(worlds, framework, launcher, size):
    """In both frameworks, eagerly and in a graph, over every link, with parts that are uneven or empty."""
    for name in ["two-phase", "two-phase-traced"] if framework == "tensorflow" else ["two-phase"]:
        assert worlds(framework, launcher, size).json(name) == [{"wrong": []}] * size


@pytest.mark.parametrize("name", TWO_PHASE)
@pytest.mark.parametrize(("framework", "launcher", "size"), [*ALONE, *FEWER])
def test_two_phases_with_all_that_is_between_gradients_and_weights(worlds, framework, launcher, size, name):
    """Accumulation, clipping and uneven parts; an optimizer that is divided: equal ranks, and a resume to the bit."""
    results = worlds(framework, launcher, size)
    first, *others = results.trees(name)
    for tree in [*others, *results.trees(f"{name}-rest")]:
        assert all((first[k] == tree[k]).all() for k in first)
    for whole, rest in zip(results.json(name), results.json(f"{name}-rest"), strict=True):
        assert whole["residual"] == rest["residual"] > 0


@pytest.mark.parametrize(("launcher", "size"), worlds_of("pytorch", "int8-overlap"))
def test_overlap_gives_the_same_bits_in_two_phases(worlds, launcher, size):
    results = worlds("pytorch", launcher, size)
    for plain, overlapped in zip(results.trees("int8-no-overlap"), results.trees("int8-overlap"), strict=True):
        assert all((plain[k] == overlapped[k]).all() for k in plain)


@pytest.mark.parametrize(("framework", "launcher", "size"), FEWER)
@pytest.mark.parametrize("full", FULL)
def test_what_leaves_nothing_out_equals_plain_gradients(worlds, framework, launcher, size, full):
    """Also "partial" of everything, and "local_sgd" of one step: each rank's own step, then the mean of all weights."""
    one = worlds(framework, "", 1).trees("plain")[0]
    for tree in worlds(framework, launcher, size).trees(full):
        assert distance(one, tree)[0] < TOLERANCE, distance(one, tree)


@pytest.mark.parametrize("name", COMPRESSED)
@pytest.mark.parametrize(("framework", "launcher", "size"), FEWER)
def test_compressed_ranks_stay_equal_near_the_plain_run_and_keep_a_residual(worlds, framework, launcher, size, name):
    results = worlds(framework, launcher, size)
    first, *others = results.trees(name)
    for other in others:
        assert all((first[k] == other[k]).all() for k in first)
    plain = results.trees("plain")[0]
    assert 0 < distance(first, plain)[0] < {"fp16": 1e-3, "bf16": 1e-2, "int8": 2e-2}.get(name, 0.8), (
        "it compresses, and it learns"
    )
    assert all(result["residual"] > 0 for result in results.json(name))


@pytest.mark.parametrize("name", [*COMPRESSED, *LOOSE, *DELAYED, *AVERAGED, "norm-swa"])
@pytest.mark.parametrize(("framework", "launcher", "size"), [*ALONE, *FEWER])
def test_a_compressed_run_resumes_bit_for_bit(worlds, framework, launcher, size, name):
    results = worlds(framework, launcher, size)
    for whole, rest in zip(results.trees(name), results.trees(f"{name}-rest"), strict=True):
        assert all((whole[k] == rest[k]).all() for k in whole)
    for whole, rest in zip(results.json(name), results.json(f"{name}-rest"), strict=True):
        assert whole["residual"] == rest["residual"]


@pytest.mark.parametrize(("framework", "launcher", "size"), [*ALONE, *FEWER])
def test_weights_that_are_trained_later_come_to_the_same_bits_wherever_the_run_was_left(
    worlds, framework, launcher, size
):
    results = worlds(framework, launcher, size)
    for whole, rest in zip(results.trees("later"), results.trees("later-rest"), strict=True):
        assert all((whole[k] == rest[k]).all() for k in whole)
    wholes, rests = results.json("later"), results.json("later-rest")
    assert all(whole["residual"] == rest["residual"] > 0 for whole, rest in zip(wholes, rests, strict=True))
    assert "slots|momentum|fc2.kernel" in results.trees("later-5")[0]
    assert "slots|momentum|fc2.kernel" not in results.trees("later-3")[0]


@pytest.mark.parametrize(("framework", "launcher", "size"), [*ALONE, *FEWER])
def test_an_optimizer_of_the_user_moves_as_on_one_rank_and_goes_on_to_the_same_bits(worlds, framework, launcher, size):
    results = worlds(framework, launcher, size)
    one = worlds(framework, "", 1).trees("own-optimizer")[0]
    for whole, rest in zip(results.trees("own-optimizer"), results.trees("own-optimizer-rest"), strict=True):
        assert distance(one, whole)[0] < TOLERANCE, distance(one, whole)
        assert all((whole[k] == rest[k]).all() for k in whole)


@pytest.mark.parametrize("name", ["fp16", "bf16", "int8", "int4", "threshold", "topk"])
@pytest.mark.parametrize(("launcher", "size"), BOTH_FEWER)
def test_compression_is_the_same_in_both_frameworks(worlds, launcher, size, name):
    """All but PowerSGD, which works on transposed matrices."""
    trees = [worlds(framework, launcher, size).trees(name)[0] for framework in FRAMEWORKS]
    # A last bit in 64 bits may fall on the other side of a half-precision number, 2^-11 away, or of a level of int8.
    limits = {"fp16": 1e-3, "bf16": 1e-2, "int8": 1e-2, "int4": 0.1}
    assert distance(*trees)[0] < limits.get(name, TOLERANCE), distance(*trees)


@pytest.mark.parametrize(("framework", "launcher", "size"), [*ALONE, *FEWER])
def test_gradients_under_way_are_equal_on_all_ranks_and_left_behind_by_another_mode(worlds, framework, launcher, size):
    results = worlds(framework, launcher, size)
    plain = {k: x for k, x in results.trees("plain")[0].items() if k.startswith("weights")}
    for name in (*DELAYED, "late-mixed", "from-delayed-rest", "to-delayed-rest"):
        first, *others = results.trees(name)
        assert all((first[k] == other[k]).all() for other in others for k in first)
        assert first.get("under_way|steps", 0) == (0 if name == "from-delayed-rest" else 2)
        assert 0 < distance(plain, {k: first[k] for k in plain})[0] < 0.9


@pytest.mark.parametrize("name", LOOSE)
@pytest.mark.parametrize(("framework", "launcher", "size"), FEWER)
def test_weights_that_went_apart_end_together(worlds, framework, launcher, size, name):
    first, *others = worlds(framework, launcher, size).trees(name)
    weights = [k for k in first if k.startswith("weights")]
    assert all((first[k] == other[k]).all() for other in others for k in weights)
    assert any((first[k] != other[k]).any() for other in others for k in first), "their slots stay apart"
    one = worlds(framework, launcher, 1).trees(name)[0]
    assert 0 < distance({k: one[k] for k in weights}, {k: first[k] for k in weights})[0] < 0.5


@pytest.mark.parametrize("name", [name for name in LOOSE if LOOSE[name]["mode"] in ("outer", "streaming")])
@pytest.mark.parametrize(("launcher", "size"), BOTH_FEWER)
def test_outer_steps_are_the_same_in_both_frameworks(worlds, launcher, size, name):
    trees = [worlds(framework, launcher, size).trees(name)[0] for framework in FRAMEWORKS]
    assert distance(*trees)[0] < TOLERANCE, distance(*trees)


@pytest.mark.parametrize(("framework", "launcher", "size"), FEWER)
def test_the_compression_error_is_told_and_changes_nothing(worlds, framework, launcher, size):
    results = worlds(framework, launcher, size)
    for plain, watched in zip(results.trees("topk"), results.trees("watched"), strict=True):
        assert all((plain[k] == watched[k]).all() for k in plain)
    told = results.json("watched")[0]["compression_error"]
    assert [row["step"] for row in told] == [0, 3, 6]
    assert all(0.1 < row["cosine"] < 0.9999 and 0 < row["bytes"] < 0.6 * row["bytes_plain"] for row in told)
    assert told[0]["bytes_plain"] == 8 * (64 * 96 + 96 + 96 * 10 + 10)


@pytest.mark.parametrize(("framework", "launcher", "size"), FEWER)
def test_auto_takes_the_same_on_all_ranks(worlds, framework, launcher, size):
    first, *others = worlds(framework, launcher, size).trees("auto")
    assert all((first[k] == other[k]).all() for other in others for k in first)


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize(("framework", "launcher", "size"), [*ALONE, *FEWER])
def test_16_bits_stay_near_and_equal_on_all_ranks(worlds, framework, launcher, size, name):
    results = worlds(framework, launcher, size)
    first, *others = results.trees(name)
    assert all((first[k] == other[k]).all() for other in others for k in first)
    assert all(x.dtype == np.float32 for k, x in first.items() if k.startswith("weights"))
    whole = worlds(framework, "", 1).trees("plain")[0]
    assert 1e-7 < distance(whole, first)[0] < (0.8 if "topk" in name else 0.02)


@pytest.mark.parametrize(("framework", "launcher", "size"), [*ALONE, *FEWER])
def test_an_overflow_on_one_rank_is_left_out_by_all(worlds, framework, launcher, size):
    for result in worlds(framework, launcher, size).json("overflow"):
        assert result == {"steps": [[False, True], [True, False]], "finite": True}


@pytest.mark.parametrize(("framework", "launcher", "size"), WORLDS)
def test_adasum_or_a_clear_error(worlds, framework, launcher, size):
    for result in worlds(framework, launcher, size).json("adasum-verb"):
        if size == 3:
            assert "exchange.op: adasum does not go with 3 ranks" in result["text"] and result["common"]
        elif launcher == "horovodrun":
            assert "exchange.op: adasum does not go with ranks started with Gloo" in result["text"] and result["common"]
        else:
            a, b = np.array([1.0, 2.0, 3.0]), np.array([-2.0, 0.5, 4.0])
            joined = a * (1 - a @ b / (2 * a @ a)) + b * (1 - a @ b / (2 * b @ b))
            np.testing.assert_allclose(result["found"], joined, rtol=1e-12)


@pytest.mark.parametrize(("launcher", "size"), worlds_of("pytorch", "overlap"))
def test_overlap_gives_the_same_bits(worlds, launcher, size):
    results = worlds("pytorch", launcher, size)
    for case in ("", "changing-"):
        for plain, overlapped in zip(results.trees(f"{case}no-overlap"), results.trees(f"{case}overlap"), strict=True):
            assert all((plain[k] == overlapped[k]).all() for k in plain)
    first, *others = results.trees("changing-overlap")
    assert all((first[k] == other[k]).all() for other in others for k in first)


# ---- dropout


@pytest.mark.parametrize(("framework", "launcher", "size"), FEWER)
def test_masks_differ_between_ranks_and_repeat_with_their_seed(worlds, framework, launcher, size):
    own, again, of_rank_0 = zip(*(r["losses"] for r in worlds(framework, launcher, size).json("masks")), strict=True)
    assert len(set(own)) == size and own == again and set(of_rank_0) == {own[0]}


@pytest.mark.parametrize(("framework", "launcher", "size"), [*ALONE, *FEWER])
def test_training_with_dropout_resumes_bit_for_bit(worlds, framework, launcher, size):
    results = worlds(framework, launcher, size)
    first, *others = results.trees("dropout")
    for tree in [*others, *results.trees("dropout-rest")]:
        assert all((first[k] == tree[k]).all() for k in first)
    one = worlds(framework, "", 1).trees("dropout")[0]
    assert size == 1 or distance(one, first)[0] > 1e-6, "its masks are those of the ranks"


@pytest.mark.parametrize(("framework", "launcher", "size"), FEWER)
def test_a_run_goes_on_with_another_precision_or_exchange(worlds, framework, launcher, size):
    """No loss scale and no residual of the one before stays; the exchange is the one that is asked for now."""
    world = worlds(framework, launcher, size)
    plain = world.trees("plain")[0]
    for name, wanted in (
        ("from-16-mixed", "none"),
        ("to-16-mixed", "none"),
        ("to-32", "topk"),
        ("from-topk", "none"),
        ("to-threshold", ""),
    ):
        trees = world.trees(f"{name}-rest")
        assert all((trees[0][k] == tree[k]).all() for tree in trees for k in tree if k.startswith("weights"))
        assert distance(trees[0], plain)[0] < (0.02 if "mixed" in name else 0.5), (name, distance(trees[0], plain))
        about = json.loads((world.folder / f"{name}-cut" / "environment.json").read_text())
        assert about["compression"] == (wanted or "threshold")
    assert all(result["residual"] == 0 for result in world.json("from-topk-rest"))
    assert all(result["residual"] > 0 for name in ("to-threshold", "to-32") for result in world.json(f"{name}-rest"))
