"""Mixup and CutMix: pure functions of (seed, epoch, index), and the loss of both classes."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats
from sklearn.datasets import load_digits

from hvd_train.config import DataConfig, TaskConfig, load_config
from hvd_train.data.catalog import open_data
from hvd_train.data.loader import Loader
from hvd_train.data.mixing import beta
from hvd_train.errors import ConfigError, DataError
from hvd_train.protocol import PARTNER, SHARE, Field, Sample
from hvd_train.task.task import Task
from tests.numpy_frontend import NumpyOps

IMAGES = (load_digits().images[:300, ..., None] * 15.9375).astype(np.uint8)
FLOATS = (IMAGES / 255).astype(np.float32)
LABELS = load_digits().target[:300]
MIXUP, CUTMIX = {"name": "mixup", "alpha": 0.4}, {"name": "cutmix", "alpha": 1.0}


def opened(*listed, inputs=FLOATS, labels=LABELS, task=None, **keys):
    sys.modules["own_mixing"] = SimpleNamespace(pair=lambda: ((inputs, labels), (inputs, labels)))
    config = DataConfig.model_validate({"name": "own_mixing:pair", "transforms": list(listed)} | keys)
    return open_data(config, task or TaskConfig())


def drawn(*listed, epoch=0, seed=0, **keys):
    source = opened(*listed, **keys).train
    inputs, labels = source.drawn(np.arange(len(source)), seed, epoch)
    return inputs["input"], labels


@pytest.mark.parametrize("alpha", [0.2, 0.5, 1.0, 2.0, 8.0])
def test_shares_are_of_the_beta_distribution(alpha):
    found = beta(alpha, np.random.default_rng(1).random((20_000, 3)))
    assert stats.kstest(found, stats.beta(alpha, alpha).cdf).pvalue > 0.01
    assert found.min() >= 0 and found.max() <= 1


def test_mixup_is_the_mean_of_two_samples_by_their_shares():
    """Zhang et al. 2018, "mixup: Beyond Empirical Risk Minimization", equation of section 1."""
    inputs, labels = drawn(MIXUP)
    share = labels[SHARE]
    assert ((share >= 0.5) & (share <= 1)).all() and 0.02 < np.mean(share < 0.9) < 0.9
    found, same = 0, labels["label"] == LABELS
    assert 0.3 < np.mean(same) < 0.8, "the other one has the larger share half of the time"
    for k in range(0, 300, 10):
        larger, other = labels["label"][k], labels[PARTNER][k]
        first = [np.float64(share[k])] * bool(same[k]) + [1 - np.float64(share[k])] * bool(other == LABELS[k])
        others = np.flatnonzero(np.isin(LABELS, [larger, other]))
        wanted = [one * FLOATS[k] + (1 - one) * FLOATS[others] for one in first]
        found += int(any((np.abs(x - inputs[k]).max((1, 2, 3)) < 1e-5).any() for x in wanted))
    assert found == 30


@pytest.mark.parametrize("inputs", [FLOATS, IMAGES])
def test_cutmix_takes_a_rectangle_whose_area_is_the_share(inputs):
    black = np.zeros_like(inputs)
    black[150:] = 9
    mixed, labels = drawn(CUTMIX, inputs=black, labels=np.repeat([0, 1], 150))
    sizes = set()
    for k, image in enumerate(mixed[..., 0]):
        other = image != black[k, 0, 0, 0]
        if not other.any():
            assert labels["label"][k] == (k >= 150) or labels["label"][k] == labels[PARTNER][k]
            continue
        rows, columns = (np.flatnonzero(other.any(axis)) for axis in (1, 0))
        assert other.sum() == len(rows) * len(columns), "a rectangle"
        first = 1 - other.mean()
        assert max(first, 1 - first) == pytest.approx(labels[SHARE][k], abs=1e-6)
        assert labels["label"][k] == (k >= 150 if first >= 0.5 else k < 150)
        sizes.add(len(rows))
    assert len(sizes) > 4


def test_bytes_are_rounded_and_nothing_is_written_into_the_data():
    before = IMAGES.copy()
    found, numbers = drawn(MIXUP, inputs=IMAGES)[0], drawn(MIXUP, inputs=FLOATS)[0]
    assert found.dtype == np.uint8 and (before == IMAGES).all()
    np.testing.assert_allclose(found / 255, numbers, atol=0.51 / 255)


def test_p_and_both():
    share = drawn(MIXUP | {"p": 0.3})[1][SHARE]
    assert 0.55 < np.mean(share == 1) < 0.85
    inputs, labels = drawn(MIXUP | {"p": 0})
    assert (inputs == FLOATS).all() and (labels["label"] == LABELS).all()
    both = drawn(MIXUP | {"p": 0}, CUTMIX)[1][SHARE]
    assert 0.35 < np.mean(both == 1) < 0.75, "half of the samples are CutMix's, of which some keep all"


@pytest.mark.parametrize("sampling", [None, "balanced"])
def test_a_sample_is_the_same_in_every_world_and_after_a_resume(sampling):
    source = opened("random_horizontal_flip", MIXUP, CUTMIX, sampling=sampling).train

    def rows(size, consumed=0, batch=24):
        loaders = [Loader(source, global_batch=batch, rank=rank, size=size, seed=5) for rank in range(size)]
        steps = zip(*(loader.epoch(1, consumed) for loader in loaders), strict=True)
        batches = [b for step in steps for part in step for b in part.micro_batches]
        return [
            np.concatenate([x(b)[: b.count] for b in batches])
            for x in (lambda b: b.inputs["input"], lambda b: b.labels[PARTNER], lambda b: b.labels[SHARE])
        ]

    whole = rows(1)
    for other in (rows(2), rows(3), rows(4, batch=31)):
        assert all((a == b).all() for a, b in zip(whole, other, strict=True))
    assert all((a[120:] == b).all() for a, b in zip(whole, rows(3, 120), strict=True))
    again = source.drawn(np.arange(len(source)), 5, 2)[1]
    assert not (again[SHARE] == source.drawn(np.arange(len(source)), 5, 1)[1][SHARE]).all()


def test_only_training_is_mixed():
    data = opened(MIXUP)
    assert set(data.train.fetch(np.arange(3))[1]) == set(data.val.fetch(np.arange(3))[1]) == {"label"}
    assert set(data.sample.labels) == {"label"}
    assert "mixup: training metrics compare with the class that has the larger share" in data.train.note


def test_the_loss_is_that_of_soft_labels():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    z, (_, labels) = rng.normal(size=(300, 10)), drawn(MIXUP)
    soft = np.zeros((300, 10))
    np.add.at(soft, (np.arange(300), labels["label"]), labels[SHARE])
    np.add.at(soft, (np.arange(300), labels[PARTNER]), 1 - labels[SHARE])
    wanted = torch.nn.functional.cross_entropy(torch.from_numpy(z), torch.from_numpy(soft)).item()
    task = Task(TaskConfig(), Sample({}, {"label": Field((), "int64", classes=10)}), NumpyOps())
    results = task.results(task(z, labels, np.ones(300))[1])
    assert results["loss"] == pytest.approx(wanted, rel=1e-6)  # shares have 32 bits
    assert results["accuracy"] == np.mean(z.argmax(1) == soft.argmax(1))


FRONTS = ["numpy", "pytorch", "tensorflow"]


def ops_of(framework):
    if framework == "pytorch":
        torch = pytest.importorskip("torch")
        from hvd_train.frontends.pytorch.ops import TorchOps

        return TorchOps(torch.device("cpu"))
    if framework == "tensorflow":
        pytest.importorskip("tensorflow")
        from hvd_train.frontends.tensorflow.ops import TensorFlowOps

        return TensorFlowOps()
    return NumpyOps()


def test_whole_numbers_are_mixed_for_a_loss_of_ones_own():
    """They were refused, although the loss is called with the labels of both samples."""
    _, classes = drawn(MIXUP)
    _, numbers = drawn(MIXUP, task=TaskConfig(loss="own:ce"))
    assert all(np.array_equal(x, numbers[name]) for name, x in classes.items()) and PARTNER in numbers


@pytest.mark.parametrize("framework", FRONTS)
@pytest.mark.parametrize("places", [False, True])
def test_a_loss_of_ones_own_sees_both_classes(monkeypatch, framework, places):
    """It saw the larger class alone: 2.7538 where cross_entropy of the same weights and samples was 2.6936."""
    ops = ops_of(framework)
    loss = SimpleNamespace(
        ce=lambda z, y: ops.reshape(ops.cross_entropy(z, y), (-1, 1) if places else (-1,)),
        weighted=lambda z, y: (ops.cross_entropy(z, y), ops.cast(y >= 0, "float64")),
    )
    monkeypatch.setitem(sys.modules, "own_loss", loss)
    (_, labels), z = drawn(MIXUP), np.random.default_rng(0).normal(size=(300, 10))
    sample = Sample({}, {"label": Field((), "int64", classes=10)})
    given = {name: ops.from_numpy(x) for name, x in labels.items()}
    found = {}
    for name in ("cross_entropy", "own_loss:ce", "own_loss:weighted"):
        task = Task(TaskConfig(loss=name, metrics=["accuracy"]), sample, ops)
        if ":" in name:
            task.probe(ops.from_numpy(z[:2]), {"label": ops.from_numpy(LABELS[:2])}, ops.from_numpy(np.ones(2)))
        if name == "own_loss:weighted":
            for call in (
                lambda t: t.counts(given, ops.from_numpy(np.ones(300))),
                lambda t: t(ops.from_numpy(z), given, 1),
            ):
                with pytest.raises(ConfigError, match=r"the loss returns weights, but mixed samples have two lab"):
                    call(task)
            continue
        loss, sums = task(ops.from_numpy(z), given, ops.from_numpy(np.ones(300)), [1 / 300])
        found[name] = task.results(ops.to_numpy(sums))
        assert float(loss) == pytest.approx(found[name]["loss"], rel=1e-12)
    assert found["own_loss:ce"] == pytest.approx(found["cross_entropy"], rel=1e-12)
    assert not (labels["label"] == labels[PARTNER]).all()


@pytest.mark.parametrize("framework", FRONTS)
@pytest.mark.parametrize(("name", "column"), [("bce", False), ("bce", True), ("mse", True)])
def test_losses_of_numbers_count_both_classes(framework, name, column):
    """Two classes with one output. In Keras bce ended with a TypeError: the partner's labels were not cast."""
    ops, rng = ops_of(framework), np.random.default_rng(0)
    (_, labels), z = drawn(MIXUP, labels=LABELS % 2), rng.normal(size=(300, 1) if column else 300).astype(np.float32)
    task = Task(TaskConfig(loss=name), Sample({}, {"label": Field((), "int64", classes=2)}), ops)
    given = {key: ops.from_numpy(x) for key, x in labels.items()}
    _, sums = task(ops.from_numpy(z), given, ops.from_numpy(np.ones(300, np.float32)))
    z, share = z.ravel().astype(float), labels[SHARE].astype(float)
    of_class = (lambda y: np.logaddexp(0, z) - y * z) if name == "bce" else (lambda y: (z - y) ** 2)
    wanted = share * of_class(labels["label"]) + (1 - share) * of_class(labels[PARTNER])
    assert task.results(ops.to_numpy(sums))["loss"] == pytest.approx(wanted.mean(), rel=1e-5)


@pytest.mark.parametrize(
    ("listed", "keys", "words"),
    [
        ([MIXUP], {"labels": LABELS * 1.0, "task": TaskConfig(loss="mse")}, "the labels are not one class per sample"),
        ([MIXUP], {"inputs": LABELS[:, None], "images": False}, "holds whole numbers"),
        ([CUTMIX], {"inputs": FLOATS.reshape(300, 64)}, "not an image"),
        (
            [MIXUP],
            {"inputs": np.zeros((9, 5)), "labels": np.arange(45).reshape(9, 5) % 3},
            "the labels are not one class per",
        ),
    ],
)
def test_what_cannot_be_mixed_is_refused(listed, keys, words):
    with pytest.raises(DataError) as caught:
        opened(*listed, **keys)
    assert words in str(caught.value) and caught.value.where.startswith("data.transforms.0: ") and caught.value.fix


def test_mistakes_in_the_configuration():
    def loaded(transforms, **task):
        return load_config(base={"data": {"transforms": transforms}, "task": task})

    with pytest.raises(ConfigError, match="random_vertical_flip must stand before mixup"):
        loaded(["mixup", "random_vertical_flip"])
    with pytest.raises(ConfigError, match="alpha"):
        loaded([{"name": "mixup", "alpha": 0}])
    loaded(["mixup", "cutmix", {"name": "normalize", "mean": 0.5, "std": 0.5}])
