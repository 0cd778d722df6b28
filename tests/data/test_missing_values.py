"""What is missing, or comes late, is told: it is never 0, and never what the first samples were."""

from __future__ import annotations

import h5py
import numpy as np
import pytest

from hvd_train.config import DataConfig, TaskConfig
from hvd_train.data.catalog import open_data, pack
from hvd_train.data.dataset import DataRequest
from hvd_train.data.packing import Alone
from hvd_train.errors import DataError
from tests.data.files import fault

X = np.arange(40, dtype=np.float32).reshape(20, 2)
Y = np.arange(20, dtype=np.float32)
MSE, BCE = TaskConfig(loss="mse"), TaskConfig(loss="bce")


def opened(train, task=MSE, **keys):
    return open_data(DataConfig(name="mine:x", **keys), task, user_data=(train, train))


def told(train, task=MSE, rows=(), **keys):
    with pytest.raises(DataError) as caught:
        data = opened(train, task, **keys)
        data.train.fetch(np.array(rows))
    return str(caught.value)


class Fetched:
    """A source whose sample k has what ``inputs(k)`` and ``labels(k)`` give."""

    fingerprint, num_classes = "fetched", 3

    def __init__(self, labels, inputs=lambda k: np.zeros((len(k), 2), np.float32), n=1000):
        self.labels, self.inputs, self.n = labels, inputs, n

    def __len__(self):
        return self.n

    def fetch(self, indices):
        return self.inputs(np.asarray(indices)), self.labels(np.asarray(indices))


class Streamed:
    """The same samples as a stream."""

    fingerprint = "streamed"

    def __init__(self, source):
        self.source = source

    def __len__(self):
        return self.source.n

    def __iter__(self):
        for k in range(self.source.n):
            (x,), (y,) = self.source.fetch(np.array([k]))
            yield x, y


def test_values_below_the_mask_of_an_array_are_no_samples():
    """NumPy hands out what lies below the mask, which was learned."""
    labels = np.ma.array(Y, mask=Y == 3)
    assert "labels are a masked array, and 1 values are missing, the first at [3]" in told((X, labels))
    inputs = np.ma.array(X, mask=X == 9)
    assert "the first at [4, 1]" in told((inputs, Y))
    assert "inputs 'a' are a masked array" in told(({"a": inputs}, Y))
    whole = opened((np.ma.array(X), np.ma.array(Y))).train.fetch(np.arange(20))
    assert (whole[0]["input"] == X).all() and (whole[1]["label"] == Y).all()
    late = Fetched(lambda k: np.ma.array(k * 1.0, mask=k == 700))
    assert "labels are a masked array" in told(late, rows=[3, 700])
    samples = [np.ma.array([1.0, 2.0], mask=[0, k == 5]) for k in range(9)]
    assert "inputs of sample 5 are a masked array" in told((samples, np.arange(9.0)), lengths={"max_length": 4})
    ones = Fetched(lambda k: np.zeros(1), lambda k: np.ma.array(np.ones((1, 2)), mask=[[False, k[0] == 3]]), 9)
    with pytest.raises(DataError, match="inputs of sample 3 are a masked array"):
        opened(Streamed(ones)).train.fetch(np.arange(9))


def test_rows_of_hdf5_that_were_never_written(tmp_path):
    """They are read as zeros: the labels of half of the samples were class 0."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["x"] = X
        file.create_dataset("y", (20,), "i8", chunks=(5,))[:10] = 1
    assert "part of it, (20,) int64, was never written, and would be read as 0" in fault("hdf5", path)
    with h5py.File(path, "w") as file:
        file["x"] = X
        file.create_dataset("y", (20,), "i8")
    assert "was never written" in fault("hdf5", path)
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=X, chunks=(3, 2), compression="gzip")
        file.create_dataset("y", (20,), "i8", chunks=(5,))[:] = np.arange(20) % 2
    assert len(open_data(DataConfig(name="hdf5", path=str(path))).train) == 16


def test_numbers_that_netcdf_says_stand_for_others(tmp_path):
    """A fill value was learned as a number, and packed numbers without their scale."""
    for key, value, words in (
        ("_FillValue", 7.0, "'x' holds 7.0, which marks a missing value"),
        ("missing_value", [7.0], "'x' holds 7.0, which marks a missing value"),
        ("scale_factor", 0.1, "'x' has a scale_factor: its numbers are packed"),
        ("_Unsigned", "true", "'x' has a _Unsigned: its numbers are packed"),
    ):
        path = tmp_path / f"{key}.h5"
        with h5py.File(path, "w") as file:
            file["x"], file["y"] = X, np.arange(20) % 2
            file["x"].attrs[key] = value
        assert words in fault("hdf5", path)
    path = tmp_path / "nan.h5"
    with h5py.File(path, "w") as file:
        file["x"], file["y"] = X, np.arange(20) % 2
        file["x"].attrs["_FillValue"] = np.float32(np.nan)
    data = open_data(DataConfig(name="hdf5", path=str(path)))
    assert data.train.fetch(np.arange(16))[0]["input"].shape == (16, 2)


def test_labels_of_yes_and_no_are_looked_at_wherever_they_are(tmp_path):
    """Of a source of the user's the first 64 were: a label of 7 has no loss that is bounded below."""
    late = Fetched(lambda k: np.where(k == 700, 7.0, k % 2))
    assert "sample 700 holds a label that is not from 0 to 1" in told(late, BCE, [699, 700])
    stream = Streamed(Fetched(lambda k: np.where(k == 90, 7.0, k % 2), n=100))
    with pytest.raises(DataError, match="sample 90 holds a label that is not from 0 to 1"):
        opened(stream, BCE).train.fetch(np.arange(100))
    itself = opened(late, BCE, target="inputs").train.fetch(np.array([700]))  # no label is read
    assert (itself[1]["label"] == 0).all()
    masks = np.zeros((1000, 4, 4), np.uint8)
    masks[900:] = 1
    source = Fetched(lambda k: masks[k], lambda k: np.zeros((len(k), 4, 4, 1), np.uint8))
    assert "labels 'label' are uint8 of 0 and 1" in told(source, BCE)
    np.savez(tmp_path / "a.npz", x=np.zeros((200, 2)), y=np.where(np.arange(200) == 150, 7.0, 1))
    pack(DataConfig(name="npz", path=str(tmp_path / "a.npz")), MSE, tmp_path / "packed", Alone())
    with pytest.raises(DataError, match="has the label 7, and task.loss: bce takes 0 to 1"):
        open_data(DataConfig(name="packed", path=str(tmp_path / "packed")), BCE)
    run = opened((np.zeros((9, 2)), np.ones(9)), BCE).sample
    with pytest.raises(DataError, match="has the label 7, and task.loss: bce takes 0 to 1"):  # of both parts together
        open_data(DataConfig(name="packed", path=str(tmp_path / "packed")), BCE, request=DataRequest(run, "all"))


def test_words_of_a_source_that_does_not_know_all_of_them():
    """They ended in a traceback: the names were those of the first sample."""
    words = np.array(["cat", "dog", "cow"])
    said = told(Fetched(lambda k: words[k % 3]), TaskConfig())
    assert "labels of fetch are words, as 'cat'; " in said and "number the classes 0, 1, ..." in said


def test_words_that_stand_for_no_value_are_told():
    data = opened((X, np.array(["a", "b", "nan", "b"] * 5)), TaskConfig())
    assert any("labels: 'nan' is treated as a class" in line for line in data.remarks)


@pytest.mark.parametrize(("first", "later"), [(np.float32, np.uint8), (np.uint8, np.float32), (np.uint8, np.int64)])
def test_bytes_among_other_numbers_have_another_scale(first, later):
    """Bytes are divided by 255: where the first sample had fractions, later bytes came 255 times as large."""
    source = Fetched(lambda k: k % 2, lambda k: np.ones((len(k), 4, 4), later if k[0] > 9 else first))
    said = told(source, TaskConfig(), [10, 11])
    assert f"inputs of sample 0 are {first.__name__}, and those of sample 10 {later.__name__}" in said
    assert (opened(source, TaskConfig()).train.fetch(np.arange(3))[0]["input"] == 1).all()
    labels = Fetched(lambda k: (k % 2).astype(np.uint8 if k[0] > 9 else np.float32))  # which are never divided
    assert opened(labels, BCE).train.fetch(np.array([10, 11]))[1]["label"].tolist() == [0, 1]


def test_words_among_numbers_of_a_list():
    """NumPy made words of all: 1, 10 and 2 were classes 0, 1 and 2."""
    for labels in ([1, 10, "none", 2] * 5, ["cat", float("nan"), "dog", "cat"] * 5):
        assert "labels hold words and numbers: " in told((X, labels), TaskConfig())
    words = ["1", "10", "none", "2"] * 5
    assert opened((X, words), TaskConfig()).sample.num_classes == 4
    assert opened((X, np.array(words, object)), TaskConfig()).sample.num_classes == 4  # as pandas has them
