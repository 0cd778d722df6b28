"""MNIST's format, digits and Fashion-MNIST: what was written is read; every fault is one line."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from hvd_train.data import formats
from tests.data.files import (
    IMAGES,
    everything,
    fault,
    idx,
    mnist,
    opened,
    taken,
)

FASHION = Path("/usr/share/datasets/fashion-mnist")


@pytest.mark.parametrize("dot", ["-", "."])
@pytest.mark.parametrize("gz", [False, True])
def test_idx(tmp_path, dot, gz):
    parts = mnist(tmp_path, dot=dot, gz=gz)
    data = opened("idx", tmp_path)
    assert data.sample.input_shape == (6, 5, 1)
    assert data.sample.num_classes == 10
    for source, (images, labels) in zip((data.train, data.val), parts.values(), strict=True):
        inputs, got = everything(source)
        assert np.array_equal(inputs[..., 0], images / np.float32(255))
        assert np.array_equal(got, labels)


def test_idx_plain_and_packed_are_the_same_data(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    parts = mnist(tmp_path / "a")
    for part, arrays in parts.items():
        for kind, array in zip(("images", "labels"), arrays, strict=True):
            packed = tmp_path / "b" / f"{part}-{kind}.idx{array.ndim}-ubyte.gz"
            packed.write_bytes(gzip.compress(idx(array)))
    assert opened("idx", tmp_path / "a").fingerprint == opened("idx", tmp_path / "b").fingerprint


def test_idx_resized(tmp_path):
    mnist(tmp_path)
    data = opened("idx", tmp_path, image_size=12)
    assert data.sample.input_shape == (12, 12, 1)
    assert everything(data.train)[0].max() <= 1


LABELS = "train-labels-idx1-ubyte"
FAULTS = {
    "truncated": (IMAGES, lambda b: b[:-7], ["truncated", "616 bytes expected", "609 found", IMAGES]),
    "long": (IMAGES, lambda b: b + b"x", ["too long", "616 bytes expected", "617 found", IMAGES]),
    "header": (IMAGES, lambda b: b[:9], ["truncated", "16 bytes of header", "9 found"]),
    "empty file": (IMAGES, lambda b: b"", ["truncated", "0 found", IMAGES]),
    "magic": (IMAGES, lambda b: b"\x89PNG" + b[4:], ["89 50 4e 47", IMAGES]),
    "dtype": (IMAGES, lambda b: b[:2] + b"\x0d" + b[3:], ["00 00 0d 03", IMAGES]),
    "dims": (LABELS, lambda b: idx(np.zeros((20, 1), np.uint8)), ["1-dimensional", "00 00 08 02", LABELS]),
    "huge": (IMAGES, lambda b: b[:4] + b"\xff" * 12, ["truncated", "16 found"]),
    "count": (LABELS, lambda b: idx(np.zeros(19, np.uint8)), ["20 images", "19 labels", LABELS]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_idx_faults(tmp_path, name):
    mnist(tmp_path)
    file, damage, words = FAULTS[name]
    path = tmp_path / file
    path.write_bytes(damage(path.read_bytes()))
    text = fault("idx", tmp_path)
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda b: gzip.compress(b)[:-40], ["616 bytes expected", "found"]),
        (lambda b: gzip.compress(b[:-7]), ["616 bytes expected", "609 found"]),
        (lambda b: gzip.compress(b + bytes(5000)), ["too long", "616 bytes expected", "over 616 found"]),
        (lambda b: b, ["no readable IDX file"]),
        (lambda b: gzip.compress(b)[:30] + b"\xff" * 60, ["train-images"]),
    ],
)
def test_idx_packed_faults(tmp_path, damage, words):
    mnist(tmp_path, gz=True)
    path = tmp_path / f"{IMAGES}.gz"
    path.write_bytes(damage(gzip.decompress(path.read_bytes())))
    text = fault("idx", tmp_path)
    assert all(word in text for word in [*words, path.name]), text


def test_idx_without_its_files(tmp_path):
    assert "train-images-idx3-ubyte (or .gz)" in fault("idx", tmp_path)
    mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    assert "t10k-labels-idx1-ubyte" in fault("idx", tmp_path)


@pytest.mark.skipif(not FASHION.exists(), reason="the package dataset-fashion-mnist is not installed")
def test_fashion_mnist():
    data = opened("idx", FASHION)
    assert (len(data.train), len(data.val), data.sample.num_classes) == (60_000, 10_000, 10)
    assert data.sample.input_shape == (28, 28, 1)
    labels = taken(data.train, np.arange(0, 60_000, 60))[1]
    assert set(labels.tolist()) == set(range(10))
    assert np.bincount(everything(data.val)[1]).tolist() == [1000] * 10


def test_digits():
    data = opened("digits")
    train, val = everything(data.train), everything(data.val)
    assert (len(data.train), len(data.val)) == (1438, 359)
    assert data.sample.input_shape == (8, 8, 1)
    assert train[0].min() == 0
    assert train[0].max() == 1
    both = np.bincount(train[1]) + np.bincount(val[1])
    assert np.abs(np.bincount(val[1]) - both / 5).max() <= 0.5
    rows = np.concatenate([data.train.rows, data.val.rows])
    assert np.array_equal(np.sort(rows), np.arange(1797))


def test_digits_resized_show_the_same_digits():
    small, large = opened("digits"), opened("digits", image_size=28)
    assert large.sample.input_shape == (28, 28, 1)
    (a, labels), (b, same) = everything(small.train), everything(large.train)
    assert np.array_equal(labels, same)
    assert 0 <= b.min() <= b.max() <= 1
    assert abs(a.mean() - b.mean()) < 0.01
    assert small.fingerprint != large.fingerprint
    assert large.fingerprint == opened("digits", image_size=28).fingerprint


def test_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    expected, (images, labels) = load_digits(), formats.read_digits()
    assert (images == expected.images).all() and (labels == expected.target).all()
