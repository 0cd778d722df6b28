"""Labels whose values cannot be what the loss and the metrics take them for are refused, in one line."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from hvd_train.config import DataConfig, TaskConfig, load_config
from hvd_train.data.catalog import open_data
from hvd_train.data.dataset import DataRequest
from hvd_train.data.fitted import as_run
from hvd_train.errors import DataError
from hvd_train.jobs.messages import _ignored_labels, same_parts
from hvd_train.task.task import Task
from tests.data.files import RNG, write
from tests.numpy_frontend import NumpyOps

N = 20
X = RNG.normal(size=(N, 3)).astype(np.float32)
IMAGES = RNG.random((N, 4, 4, 1)).astype(np.float32)
BITS = np.arange(N) % 2
MASKS = RNG.random((N, 4, 4)) > 0.5


def opened(labels, inputs=X, task=None, **keys):
    parts = (inputs[:10], labels[:10]), (inputs[10:], labels[10:])
    return open_data(DataConfig(name="npz", **keys), TaskConfig(**(task or {})), user_data=parts)


def fault(*args, **keys):
    with pytest.raises(DataError) as caught:
        opened(*args, **keys)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("labels", [2 * BITS - 1, BITS + 1, 255 * BITS, np.stack([BITS, -100 * BITS], 1)], ids=str)
def test_bce_takes_labels_from_0_to_1(labels):
    """Of labels -1 and 1 the loss has no lower bound: it fell below zero without a word."""
    for one in (labels, labels.astype(np.float32)):
        assert "task.loss: bce takes 0 to 1" in fault(one, task={"loss": "bce"})
        opened(one, task={"loss": "mse"})


@pytest.mark.parametrize("labels", [BITS, BITS == 1, BITS * 0.9, MASKS, MASKS * np.uint8(255)], ids=lambda x: x.dtype)
def test_what_bce_takes(labels):
    opened(labels, IMAGES if labels.ndim > 1 else X, {"loss": "bce"})


def test_the_place_of_a_bad_label_is_named(tmp_path):
    labels = BITS.astype(np.float32)
    labels[7] = 3
    path = write("npz", tmp_path, {"train_x": X, "train_y": labels, "val_x": X, "val_y": BITS.astype(np.float32)})
    with pytest.raises(DataError, match=r"sample 7 has the label 3.*data.npz, train"):
        open_data(DataConfig(name="npz", path=str(path)), TaskConfig(loss="bce"))


@pytest.mark.parametrize("loss", ["bce", "mse"])
@pytest.mark.parametrize("images", [None, True])
def test_masks_of_bytes_0_and_1_are_not_divided_by_255(loss, images):
    """With data.images: true there was not even a note: all labels were below 0.004, and dice 0."""
    text = fault(MASKS.astype(np.uint8), IMAGES, {"loss": loss}, images=images)
    assert "labels 'label' are uint8 of 0 and 1" in text
    opened(MASKS.astype(np.uint8), IMAGES, {"loss": "cross_entropy"}, images=images)
    opened(MASKS * np.uint8(0), IMAGES, {"loss": loss}, images=images)


@pytest.mark.parametrize("metric", ["accuracy", "f1_macro", "iou", "dice", "balanced_accuracy"])
def test_metrics_of_yes_and_no_beside_a_loss_of_distances(metric):
    """Outputs near 0 and 1 are nearly all above 0: a perfect model had an accuracy of 0.5."""
    task = {"loss": "mse", "metrics": [metric]}
    assert f"task.metrics: {metric}" in fault(BITS, task=task)
    assert f"task.metrics: {metric}" in fault(BITS * 31.0, task=task)
    opened(2 * BITS - 1, task=task)
    opened(BITS, task={**task, "loss": "bce"})


def test_areas_need_labels_of_two_values():
    task = {"loss": "mse", "metrics": ["auc", "mae"]}
    assert "task.metrics: auc" in fault(np.arange(N) * 1.0, task=task)
    opened(BITS, task=task)
    opened(2 * BITS - 1, task=task)


def test_inputs_that_are_labels_are_looked_at_as_the_loss_gets_them():
    pixels = RNG.integers(0, 256, (N, 4, 4, 1)).astype(np.uint8)
    normalized = [{"name": "normalize", "mean": 0.5, "std": 0.5}]
    assert "task.loss: bce takes 0 to 1" in fault(BITS, X, {"loss": "bce"}, target="inputs")
    assert "bce takes 0 to 1" in fault(BITS, pixels, {"loss": "bce"}, target="inputs", transforms=normalized)
    opened(BITS * 7, pixels, {"loss": "bce"}, target="inputs")
    opened(BITS, pixels, {"loss": "mse"}, target="inputs", transforms=normalized)


def test_255_in_a_mask_of_classes_is_told():
    """Pascal VOC's places without a label: they were a class of 256, and every mean over classes wrong."""
    masks = np.where(MASKS, np.uint8(1), np.uint8(255))
    (remark,) = opened(masks, IMAGES).remarks
    assert remark.startswith("labels: 255 is treated as one of 256 classes") and "task.ignore_index: 255" in remark
    data = opened(masks, IMAGES, {"ignore_index": 255})
    assert data.sample.labels["label"].classes == 2 and not data.remarks
    assert not opened(masks, IMAGES, num_classes=256).remarks
    assert not opened(np.tile(np.arange(256, dtype=np.uint8).reshape(16, 4, 4), (2, 1, 1))[:N], IMAGES).remarks
    assert "task.ignore_index: 255 leaves such labels out" in fault(masks, IMAGES, num_classes=2)
    assert "ignore_index" not in fault(BITS * 2, num_classes=2)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int8])
def test_labels_of_lists_of_small_whole_numbers_are_padded_by_ignore_index(dtype):
    """uint8 does not hold -100: the data ended in a traceback."""
    lists = [np.arange(1 + k % 5) for k in range(N)]
    for ignored in (-100, 255):
        task = {"ignore_index": ignored}
        data = opened([x.astype(dtype) for x in lists], lists, task, lengths={"max_length": 6, "mask": None})
        labels = data.train.fetch(np.array([1]))[1]["label"]
        assert labels.tolist() == [[0, 1] + 4 * [ignored]]


def test_validation_by_the_training_samples_is_told():
    """A copy of the training file as val.csv gave the best metrics, without a word."""
    part, other = (X, BITS), (X + 1, BITS)
    (line,) = same_parts(open_data(DataConfig(name="npz"), user_data=(part, part)))
    assert "the validation samples are the training samples" in line
    assert not same_parts(open_data(DataConfig(name="npz"), user_data=(part, other)))
    assert not same_parts(open_data(DataConfig(name="digits", target="inputs"), TaskConfig(loss="mse")))


def test_times_of_arrays_that_32_bits_round_are_told():
    """As those of tables are: seconds since 1970 have steps of 128 in 32 bits."""
    times = 1_790_000_001 + np.arange(2.0 * N).reshape(N, 2)
    (line,) = opened(BITS, times).remarks
    assert line.startswith("inputs hold whole numbers above 2^24, which float32 rounds")
    (line,) = opened(times[:, 0], task={"loss": "mse"}).remarks
    assert line.startswith("labels hold whole numbers")
    for quiet in (
        times - times[0],
        times.astype(np.float32),
        times - times[0] + 0.1,
        np.random.default_rng(0).normal(100, 1, (N, 2)),
        np.full((N, 2), 0.1) + 1e-17 * times / 1e9,
        (times - times[0]) * 2.0**30,
        times.astype(np.int64),
    ):
        assert not opened(BITS, quiet).remarks


@pytest.mark.parametrize("first", [1_790_000_000.25, 2_460_000.5, -1e6])
def test_numbers_whose_differences_32_bits_round_are_told(first):
    """Seconds since 1970 with a fraction: 20 different times were one number for the model, without a word."""
    times = first + np.arange(2.0 * N).reshape(N, 2) / 2048
    assert len(np.unique(times.astype(np.float32))) < 2 * N
    (line,) = opened(BITS, times).remarks
    assert line.startswith("inputs hold numbers whose differences float32 rounds")
    (line,) = opened(times[:, 0], task={"loss": "mse"}).remarks
    assert line.startswith("labels hold numbers whose")


@pytest.mark.parametrize("kind", [np.int64, np.uint64, np.int32])
def test_whole_labels_that_a_loss_of_numbers_rounds_are_told(kind):
    """Whole labels reach a built-in loss in 32 bits; a function of the user gets them as they are."""
    times = 1_790_000_001 + np.arange(N).astype(kind)
    (line,) = opened(times, task={"loss": "mse"}).remarks
    assert line.startswith("labels hold whole numbers above 2^24")
    assert (
        not opened(times, task={"loss": "own:loss"}).remarks
        and not opened(times - times[0] + 1, task={"loss": "mse"}).remarks
    )


@pytest.mark.parametrize(
    ("labels", "own", "told"),
    [
        (np.where(BITS, 3, -100), {}, -100),
        (np.where(BITS, 3, -1), {"ignore_class": -1}, -1),  # a loss of Keras
        (np.where(BITS, 3, -100), {"ignore_index": -1}, None),
        (np.where(BITS, 3, -100) - 5, {}, None),
        (np.where(BITS, -7, -100), {}, None),
        (np.where(BITS, 3, -100) * 1.0, {}, None),
        (BITS, {}, None),
    ],
)
def test_ignored_labels_that_count_in_a_loss_of_the_users_are_told(monkeypatch, labels, own, told):
    """The zeros of CrossEntropyLoss(reduction="none") counted: 0.542, where the mean of PyTorch itself is 0.985."""
    loss = type("Loss", (), {"__call__": lambda self, z, y: (z - y) ** 2, **own})()
    weighted = lambda z, y: ((z - y) ** 2, y != -100)  # noqa: E731
    monkeypatch.setitem(sys.modules, "own_labels", SimpleNamespace(loss=loss, weighted=weighted))
    for name, lines in (("loss", 1), ("weighted", 0)):
        data = opened(labels, task={"loss": f"own_labels:{name}"})
        task = Task(TaskConfig(loss=f"own_labels:{name}"), data.sample, NumpyOps())
        task.probe(np.zeros(2), {"label": np.zeros(2, data.sample.labels["label"].dtype)}, np.ones(2))
        found = _ignored_labels(SimpleNamespace(data=data, frontend=SimpleNamespace(task=task)))
        start = f"labels 'label' hold {told}, but values of loss there count in its mean"
        assert [line[: len(start)] for line in found] == [start] * (lines if told else 0)


def test_labels_of_an_evaluation_are_looked_at_too():
    """A run of 0 and 1, and other data of 1 and 2: a loss below zero, and each answer of yes was right."""
    task, run = TaskConfig(loss="bce"), opened(BITS, task={"loss": "bce"}).sample

    def score(labels, split="val", labelled=True):
        parts = (X[:10], labels[:10]), (X[10:], labels[10:])
        request = DataRequest(run, split, labelled)
        return open_data(DataConfig(name="npz"), task, parts, request)

    late = BITS + (np.arange(N) == N - 1) * 2  # the last one only
    for labels in (BITS + 1, 2 * BITS - 1, late):
        with pytest.raises(DataError, match="task.loss: bce takes 0 to 1"):
            score(labels)
        score(labels, "all", labelled=False)
    assert score(BITS).parts["val"].fetch(np.arange(2))[1]["label"].tolist() == [0, 1]
    images = open_data(DataConfig(name="npz", target="inputs"), task, ((IMAGES, BITS), (IMAGES, BITS))).sample
    with pytest.raises(DataError, match="task.loss: bce takes 0 to 1"):
        others = (5 * IMAGES, BITS), (5 * IMAGES, BITS)
        open_data(DataConfig(name="npz", target="inputs"), task, others, DataRequest(images, "val"))


def test_labels_are_read_alone_where_the_data_do():
    """The run's names of fields and classes stand for those of the data; only the first 64 samples were looked at."""
    run = opened(np.array(["ant", "bee"])[BITS]).sample
    parts = ((X, np.array(["bee", "ant"])[BITS]),) * 2
    part = open_data(DataConfig(name="npz"), user_data=parts, request=DataRequest(run, "val")).parts["val"]
    fitted = as_run(part, replace(run, inputs={"x": run.inputs["input"]}), True, "here", -100)
    assert fitted.label("label", np.arange(N)).tolist() == fitted.fetch(np.arange(N))[1]["label"].tolist()
    unread = as_run(part, replace(run, inputs={"x": run.inputs["input"]}), False, "here", -100)
    assert unread.label("label", np.arange(3)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("loss", ["mse", "math:hypot"])
def test_labels_of_three_axes_are_no_images_where_no_input_is_one(loss):
    """PyTorch got (1, 5, 5) for (5, 5, 1), which an own loss compared with outputs (5, 5, 1) by broadcasting."""
    x, y = np.zeros((8, 6), np.float32), np.arange(200, dtype=np.float32).reshape(8, 5, 5, 1)
    keys = {"data": {"name": "mine:data"}, "task": {"loss": loss, "metrics": []}}

    def label(inputs, labels, **more):
        config = load_config(base=keys | {"data": keys["data"] | more})
        return open_data(config.data, config.task, ((inputs, labels), (inputs, labels))).sample.labels["label"]

    assert not label(x, y).image and label(x, y).shape == (5, 5, 1)
    assert label(x, y, images=True).image
    assert label(np.zeros((8, 5, 5, 3), np.float32), y).image and label(np.zeros((8, 9, 9, 3), np.float32), y).image
    field = label(x, y.astype(np.uint8))
    assert (field.divisor, field.dtype) == ((255.0, "uint8") if loss == "mse" else (1.0, "int64"))
