"""What holds for data of every kind: names, paths, memory."""

import gzip
import struct

import numpy as np
import pytest
from PIL import Image

from hvd_train.data.catalog import catalog
from hvd_train.data.kinds import KINDS
from tests.data.files import (
    IMAGES,
    fault,
    mnist,
    pictures,
    write,
)


def test_more_memory_than_is_free_is_told_before_it_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr("hvd_train.data.memory.free", lambda: 100_000_000)
    pictures(tmp_path / "photos")
    big = tmp_path / "photos" / "cat" / "big.png"
    Image.new("1", (9_000, 9_000)).save(big)
    text = fault("imagefolder", tmp_path / "photos", image_size=8)
    assert "an image of 9,000 x 9,000 pixels takes 567 MB of memory, and 100 MB are free" in text and str(big) in text
    mnist(tmp_path, gz=True)
    file = tmp_path / f"{IMAGES}.gz"
    file.write_bytes(gzip.compress(struct.pack(">HBB3I", 0, 8, 3, 200_000, 100, 100)))
    assert "unpacking (200000, 100, 100) takes 2.0 GB of memory" in fault("idx", tmp_path)
    assert "reading all arrays takes 240 MB" in fault(
        "npz", write("npz", tmp_path, {"x": np.zeros((10, 3_000_000)), "y": np.arange(8) % 2})
    )


def test_unknown_names():
    text = fault("digitss")
    assert "did you mean 'digits'" in text
    assert all(name in text for name in KINDS)
    assert "imagefolder" in fault("qqq")


@pytest.mark.parametrize("name", ["idx", "npz", "npy", "hdf5", "imagefolder", "text"])
def test_missing_paths(tmp_path, name):
    assert "needs a path; data.path" in fault(name)
    gone = tmp_path / "gone"
    text = fault(name, gone)
    assert "no such file or folder" in text
    assert str(gone) in text


def test_image_size_is_not_ignored(tmp_path):
    assert "data.image_size" in fault("synthetic", image_size=8)


@pytest.mark.parametrize("name", ["digits", "synthetic", "mine:squares"])
def test_a_path_is_not_ignored(name):
    """Who forgets ``data.name`` would train on the digits of its default."""
    text = fault(name, "photos")
    assert f"data set '{name}' reads no path; data.path: photos; " in text and "leave it out" in text


def test_catalog_has_one_line_each():
    assert list(catalog()) == list(KINDS)
    assert all(line and "\n" not in line for line in catalog().values())
