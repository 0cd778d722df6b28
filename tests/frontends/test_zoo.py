"""The zoos hold the same networks: names, first weights, logits, gradients; and labels may stand at every place."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest

from hvd_train.config import TaskConfig
from hvd_train.errors import ConfigError
from hvd_train.protocol import Batch
from hvd_train.task.task import Task
from tests.frontends.test_contract import FRAMEWORKS, built, module, sample_of, weights

ROWS = 6
RESNET = {"name": "resnet", "width": 2}
RESNET50 = {"name": "resnet50", "width": 2, "blocks": [1, 1, 1, 2]}
PYRAMID = {"name": "pyramidnet", "width": 3, "blocks": [2, 1, 1], "alpha": 7}
GPT = {"name": "gpt", "width": 12, "depth": 2, "heads": 3}
ZOO = {  # model, shape of a sample, classes
    "resnet": (RESNET, (9, 11, 2), 3),
    "resnet square": (RESNET | {"blocks": [1, 2, 1]}, (8, 8, 1), 3),
    "resnet50": (RESNET50, (32, 37, 3), 3),
    "pyramidnet": (PYRAMID, (9, 10, 2), 3),
    "thin": ({"name": "thin", "depth": 6, "width": 5}, (4, 3, 2), 3),
    "thin flat": ({"name": "thin", "depth": 2, "width": 5}, (7,), 3),
    "gpt": (GPT, (10,), 11),
    "mlp image": ({"name": "mlp", "hidden": [7, 5]}, (6, 5, 2), 3),
    "mlp flat": ({"name": "mlp", "hidden": [7]}, (9,), 3),
    "mlp linear": ({"name": "mlp", "hidden": []}, (6, 5, 2), 3),
    "cnn": ({"name": "cnn", "hidden": 11}, (20, 28, 3), 3),
}


def opened(framework, model, shape, classes, **keys):
    tokens = model["name"] == "gpt"
    sample = sample_of(shape, classes, "int32", shape) if tokens else sample_of(shape, classes)
    return built(framework, sample, **{"model": model, "optim": {"lr": 1.0}} | keys)


def batch(shape, classes, seed=0, count=ROWS):
    """Images, or tokens and the tokens after them."""
    rng = np.random.default_rng(seed)
    weights = (np.arange(ROWS) < count).astype(np.float32)
    if len(shape) == 1 and classes > 3:
        text = rng.integers(0, classes, (ROWS, shape[0] + 1))
        return Batch({"input": text[:, :-1].astype(np.int32)}, {"label": text[:, 1:]}, weights, np.arange(count))
    inputs = rng.normal(size=(ROWS, *shape)).astype(np.float32)
    return Batch({"input": inputs}, {"label": rng.integers(0, classes, ROWS)}, weights, np.arange(count))


def training_logits(frontend, placed):
    inputs = placed[0]["input"]
    if hasattr(frontend.model, "train"):  # PyTorch
        return frontend.ops.to_numpy(frontend.model.train()(inputs))
    frontend._batchnorm.weights = placed[2]  # as a step does while it is traced
    return frontend.ops.to_numpy(frontend.model(inputs, training=True))


@pytest.mark.parametrize("name", ZOO)
def test_both_zoos_hold_the_same_network(name):
    """In 64 bits: first weights bit for bit, logits to 1e-12, gradients (what a step at rate 1 takes off) to 1e-10."""
    model, shape, classes = ZOO[name]
    one = batch(shape, classes)
    fronts = [opened(framework, model, shape, classes) for framework in FRAMEWORKS]
    states = [f.state() for f in fronts]
    assert states[0].keys() == states[1].keys()
    assert all((states[0][k] == states[1][k]).all() for k in states[0])
    assert all(k.rpartition(".")[2] in ("kernel", "bias", "scale", "embedding", "mean", "variance") for k in states[0])
    placed = [f.to_device(one) for f in fronts]
    np.testing.assert_allclose(*(f.predict(p) for f, p in zip(fronts, placed, strict=True)), rtol=0, atol=1e-12)
    pairs = list(zip(fronts, placed, strict=True))
    np.testing.assert_allclose(*(training_logits(*pair) for pair in pairs), rtol=0, atol=1e-12)
    before = weights(fronts[0])
    drawn = weights(opened("pytorch", model, shape, classes, seed=1))
    assert any((drawn[key] != x).any() for key, x in before.items())
    sums = [f.ops.to_numpy(f.train_step(p, 1 / ROWS, 0, 1.0)) for f, p in pairs]
    np.testing.assert_allclose(*sums, rtol=1e-12)
    after = [weights(f) for f in fronts]
    for key in before:
        np.testing.assert_allclose(after[0][key], after[1][key], rtol=0, atol=1e-10, err_msg=key)
        # What comes before a batch norm has no gradient by a constant, but every kernel has one.
        assert not key.endswith(("kernel", "embedding")) or (after[0][key] != before[key]).any(), key


SIZES = {  # model: shape of a sample, classes, weights, tensors
    "resnet": ((32, 32, 3), 10, 11_173_962, 62),
    "resnet50": ((224, 224, 3), 1000, 25_557_032, 161),
    # Stem 3 * 16 * 9 and its norm 2 * 16, then 51 blocks of 2 a + 9 a b + 2 b + 9 b b + 2 b weights, where a and b go
    # from 16, 21 to 266, 271 in steps of 5: 24 249 684 together; the last norm 2 * 271 and the head 271 * 10 + 10.
    "pyramidnet": ((32, 32, 3), 10, 24_253_410, 3 + 51 * 8 + 4),
    "gpt": ((128,), 256, 842_496, 52),
    "thin": ((32, 32, 3), 10, 307_754, 400),
}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_sizes_of_the_zoo(framework, name):
    """The numbers of weights that the models' first lines tell."""
    module(framework)
    shape, classes, size, tensors = SIZES[name]
    if framework == "pytorch":
        import torch

        with torch.device("meta"):
            own = (shape[2], *shape[:2]) if len(shape) == 3 else shape
            weights = [p.numel() for p in import_module(f"pt_models.{name}").build(own, classes).parameters()]
    else:
        model = import_module(f"tf_models.{name}").build(shape, classes)
        weights = [math.prod(v.shape) for v in model.trainable_variables]
    assert (sum(weights), len(weights)) == (size, tensors)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_tied_embedding_is_one_weight_that_learns_from_both_ends(framework):
    frontend = opened(framework, GPT, (10,), 11)
    names = [spec.name for spec in frontend.specs()]
    assert names.count("tokens.embedding") == 1 and len(set(names)) == len(names)
    one = batch((10,), 11)
    inputs, labels = {"input": 0 * one.inputs["input"]}, {"label": 0 * one.labels["label"] + 1}  # tokens 0 and 1 alone
    before = weights(frontend)["weights/tokens.embedding"]
    frontend.train_step(frontend.to_device(replace(one, inputs=inputs, labels=labels)), 1 / ROWS, 0, 1.0)
    changed = (weights(frontend)["weights/tokens.embedding"] != before).any(axis=1)
    assert changed.all(), "as the output's kernel every row learns"
    assert (np.abs(weights(frontend)["weights/positions.embedding"]).sum(axis=1) > 0).all()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_no_place_sees_later_tokens(framework):
    frontend = opened(framework, GPT, (10,), 11)
    one = batch((10,), 11)
    changed = one.inputs["input"].copy()
    changed[:, 6] = (changed[:, 6] + 1) % 11
    other = replace(one, inputs={"input": changed})
    a, b = (frontend.predict(frontend.to_device(x)) for x in (one, other))
    assert a.shape == (ROWS, 10, 11)
    np.testing.assert_allclose(a[:, :6], b[:, :6], rtol=0, atol=1e-15)
    assert (np.abs(a[:, 6:] - b[:, 6:]).max(axis=(0, 2)) > 1e-9).all()


# ---- labels at every place


def expected_sums(logits, labels, weights):
    logits = logits - logits.max(-1, keepdims=True)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    losses = -np.take_along_axis(logp, labels[..., None], -1)[..., 0].reshape(len(labels), -1).mean(1)
    right = (logits.argmax(-1) == labels).reshape(len(labels), -1).mean(1)
    return [(losses * weights).sum(), (right * weights).sum(), weights.sum()]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 4), (5, 2, 3)], ids=str)
def test_a_sample_counts_by_the_mean_over_its_labels(framework, shape):
    rng = np.random.default_rng(0)
    logits, labels = 3 * rng.normal(size=(*shape, 7)), rng.integers(0, 7, shape)
    weights = np.array([1.0, 0, 1, 1, 0])
    ops = module(framework).cpu_ops()
    task = Task(TaskConfig(), sample_of(shape[1:], 7, labels=shape[1:]), ops)
    given, told, counted = map(ops.from_numpy, (logits, labels, weights))
    loss, sums = task(given, {"label": told}, counted, [0.5])
    found = ops.to_numpy(sums)
    np.testing.assert_allclose(found, expected_sums(logits, labels, weights), rtol=1e-13)
    assert float(loss) == pytest.approx(found[0] / 2) and found.dtype == np.float64


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_padding_of_token_samples_counts_for_nothing(framework):
    frontend = opened(framework, GPT, (10,), 11)
    part = batch((10,), 11, count=4)
    scored = frontend.ops.to_numpy(frontend.evaluate_batch(frontend.to_device(part)))
    logits = frontend.predict(frontend.to_device(part))[:4]
    expected = expected_sums(logits, part.labels["label"][:4], part.weights[:4])
    np.testing.assert_allclose(scored, expected, rtol=1e-12)
    assert scored[2] == 4


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    ("model", "labels", "what"),
    [
        ({"name": "mlp"}, (ROWS, 10), r"logits of shape \(6, 11\) for labels of shape \(6, 10\)"),
        (GPT, (ROWS,), r"logits of shape \(6, 10, 11\) for labels of shape \(6,\).*gives \(6, num_classes\)"),
    ],
    ids=["mlp", "gpt"],
)
def test_a_model_that_does_not_fit_the_labels_is_one_clear_error(framework, model, labels, what):
    frontend = opened(framework, model, (10,), 11)
    inputs = np.zeros((ROWS, 10), "int32" if model is GPT else "float32")
    one = replace(batch((10,), 11), inputs={"input": inputs}, labels={"label": np.zeros(labels, np.int64)})
    for call in (lambda p: frontend.train_step(p, 1.0, 0, 0.1), frontend.evaluate_batch):
        with pytest.raises(ConfigError, match=what):
            call(frontend.to_device(one))


# ---- they learn


@pytest.mark.parametrize(
    ("model", "shape", "classes"),
    [
        ({"name": "gpt", "width": 32, "depth": 3}, (16,), 64),
        ({"name": "thin", "depth": 60, "width": 16}, (6, 6, 1), 3),
        ({"name": "resnet", "width": 4}, (8, 8, 1), 3),
        (PYRAMID | {"alpha": 20}, (8, 8, 1), 3),
    ],
    ids=["gpt", "thin", "resnet", "pyramidnet"],
)
def test_the_first_weights_are_sane_and_training_goes_down(model, shape, classes):
    """In one framework: the other one's networks and weights are the same."""
    frontend = opened("pytorch", model, shape, classes, precision=32, optim={"name": "adam", "lr": 3e-3})
    placed = frontend.to_device(batch(shape, classes))
    losses = [frontend.ops.to_numpy(frontend.train_step(placed, 1 / ROWS, k, 3e-3))[0] / ROWS for k in range(40)]
    if model["name"] == "gpt":
        assert losses[0] == pytest.approx(np.log(classes), rel=0.02)
    assert losses[0] < 3 * np.log(classes) and losses[-1] < losses[0] / 2


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_dropout_of_the_gpt_follows_the_seed_and_rests_in_evaluation(framework):
    fronts = [opened(framework, GPT | {"dropout": 0.3}, (10,), 11) for _ in range(3)]
    placed = [f.to_device(batch((10,), 11)) for f in fronts]
    evaluated = [frontend.predict(placed[0]) for frontend in (fronts[0], fronts[0])]
    assert (evaluated[0] == evaluated[1]).all()
    plain = opened(framework, GPT, (10,), 11)
    np.testing.assert_allclose(plain.predict(plain.to_device(batch((10,), 11))), evaluated[0], rtol=0, atol=1e-14)
    sums = [
        f.ops.to_numpy(f.train_step(p, 1 / ROWS, seed, 0.1)).tolist()
        for f, p, seed in zip(fronts, placed, (5, 5, 6), strict=True)
    ]
    assert sums[0] == sums[1] != sums[2]


# ---- half precision and Keras' own saving


@pytest.mark.parametrize("kind", ["mixed_float16", "mixed_bfloat16"])
def test_the_keras_gpt_works_under_mixed_precision(kind):
    """Token numbers pass unharmed, though half floats hold whole numbers only up to 2048 or 256."""
    module("tensorflow")
    import keras

    from tf_models import gpt

    count, inputs = 3000, np.array([[2999, 2049, 257, 0]])
    options = {"width": 16, "depth": 1, "heads": 2}
    before = keras.config.dtype_policy(), keras.config.floatx()
    try:
        keras.config.set_floatx("float32")
        models = []
        for policy in ("float32", kind):
            keras.config.set_dtype_policy(policy)
            models.append(gpt.build((4,), count, **options))
        models[1].set_weights(models[0].get_weights())
        assert {v.dtype for v in models[1].trainable_variables} == {"float32"}
        exact, half = (np.array(keras.ops.cast(model(inputs), "float32")) for model in models)
        assert models[1](inputs).dtype.name == kind.removeprefix("mixed_")
        assert np.isfinite(half).all() and np.abs(half - exact).max() < 0.02 * np.abs(exact).max() + 0.02
    finally:
        keras.config.set_floatx(before[1])
        keras.config.set_dtype_policy(before[0])


@pytest.mark.parametrize("name", ["resnet", "resnet50", "pyramidnet", "thin", "gpt"])
def test_keras_saves_and_loads_the_models(name):
    model, shape, classes = ZOO[name]
    frontend = opened("tensorflow", model, shape, classes)
    import keras

    again = keras.models.model_from_json(frontend.model.to_json())
    again.set_weights(frontend.model.get_weights())
    inputs = frontend.to_device(batch(shape, classes))[0]["input"]
    np.testing.assert_allclose(again(inputs), frontend.model(inputs), rtol=1e-13)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    ("model", "shape", "what"),
    [
        ({"name": "resnet"}, (7, 9, 3), "at least 8 x 8, not 7 x 9"),
        ({"name": "resnet"}, (64,), "the model takes images"),
        ({"name": "resnet50"}, (32, 31, 3), "ResNet-50 needs images of at least 32 x 32, not 32 x 31"),
        ({"name": "pyramidnet"}, (3, 8, 3), "PyramidNet needs images of at least 4 x 4, not 3 x 8"),
        ({"name": "thin", "depth": 1}, (4,), "at least 2, not 1"),
        ({"name": "gpt"}, (8, 8, 1), "one axis, tokens"),
        ({"name": "gpt", "width": 10, "heads": 4}, (8,), "width 10 is no multiple of heads 4"),
    ],
    ids=str,
)
def test_models_that_cannot_be_built(framework, model, shape, what):
    with pytest.raises(ConfigError, match=what):
        opened(framework, model, shape, 3)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("loss", "outputs"), [("mse", 1), ("mae", 1), ("huber", 1), ("bce", 1), ("cross_entropy", 3)])
def test_classes_are_numbers_for_a_loss_of_numbers(framework, loss, outputs):
    """Folders of words with ``data.classes`` ended with "outputs of shape (32, 3) for labels of shape (32,)"."""
    for model in ({"name": "cnn", "hidden": 4}, {"name": "mlp", "hidden": [4]}):
        frontend = opened(framework, model, (28, 28, 1), 3, task={"loss": loss})
        shapes = [spec.shape for spec in frontend.specs()]
        assert shapes.count((outputs,)) == 1, shapes  # the last layer's offsets
