"""Data sets that give whole batches: a tf.data.Dataset and a PyDataset of Keras, read as streams of samples."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hvd_train.config import load_config
from hvd_train.data import batched
from hvd_train.data.catalog import open_data
from hvd_train.data.dataset import DataRequest
from hvd_train.data.formats import read_digits
from hvd_train.data.loader import Loader
from hvd_train.errors import DataError
from tests.launching import needs_horovod
from tests.limits import SECONDS

ROOT = Path(__file__).parents[2]
tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")
IMAGES, LABELS = read_digits()
COUNT = 103
ROWS = tf.data.Dataset.from_tensor_slices((IMAGES[:COUNT] / 16, LABELS[:COUNT]))


class Batches(keras.utils.PyDataset):
    """``sizes``: the size of each batch."""

    def __init__(self, *sizes):
        super().__init__()
        self.ends = np.cumsum([0, *sizes]).tolist()

    def __len__(self):
        return len(self.ends) - 1

    def __getitem__(self, k):
        rows = slice(self.ends[k], self.ends[k + 1])
        return IMAGES[rows] / 16, LABELS[rows]


class Listed(Batches):
    def __getitem__(self, k):
        images, labels = super().__getitem__(k)
        return [images, images], labels


TENS = Batches(*[10] * 10, 3)


RAGGED = tf.data.Dataset.from_tensor_slices((tf.ragged.constant([[1, 2], [3]]), [0, 1]))


def opened(part, **keys):
    config = load_config(base={"data": {"name": "mine:data", "num_classes": 10} | keys})
    return open_data(config.data, config.task, (part, part), DataRequest())


def twice(images, labels):
    return images * 1, labels


@pytest.mark.parametrize(
    ("part", "count"),
    [
        (ROWS, COUNT),
        (ROWS.batch(10), COUNT),
        (ROWS.batch(10, drop_remainder=True), 100),
        (ROWS.map(twice).batch(7).map(twice).prefetch(2), COUNT),
        (ROWS.padded_batch(9), COUNT),
        (ROWS.batch(4).unbatch(), COUNT),
        (TENS, COUNT),
        (Batches(COUNT), COUNT),
        (Batches(40, 40, 60), 140),
    ],
)  # fmt: skip
def test_samples_of_batches(part, count):
    data = opened(part)
    assert len(data.train) == len(data.val) == count and data.sample.labels["label"].classes == 10
    inputs, labels = data.train.fetch(np.arange(count))
    assert np.array_equal(labels["label"], LABELS[:count])
    assert np.array_equal(
        inputs["input"].reshape(count, -1), (IMAGES[:count] / 16).astype(np.float32).reshape(count, -1)
    )


def generated(count):
    return tf.data.Dataset.from_generator(
        lambda: ((np.ones(3), k % 10) for k in range(count)),
        output_signature=(tf.TensorSpec([3], tf.float32), tf.TensorSpec([], tf.int64)),
    )


def test_what_an_element_is():
    """As ``model.fit`` wants it: a batch, if all arrays have the first axis in common."""
    windows = tf.data.Dataset.range(20).window(5, 1, drop_remainder=True).flat_map(lambda w: w.batch(5))
    data = opened(windows.map(lambda w: (tf.cast(w[:4], tf.float32), w[4] % 10)))
    assert len(data.train) == 16 and data.sample.inputs["input"].shape == (4,)
    assert "an element of the tf.data.Dataset is one sample: 16 samples" in data.train.note
    assert len(opened(generated(17)).train) == 17
    pairs = ROWS.batch(9, drop_remainder=True)
    assert "is a batch, as model.fit takes it: 99 samples" in opened(pairs).train.note


def test_a_generator_that_never_ends_is_told(monkeypatch):
    monkeypatch.setattr(batched, "MOST_SECONDS", 0.5)
    with pytest.raises(DataError, match=r"has not ended after 0 s and .* samples; .*assert_cardinality\(n\)"):
        opened(generated(10**12))


def trained_on(data, ranks, epoch, consumed=0):
    parts = []
    for rank in range(ranks):
        loader = Loader(data, global_batch=16, rank=rank, size=ranks, seed=3)
        batches = [batch for step in loader.epoch(epoch, consumed) for batch in step.micro_batches]
        parts.append([one.labels["label"][: one.count] for one in batches])
    return np.concatenate([part for step in zip(*parts, strict=True) for part in step])


@pytest.mark.parametrize("part", [ROWS.shuffle(50, seed=1, reshuffle_each_iteration=False).batch(9), TENS])
def test_ranks_and_a_resumed_epoch_read_the_same(part):
    train = opened(part).train
    for epoch in (0, 1):
        want = trained_on(train, 1, epoch)
        assert np.array_equal(np.bincount(want), np.bincount(LABELS[:COUNT]))
        assert all(np.array_equal(trained_on(train, ranks, epoch), want) for ranks in (2, 3))
        assert np.array_equal(trained_on(train, 2, epoch, consumed=48), want[48:])


def alone(part, **keys):
    config = load_config(base={"data": {"name": "mine:data", "num_classes": 10, **keys}})
    return open_data(config.data, config.task, part, DataRequest())


@pytest.mark.parametrize("part", [ROWS, ROWS.batch(9), TENS])
@pytest.mark.parametrize("keys", [{"val_fraction": 0.3}, {"fold": [1, 4]}, {"val_fraction": 0.1}])
def test_one_of_them_alone_is_divided(part, keys):
    data = alone(part, **keys)
    train, val = trained_on(data.train, 1, 0), trained_on(data.val, 1, 0)
    share = keys.get("val_fraction", 0.25)
    assert len(train) == len(data.train) and len(val) == len(data.val) and len(train) + len(val) == COUNT
    assert abs(len(val) - share * COUNT) < (10 if part is TENS else 2)
    assert np.array_equal(np.bincount(np.append(train, val), minlength=10), np.bincount(LABELS[:COUNT], minlength=10))
    rows = [part.fetch(np.array([k]))[0]["input"].ravel() for part in (data.train, data.val) for k in range(len(part))]
    assert sorted(map(tuple, rows)) == sorted(map(tuple, (IMAGES[:COUNT] / 16).astype(np.float32).reshape(COUNT, -1)))
    for epoch in (0, 1):
        want = trained_on(data.train, 1, epoch)
        assert np.array_equal(np.sort(want), np.sort(train))
        assert np.array_equal(trained_on(data.train, 2, epoch, consumed=32), want[32:])
    assert data.train.fingerprint != data.val.fingerprint
    first = int(np.argmax(np.diff(np.floor(np.arange(COUNT + 1) * share)) > 0))
    assert "fold" in keys or part is TENS or val[0] == LABELS[first], "spread over the order, and not its end"


def test_one_that_is_too_short_to_be_divided():
    with pytest.raises(DataError, match=r"0.1 of 3 in a row leaves nothing to hold out"):
        alone(Batches(10, 10, 10), val_fraction=0.1)
    with pytest.raises(DataError, match=r"3 in a row cannot be divided into 5 folds"):
        alone(Batches(10, 10, 10), fold=[0, 5])


def test_batches_of_a_pydataset_are_shuffled_after_the_first_epoch():
    train = opened(TENS).train
    assert np.array_equal(trained_on(train, 1, 0), LABELS[:COUNT])
    later = trained_on(train, 1, 1)
    blocks = [tuple(later[k : k + 10]) for k in range(0, 100, 10)]
    assert sorted(blocks) == sorted(tuple(LABELS[k : k + 10]) for k in range(0, 100, 10))
    assert not np.array_equal(later, LABELS[:COUNT]) and np.array_equal(later[100:], LABELS[100:COUNT])


def test_classes_of_folders(tmp_path):
    for k, name in enumerate(("cat", "dog", "eel")):
        (tmp_path / name).mkdir()
        image = np.repeat(IMAGES[k][..., None] * 15, 3, -1).astype(np.uint8)
        for copy in range(3):
            keras.utils.save_img(tmp_path / name / f"{copy}.png", image, scale=False)
    part = keras.utils.image_dataset_from_directory(tmp_path, image_size=(8, 8), shuffle=False, verbose=False)
    data = opened(part, num_classes=None)
    assert data.sample.labels["label"].classes == 3
    assert data.sample.labels["label"].names == ("cat", "dog", "eel")
    assert data.train.fetch(np.arange(9))[1]["label"].tolist() == [0] * 3 + [1] * 3 + [2] * 3
    shutil.copytree(tmp_path, tmp_path / "val")
    shutil.rmtree(tmp_path / "val" / "dog")  # eel is 1 there
    fewer = keras.utils.image_dataset_from_directory(tmp_path / "val", image_size=(8, 8), shuffle=False, verbose=False)
    config = load_config(base={"data": {"name": "mine:data"}})
    with pytest.raises(DataError, match="numbers its classes cat, eel, and the training part has cat, dog, eel"):
        open_data(config.data, config.task, (part, fewer), DataRequest())


@pytest.mark.parametrize(
    ("part", "told"),
    [
        (ROWS.shuffle(50).batch(9), "a second iteration has other samples, .*reshuffle_each_iteration=False"),
        (ROWS.repeat(), r"never ends; .*leave repeat\(\) out"),
        (ROWS.map(lambda image, label: image), r"an element of the tf.data.Dataset is no pair; .*\(inputs, labels\)"),
        (Batches(10, 9, 10), "batch 1 of the PyDataset has 9 samples, and the first has 10; .*the same size"),
        (Batches(), "the data set is empty"),
        (ROWS.map(lambda x, y: ((x, x), y)), r"inputs are a tuple of 2; .*dict of arrays by their names"),
        (ROWS.batch(5).shuffle(21), "a second iteration has other samples, .*reshuffle_each_iteration=False"),
        (Listed(5, 5), "inputs are a list of 2; .*dict of arrays by their names"),
        (RAGGED, "has ragged tensors, .*padded_batch"),
        (ROWS.take(0), "the data set is empty"),
    ],
)  # fmt: skip
def test_bad_data(part, told):
    with pytest.raises(DataError, match=told):
        opened(part).train.fetch(np.arange(29))


def test_the_number_of_classes_must_be_known():
    with pytest.raises(DataError, match="the number of classes is not known: .*set data.num_classes"):
        opened(ROWS.batch(9), num_classes=None)


JOB = """
import keras
import tensorflow as tf
from hvd_train.data.formats import read_digits

IMAGES, LABELS = read_digits()

def pipeline():
    rows = tf.data.Dataset.from_tensor_slices((IMAGES[:403] / 16, LABELS[:403]))
    return rows.shuffle(403, seed=2, reshuffle_each_iteration=False).batch(32), rows.take(103).batch(32)

class Batches(keras.utils.PyDataset):
    def __init__(self, count):
        super().__init__()
        self.count = count
    def __len__(self):
        return -(-self.count // 32)
    def __getitem__(self, k):
        rows = slice(32 * k, min(32 * k + 32, self.count))
        return IMAGES[rows] / 16, LABELS[rows]

def batches():
    return Batches(403), Batches(103)
"""


@pytest.mark.parametrize("function", ["pipeline", "batches"])
def test_training_on_two_ranks(function, tmp_path):
    needs_horovod()
    (tmp_path / "mine.py").write_text(JOB)
    words = [sys.executable, "-P", "-m", "hvd_train", "fit", "--set", f"data.name=mine:{function}"]
    settings = ("framework=tensorflow", "model={name: mlp, hidden: [8]}", "max_epochs=2", "precision=64")
    for setting in (*settings, "data.num_classes=10"):
        words += ["--set", setting]
    losses = []
    for ranks in (1, 2):
        line = [*words, "-np", str(ranks), "--set", f"batch_size={64 // ranks}", "--run-dir", f"runs/{ranks}"]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        losses.append(json.loads((tmp_path / "runs" / str(ranks) / "summary.json").read_text())["val_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_masked_values_are_missing():
    class Masked(Batches):
        def __getitem__(self, k):
            images, labels = super().__getitem__(k)
            return np.ma.masked_greater(images, 0.9), labels

    with pytest.raises(DataError, match="masked array, and .* missing"):
        opened(Masked(10, 10))


def test_changed_samples_are_other_data():
    pairs = [tf.data.Dataset.from_tensor_slices((IMAGES[:20] / by, LABELS[:20])).batch(4) for by in (16, 16, 15)]
    one, again, other = (opened(pair).train.fingerprint for pair in pairs)
    assert one == again != other
