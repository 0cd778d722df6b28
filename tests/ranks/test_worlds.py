"""Real worlds of 1 to 4 ranks under both launchers and both frameworks, compared in float64."""

from __future__ import annotations

import json
import platform

import numpy as np
import pytest

from tests.ranks.cases import (
    COMPRESSED,
    DELAYED,
    EVERY_SIZE,
    FULL,
    LARGEST,
    LOOSE,
    MIXED,
    RESHARDED,
    RESUMED,
    SHARDED,
    TRAININGS,
    TWO_PHASE,
)

TOLERANCE = 1e-9  # relative, in float64: another order of sums costs about 1e-14 here
FRAMEWORKS = ["pytorch", "tensorflow"]
LAUNCHERS = {1: "", 2: "mpirun", 3: "horovodrun", 4: "mpirun"}
WORLDS = [(framework, size) for framework in FRAMEWORKS for size in range(2, LARGEST[framework] + 1)]
GRID = [(name, *world) for name in TRAININGS for world in WORLDS if world[1] == 2 or name in EVERY_SIZE]
of_each = pytest.mark.parametrize("framework", FRAMEWORKS)
of_each_and_alone = pytest.mark.parametrize(("framework", "size"), [(f, size) for f in FRAMEWORKS for size in (1, 2)])
of_all_worlds = pytest.mark.parametrize(("framework", "size"), WORLDS)


@pytest.fixture
def world(worlds):
    return lambda framework, size: worlds(framework, LAUNCHERS[size], size)


def distance(a: dict, b: dict) -> tuple[float, str]:
    """Largest relative difference over the tensors of two trees, and where."""
    assert a.keys() == b.keys()
    return max((np.linalg.norm(a[k] - b[k]) / max(np.linalg.norm(a[k]), 1e-12), k) for k in a)


def near(a: dict, b: dict) -> bool:
    assert distance(a, b)[0] < TOLERANCE, distance(a, b)
    return True


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all((a[k] == b[k]).all() for k in a)


@pytest.mark.parametrize(("training", "framework", "size"), GRID)
def test_n_ranks_equal_one_and_end_with_the_same_bits(world, framework, size, training):
    (one,) = world(framework, 1).trees(training)
    first, *others = world(framework, size).trees(training)
    assert near(one, first) and all(same(first, other) for other in others)


@of_each
def test_a_sharded_optimizer_moves_weights_and_slots_as_a_whole_one(world, framework):
    one = world(framework, 1)
    assert all(near(one.trees(whole)[0], one.trees(sharded)[0]) for whole, sharded in SHARDED.items())


@of_each_and_alone
def test_a_run_goes_on_with_a_sharded_optimizer_and_back(world, framework, size):
    results = world(framework, size)
    for name in RESHARDED:
        assert all(near(results.trees("adam-short")[0], tree) for tree in results.trees(f"{name}-rest"))


@pytest.mark.parametrize("training", [*TRAININGS, "norm-apart"])
def test_pytorch_equals_keras(world, training):
    assert near(*(world(framework, 2).trees(training)[0] for framework in FRAMEWORKS))


@of_each
def test_tasks_tell_the_same_in_every_world(world, framework):
    """What labels leave out counts on no rank; names are those of the task."""
    names = {"masked": ["loss", "accuracy"], "curves": ["loss", "weighted", "mse", "r2"]}
    names["words"] = ["loss", "next_loss", "words_loss", "words_accuracy", "words_f1"]
    for training, own in names.items():
        one = world("pytorch", 1).json(training)[0]
        assert [key[4:] for key in one if key.startswith("val_") and key != "val_samples"] == own
        for other in world(framework, 2).json(training):
            assert all(other[f"val_{name}"] == pytest.approx(one[f"val_{name}"], rel=TOLERANCE) for name in own)


@of_all_worlds
def test_batch_normalization_apart_depends_on_the_world(world, framework, size):
    """Or the test of "norm" could not fail; running statistics are equal on all ranks all the same."""
    (one,), (first, *others) = (world(framework, n).trees("norm-apart") for n in (1, size))
    assert distance(one, first)[0] > 1e-3 and all(same(first, other) for other in others)
    assert {"statistics|norm.mean", "statistics|norm.variance"} <= one.keys()
    assert near(world(framework, 1).trees("norm")[0], one), "one rank is whole"
    fixed = world(framework, 1).trees("norm-fixed")[0]
    assert not fixed["statistics|norm.mean"].any() and (fixed["statistics|norm.variance"] == 1).all()


def test_steps_of_one_call_give_the_same_bits(world):
    results = world("tensorflow", 2)
    for one, four in zip(results.json("steps-1"), results.json("steps-4"), strict=True):
        assert one["weights_sha256"] == four["weights_sha256"] and one["residual"] == four["residual"]


def test_ranks_that_group_their_steps_apart_still_meet(world):
    """Also where the counts of a step travel before it: a rank that still owed the step before would be waited for, for
    ever."""
    one = world("tensorflow", 1).json("norm-calls")[0]
    results = world("tensorflow", 2)
    first, other = results.json("norm-calls")
    assert other == first == pytest.approx(one, rel=TOLERANCE)
    for usual, apart in zip(results.json("words"), results.json("words-calls"), strict=True):
        assert apart["weights_sha256"] == usual["weights_sha256"]


@of_all_worlds
def test_every_sample_counts_once(world, framework, size):
    one = world(framework, 1).json("sgd")[0]
    for summary in world(framework, size).json("sgd"):
        assert summary["train_samples"] == 2 * 1438 + 2 * 50  # 29 steps an epoch, 60 in all
        assert summary["val_samples"] == 359 and summary["val_accuracy"] == one["val_accuracy"]
        assert summary["val_loss"] == pytest.approx(one["val_loss"], rel=TOLERANCE)


@of_all_worlds
def test_metrics_of_the_order_of_all_outputs_are_those_of_scikit_learn(world, framework, size):
    metrics = pytest.importorskip("sklearn.metrics")
    ranks = world(framework, size).json("evaluation-areas")
    z, y = (np.concatenate([one[name] for one in ranks]) for name in ("outputs", "labels"))
    assert len(z) == 200
    for one in ranks:
        assert one["auc"] == pytest.approx(metrics.roc_auc_score(y, z), rel=1e-12)
        assert one["average_precision"] == pytest.approx(metrics.average_precision_score(y, z), rel=1e-12)
        assert one["f1"] == pytest.approx(metrics.f1_score(y, z > 0), rel=1e-12)
        assert one["accuracy"] == pytest.approx(metrics.accuracy_score(y, z > 0), rel=1e-12)


@of_all_worlds
def test_communicator_verbs(world, framework, size):
    for rank, out in enumerate(world(framework, size).json("verbs")):
        assert (out["rank"], out["size"]) == (rank, size)
        assert out["sum"] == [x * size * (size + 1) / 2 for x in range(5)]
        assert out["gather"] == [[r, r] for r in range(size) for _ in range(r + 1)]
        assert out["broadcast"] == f"from {size - 1}"
        assert out["large"]
        assert out["empty"] == ""
        assert out["bytes"] == ["x" * r for r in range(size)]
        assert all(out[f"{name} {whole}"] for name in ("gathered", "nothing") for whole in (True, False))
        assert out["mean"] == [[["mixed"], True, (size - 1) / 2]] * 3


@of_all_worlds
def test_a_rank_that_differs_stops_all(world, framework, size):
    for case, words in (
        ("model", ["the ranks differ", "model"]),
        ("seed", ["the ranks differ", "config"]),
        ("data", ["the ranks differ", "data"]),
        ("unbuildable", ["no model 'nothing'"]),
    ):
        told = world(framework, size).json(f"disagree-{case}")
        assert len({t["text"] for t in told}) == 1
        for t in told:
            assert (t["type"], t["common"]) == ("ConfigError", True)
            assert all(word in t["text"] for word in words)
            assert t["ranks"] == [size - 1] or f"rank {size - 1}" in t["text"]


@of_all_worlds
def test_parts_go_to_their_ranks_and_are_added_in_rank_order(world, framework, size):
    """In uneven parts; on two ranks up to 64 MiB."""
    for name in ["shards", "shards-traced"] if framework == "tensorflow" else ["shards"]:
        for out in world(framework, size).json(name):
            assert out["tensors"] >= 15 and not out["wrong"]


# ---- compression


@of_all_worlds
def test_two_phases_have_the_bits_of_ranks_that_are_threads(world, framework, size):
    """In both frameworks, eagerly and in a graph, over every link, with parts that are uneven or empty."""
    for name in ["two-phase", "two-phase-traced"] if framework == "tensorflow" else ["two-phase"]:
        assert world(framework, size).json(name) == [{"wrong": []}] * size


@pytest.mark.parametrize("full", FULL)
@of_each
def test_what_leaves_nothing_out_equals_plain_gradients(world, framework, full):
    """Also "local_sgd" of one step: each rank's own step, then the mean of all weights."""
    assert near(world(framework, 1).trees("plain")[0], world(framework, 2).trees(full)[0])


@pytest.mark.parametrize("name", COMPRESSED)
@of_each
def test_compressed_ranks_stay_equal_near_the_plain_run_and_keep_a_residual(world, framework, name):
    results = world(framework, 2)
    first, other = results.trees(name)
    limit = {"fp16": 1e-3, "bf16": 1e-2, "int8": 2e-2}.get(name, 0.8)
    assert same(first, other) and 0 < distance(first, results.trees("plain")[0])[0] < limit, "it compresses and learns"
    assert all(result["residual"] > 0 for result in results.json(name))


@pytest.mark.parametrize("name", [*RESUMED, "norm-swa-sharded", "own-optimizer", "later"])
@of_each_and_alone
def test_a_run_goes_on_to_the_same_bits(world, framework, size, name):
    """With each rank's residual, weights and slots, gradients in flight, averages, masks of dropout."""
    results = world(framework, size)
    pairs = zip(results.trees(name), results.trees(f"{name}-rest"), strict=True)
    assert all(same(whole, rest) for whole, rest in pairs)
    for whole, rest in zip(results.json(name), results.json(f"{name}-rest"), strict=True):
        assert whole["residual"] == rest["residual"] and (whole["residual"] > 0 or name not in (*TWO_PHASE, "later"))


@of_each
def test_ranks_stay_equal_with_all_that_is_between_gradients_and_weights(world, framework):
    """Two phases with accumulation, clipping and uneven parts; and what is chosen by the clock."""
    for name in (*TWO_PHASE, "auto", "dropout"):
        assert same(*world(framework, 2).trees(name)), name
    one, two = (world(framework, size).trees("dropout")[0] for size in (1, 2))
    assert distance(one, two)[0] > 1e-6, "masks are those of the ranks"


@of_each
def test_weights_that_are_trained_later_get_their_slots_then(world, framework):
    results = world(framework, 2)
    assert "slots|momentum|fc2.kernel" in results.trees("later-5")[0]
    assert "slots|momentum|fc2.kernel" not in results.trees("later-3")[0]


@of_each
def test_an_optimizer_of_the_user_moves_as_on_one_rank(world, framework):
    assert near(*(world(framework, size).trees("own-optimizer")[0] for size in (1, 2)))


@pytest.mark.parametrize("name", ["fp16", "bf16", "int8", "int4", "threshold", "topk"])
def test_compression_is_the_same_in_both_frameworks(world, name):
    """All but PowerSGD, which works on transposed matrices."""
    trees = [world(framework, 2).trees(name)[0] for framework in FRAMEWORKS]
    # A last bit in 64 bits may fall on the other side of a half-precision number, 2^-11 away, or of a level of int8.
    limits = {"fp16": 1e-3, "bf16": 1e-2, "int8": 1e-2, "int4": 0.1}
    assert distance(*trees)[0] < limits.get(name, TOLERANCE), distance(*trees)


@of_each_and_alone
def test_gradients_under_way_are_equal_on_all_ranks_and_left_behind_by_another_mode(world, framework, size):
    results = world(framework, size)
    plain = {k: x for k, x in results.trees("plain")[0].items() if k.startswith("weights")}
    for name in (*DELAYED, "late-mixed", "from-delayed-rest"):
        first, *others = results.trees(name)
        assert all(same(first, other) for other in others)
        assert first.get("under_way|steps", 0) == (0 if name == "from-delayed-rest" else 2)
        assert 0 < distance(plain, {k: first[k] for k in plain})[0] < 0.9


@pytest.mark.parametrize("name", LOOSE)
@of_each
def test_weights_that_went_apart_end_together(world, framework, name):
    first, other = world(framework, 2).trees(name)
    weights = [k for k in first if k.startswith("weights")]
    assert all((first[k] == other[k]).all() for k in weights)
    assert any((first[k] != other[k]).any() for k in first), "their slots stay apart"
    one = world(framework, 1).trees(name)[0]
    assert 0 < distance({k: one[k] for k in weights}, {k: first[k] for k in weights})[0] < 0.5


@pytest.mark.parametrize("name", [name for name in LOOSE if LOOSE[name]["mode"] in ("outer", "streaming")])
def test_outer_steps_are_the_same_in_both_frameworks(world, name):
    assert near(*(world(framework, 2).trees(name)[0] for framework in FRAMEWORKS))


@of_each
def test_the_compression_error_is_told_and_changes_nothing(world, framework):
    results = world(framework, 2)
    assert same(results.trees("topk")[0], results.trees("watched")[0])
    told = results.json("watched")[0]["compression_error"]
    assert [row["step"] for row in told] == [0, 3, 6]
    assert all(0.1 < row["cosine"] < 0.9999 and 0 < row["bytes"] < 0.6 * row["bytes_plain"] for row in told)
    assert told[0]["bytes_plain"] == 8 * (64 * 96 + 96 + 96 * 10 + 10)


@of_each
def test_measuring_the_noise_scale_changes_nothing(world, framework):
    results = world(framework, 2)
    assert same(results.trees("plain")[0], results.trees("noise")[0])
    assert same(results.trees("masked")[0], results.trees("noise-masked")[0])


def test_the_noise_scale_is_that_of_the_other_framework_and_of_a_sharded_optimizer(world):
    torch, keras = (world(framework, 2) for framework in FRAMEWORKS)
    of_one = [world(framework, 1).json("noise")[0]["noise_scale"] for framework in FRAMEWORKS]
    rows = [[results.json(name)[0]["noise_scale"] for name in ("noise", "noise-masked")] for results in (torch, keras)]
    pairs = [(of_one[0], of_one[1]), *zip(*rows, strict=True)]
    pairs += [(rows[k][0], world(f, 2).json("noise-sharded")[0]["noise_scale"]) for k, f in enumerate(FRAMEWORKS)]
    for one, other in pairs:
        assert len(one) == len(other) > 0
        for a, b in zip(one, other, strict=True):
            a, b = ({k: -1 if x is None else x for k, x in row.items() if k != "event"} for row in (a, b))
            assert a == pytest.approx(b, rel=TOLERANCE)
            assert a["noise"] > 0 and a["steps"] > 0


@pytest.mark.parametrize("name", MIXED)
@of_each_and_alone
def test_16_bits_stay_near_and_equal_on_all_ranks(world, framework, size, name):
    first, *others = world(framework, size).trees(name)
    assert all(same(first, other) for other in others)
    assert all(x.dtype == np.float32 for k, x in first.items() if k.startswith("weights"))
    whole = world(framework, 1).trees("plain")[0]
    assert 1e-7 < distance(whole, first)[0] < (0.8 if "topk" in name else 0.02)


@of_each_and_alone
def test_an_overflow_on_one_rank_is_left_out_by_all(world, framework, size):
    for result in world(framework, size).json("overflow"):
        assert result == {"steps": [[False, True], [True, False]], "finite": True}


@of_all_worlds
def test_adasum_or_a_clear_error(world, framework, size):
    for result in world(framework, size).json("adasum-verb"):
        if size == 3:
            assert "exchange.op: adasum does not go with 3 ranks" in result["text"] and result["common"]
        else:
            a, b = np.array([1.0, 2.0, 3.0]), np.array([-2.0, 0.5, 4.0])
            joined = a * (1 - a @ b / (2 * a @ a)) + b * (1 - a @ b / (2 * b @ b))
            np.testing.assert_allclose(result["found"], joined, rtol=1e-12)


def test_overlap_gives_the_same_bits(world):
    results = world("pytorch", 2)
    for case in ("", "changing-"):
        for plain, overlapped in zip(results.trees(f"{case}no-overlap"), results.trees(f"{case}overlap"), strict=True):
            assert same(plain, overlapped)
    assert same(*results.trees("changing-overlap"))


@of_each
def test_a_run_goes_on_with_another_precision_and_exchange(world, framework):
    """No loss scale of the one before stays; the exchange is the one that is asked for now."""
    results = world(framework, 2)
    plain = results.trees("plain")[0]
    for name, wanted, limit in (("to-16-mixed", "none", 0.02), ("to-32", "topk", 0.5)):
        first, other = results.trees(f"{name}-rest")
        assert all((first[k] == other[k]).all() for k in first if k.startswith("weights"))
        assert distance(first, plain)[0] < limit, (name, distance(first, plain))
        about = json.loads((results.folder / f"{name}-cut" / "environment.json").read_text())
        assert about["compression"] == wanted and about["hosts"] == {platform.node(): 2}
    assert all(result["residual"] > 0 for result in results.json("to-32-rest"))
