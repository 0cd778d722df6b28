"""Text as bytes, and labels at each place."""

import numpy as np
import pytest

from hvd_train.data.arrays import Arrays
from hvd_train.errors import DataError
from tests.data.files import RNG, fault, opened, taken, write


@pytest.mark.parametrize("length", [1, 2, 7, 16])
@pytest.mark.parametrize("extra", [0, 1, 5])
@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.99])
def test_text_reads_every_byte_once_and_its_next(tmp_path, length, extra, fraction):
    path = tmp_path / "some.bin"
    path.write_bytes(RNG.integers(0, 256, 20 * length + 1 + extra, np.uint8).tobytes())
    data = opened("text", path, sequence_length=length, val_fraction=fraction)
    count = (20 * length + extra) // length
    held = min(count - 1, max(1, round(fraction * count)))
    assert (len(data.train), len(data.val)) == (count - held, held)
    assert data.sample.input_shape == (length,) and data.sample.num_classes == 256
    whole, parts = np.fromfile(path, np.uint8), [taken(part, np.arange(len(part))) for part in (data.train, data.val)]
    inputs, labels = (np.concatenate(arrays).ravel() for arrays in zip(*parts, strict=True))
    assert (inputs.dtype, labels.dtype) == (np.uint8, np.int64)
    assert parts[0][0].shape == parts[0][1].shape == (count - held, length)
    assert np.array_equal(inputs, whole[: count * length])
    assert np.array_equal(labels, whole[1 : count * length + 1])
    picked = np.array([len(data.train) - 1, 0])
    assert np.array_equal(taken(data.train, picked)[1], parts[0][1][picked])


def test_text_of_a_folder_is_that_of_its_files_in_order(tmp_path):
    whole = b""
    for name in ("B.txt", "a.md", "deep/a/c.rst", "deep/b.PY", "empty.txt", "z.py"):
        (tmp_path / "all" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "all" / name).write_bytes(b"" if "empty" in name else name.encode() * 40)
        whole += (tmp_path / "all" / name).read_bytes()
    for name in (".hidden.txt", ".git/x.txt", "picture.png"):
        (tmp_path / "all" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "all" / name).write_bytes(b"not this")
    (tmp_path / "joined").write_bytes(whole)
    folder, file = opened("text", tmp_path / "all"), opened("text", tmp_path / "joined")
    assert folder.fingerprint == file.fingerprint
    assert np.array_equal(taken(folder.train, np.arange(3))[0], taken(file.train, np.arange(3))[0])
    (tmp_path / "joined").write_bytes(whole.replace(b"B", b"b"))
    prints = [opened("text", tmp_path / "joined", **keys).fingerprint for keys in ({}, {"sequence_length": 64})]
    assert len({*prints, folder.fingerprint}) == 3


def test_text_faults(tmp_path):
    assert "no text files in this folder" in fault("text", tmp_path) and ".rst" in fault("text", tmp_path)
    path = tmp_path / "short.txt"
    path.write_bytes(b"")
    assert f"0 bytes are too few for a training and a validation sample of 128; {path}" in fault("text", path)
    path.write_bytes(b"x" * 256)
    assert "256 bytes" in fault("text", tmp_path) and "give at least 257" in fault("text", path)
    path.write_bytes(b"x" * 257)
    assert len(opened("text", tmp_path).val) == 1
    assert "3 classes are set; data.num_classes" in fault("text", path, num_classes=3)


def test_labels_at_every_place(tmp_path):
    """(n, T) labels of (n, T) inputs go through files, subsets and splits."""
    tokens = RNG.integers(0, 9, (20, 7)).astype(np.int32)
    path = write("npz", tmp_path, {"x": tokens, "y": 8 - tokens})
    data = opened("npz", path)
    assert data.sample.num_classes == 9 and (len(data.train), len(data.val)) == (16, 4)
    for part in (data.train, data.val):
        inputs, labels = taken(part, np.arange(len(part)))
        assert labels.dtype == np.int64 and labels.shape == (len(part), 7)
        assert np.array_equal(8 - inputs, labels)
    images = Arrays(np.zeros((3, 4, 5), np.float32), np.ones((3, 4, 5), int), "test")
    assert taken(images, np.arange(2))[1].shape == (2, 4, 5)
    for shape in ((20, 6), (20, 7, 1), (20, 0)):
        with pytest.raises(DataError, match="per position of the inputs"):
            Arrays(tokens, np.zeros(shape, int), "test")
    tokens[11, 3] = -2
    with pytest.raises(DataError, match="label -2 of sample 11 "):
        Arrays(tokens, tokens, "test")
