"""Arrays of .npz, .npy and HDF5: read as written, divided fairly; every fault is one line."""

import struct
import sys
import tracemalloc
import zipfile
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import h5py
import numpy as np
import pytest

from hvd_train.config import DataConfig, TaskConfig
from hvd_train.data.arrays import Arrays
from hvd_train.data.catalog import open_data
from hvd_train.errors import DataError
from tests.data.files import (
    NAMES,
    RNG,
    arrays,
    everything,
    fault,
    for_testing,
    opened,
    taken,
    write,
)


@pytest.fixture(params=["npz", "npy", "hdf5"])
def kind(request):
    return request.param


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64, np.float16])
@pytest.mark.parametrize("shape", [(7,), (4, 3), (4, 3, 2)])
def test_named_arrays(tmp_path, kind, dtype, shape):
    named = arrays(shape=shape, dtype=dtype)
    data = opened(kind, write(kind, tmp_path, named))
    image = dtype == np.uint8  # two channels of other types are none
    assert data.sample.input_shape == ((*shape, 1) if image and len(shape) == 2 else shape)
    assert data.sample.inputs["input"].image == (image and len(shape) > 1)
    assert data.sample.num_classes == 3
    for source, x, y in ((data.train, "train_x", "train_y"), (data.val, "val_x", "val_y")):
        inputs, labels = everything(source)
        expected = named[x].astype(np.float32) / (np.float32(255) if dtype == np.uint8 else np.float32(1))
        assert np.array_equal(inputs.reshape(expected.shape), expected)
        assert np.array_equal(labels, named[y])
    picked = np.array([9, 2, 2, 0])
    assert np.array_equal(taken(data.train, picked)[0], everything(data.train)[0][picked])


SHAPES = [  # a sample's shape, its type, data.images, the field's shape, an image
    ((12, 7), "float32", None, (12, 7), False),
    ((12, 7), "float64", True, (12, 7, 1), True),
    ((12, 7), "uint8", None, (12, 7, 1), True),
    ((12, 7), "uint8", False, (12, 7), False),
    ((12, 7), "int64", None, (12, 7), False),
    ((8, 8, 3), "float32", None, (8, 8, 3), True),
    ((8, 8, 1), "float16", None, (8, 8, 1), True),
    ((8, 8, 3), "float32", False, (8, 8, 3), False),
    ((8, 8, 4), "float32", None, (8, 8, 4), False),
    ((8, 8, 4), "float32", True, (8, 8, 4), True),
    ((8, 8, 4), "uint8", None, (8, 8, 4), True),
    ((5,), "float32", True, (5,), False),
]


@pytest.mark.parametrize(("shape", "dtype", "images", "field", "image"), SHAPES)
def test_only_what_is_declared_or_read_as_an_image_is_one(tmp_path, kind, shape, dtype, images, field, image):
    named = {name: x.astype(dtype) if name.endswith("x") else x for name, x in arrays(shape=shape).items()}
    data = opened(kind, write(kind, tmp_path, named), images=images)
    sys.modules["own_pair"] = SimpleNamespace(
        pair=lambda: tuple((named[f"{part}_x"], named[f"{part}_y"]) for part in ("train", "val"))
    )
    for source in (data.train, data.val, opened("own_pair:pair", images=images).train):
        found = source.sample.inputs["input"]
        assert (found.shape, found.image) == (field, image)
        assert source.fetch(np.arange(3))[0]["input"].shape == (3, *field)


@pytest.mark.parametrize("names", [("x", "y"), ("train_x", "train_y")])
def test_one_part_is_split_fairly(tmp_path, kind, names):
    labels = np.repeat([0, 1, 2], [50, 30, 10])
    inputs = np.arange(90, dtype=np.float32)[:, None]
    data = opened(kind, write(kind, tmp_path, dict(zip(names, (inputs, labels), strict=True))), val_fraction=0.1)
    assert np.bincount(everything(data.val)[1]).tolist() == [5, 3, 1]
    both = np.concatenate([everything(data.train)[0], everything(data.val)[0]])
    assert np.array_equal(np.sort(both, axis=0), inputs)


def test_a_class_of_one_stays_in_training():
    train, val = Arrays(np.zeros((5, 1), np.float32), np.array([0, 0, 0, 0, 1]), "test").split(0.5)
    assert 1 in taken(train, np.arange(len(train)))[1]
    assert len(val) == 2
    with pytest.raises(DataError, match="held out"):
        Arrays(np.zeros((2, 1), np.float32), np.array([0, 1]), "test").split(0.5)


def test_equal_data_has_an_equal_fingerprint(tmp_path, kind):
    named = arrays(n=3000)
    first = opened(kind, write(kind, tmp_path / "a", named)).fingerprint
    assert opened(kind, write(kind, tmp_path / "b", named)).fingerprint == first
    for name in NAMES:
        changed = {**named, name: named[name].copy()}
        changed[name][-1] = (changed[name][-1] + 1) % 3
        assert opened(kind, write(kind, tmp_path / name, changed)).fingerprint != first
    shorter = {**named, "val_x": named["val_x"][:-1], "val_y": named["val_y"][:-1]}
    assert opened(kind, write(kind, tmp_path / "c", shorter)).fingerprint != first


def bad(**changes):
    return {**arrays(), **changes}


def with_label(value):
    labels = np.arange(30) % 3
    labels[17] = value
    return labels


def with_nan(n, row):
    inputs = np.ones((n, 3))
    inputs[row] = np.nan
    return inputs


ARRAY_FAULTS = {
    "lengths": (lambda: bad(train_y=np.zeros(29, int)), ["(30, 4, 3)", "(29,)", "length"]),
    "empty": (lambda: bad(val_x=np.zeros((0, 4, 3)), val_y=np.zeros(0, int)), ["empty"]),
    "negative label": (lambda: bad(train_y=with_label(-1)), ["label -1 of sample 17", "out of range"]),
    "large label": (lambda: bad(train_y=with_label(3)), ["label 3 of sample 17", "[0, 3)", "num_classes"]),
    "float labels": (lambda: bad(train_y=np.zeros(30)), ["float64", "whole numbers", "set task.loss: mse"]),
    "one-hot labels": (lambda: bad(train_y=np.zeros((30, 3), int)), ["(30, 3)"]),
    "text": (lambda: bad(train_x=np.full(30, b"ab")), ["|S2"]),
    "complex": (lambda: bad(train_x=np.zeros((30, 2), complex)), ["complex128"]),
    "shapes differ": (lambda: bad(val_x=np.zeros((10, 4, 4))), ["(4, 3, 1)", "(4, 4) float32"]),
    "NaN": (lambda: bad(train_x=with_nan(30, 5), val_x=np.zeros((10, 3))), ["sample 5", "NaN"]),
    "no label array": (lambda: {"train_x": np.zeros((3, 2))}, ["the data have train_x", "train_x, train_y"]),
    "half a part": (lambda: {k: v for k, v in arrays().items() if k != "val_y"}, ["train_y, val_x"]),
    "other names": (lambda: {"images": np.zeros((3, 2))}, ["train_x, train_y"]),
}  # fmt: skip


@pytest.mark.parametrize("name", ARRAY_FAULTS)
def test_named_array_faults(tmp_path, kind, name):
    make, words = ARRAY_FAULTS[name]
    path = write(kind, tmp_path / "data", make())
    text = fault(kind, path, num_classes=3)
    assert all(word in text for word in [*words, str(path)]), text


@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.98])
def test_truncated_files(tmp_path, kind, keep):
    path = write(kind, tmp_path, arrays(n=3000))
    file = path / "train_x.npy" if kind == "npy" else path
    content = file.read_bytes()
    file.write_bytes(content[: keep if isinstance(keep, int) else int(keep * len(content))])
    text = fault(kind, path)
    assert file.name in text
    assert "no readable" in text


def test_nothing_is_unpickled(tmp_path):

    class Trap:
        def __reduce__(self):
            return (pytest.fail, ("unpickled",))

    for kind in ("npz", "npy"):
        path = write(kind, tmp_path / kind, bad(train_x=np.array([Trap()] * 30, dtype=object)))
        assert "no readable NumPy file" in fault(kind, path)


def test_infinity_and_overflow_are_found():
    for value in (np.inf, -np.inf, 1e300):
        inputs = np.zeros((6, 2, 2))
        inputs[4, 1, 1] = value
        source = Arrays(inputs, np.zeros(6, int), "here")
        assert len(taken(source, np.arange(4))[0]) == 4
        with pytest.raises(DataError, match="sample 4 holds NaN or infinity; here"):
            source.fetch(np.array([5, 4]))
    named = np.hstack([np.full((6, 1), np.nan), np.ones((6, 2))])  # text that NumPy read as numbers
    with pytest.raises(
        DataError, match="column 0 of the inputs holds NaN or infinity in each of 3 samples; here; if it is text"
    ):
        Arrays(named, np.zeros(6, int), "here").fetch(np.arange(3))
    large = np.full((2, 100), 3e38, np.float32)  # finite, though their sum is not
    assert np.array_equal(taken(Arrays(large, np.zeros(2, int), "here"), np.arange(2))[0], large)


def test_labels_are_read_in_pieces(monkeypatch):
    monkeypatch.setattr("hvd_train.data.class_labels.SCAN", 7)
    labels = np.zeros(50, int)
    labels[44] = 9
    assert Arrays(np.zeros((50, 1)), labels, "test").sample.num_classes == 10
    with pytest.raises(DataError, match="label 9 of sample 44"):
        Arrays(np.zeros((50, 1)), labels, "test", 9)


def test_npy_stays_on_disk(tmp_path):
    path = write("npy", tmp_path, arrays(n=40_000, shape=(28, 28)))
    tracemalloc.start()
    data = opened("npy", path)
    data.train.fetch(np.arange(64))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5e6 < 40_000 * 28 * 28


def test_hdf5_from_several_threads(tmp_path):
    data = opened("hdf5", write("hdf5", tmp_path, arrays(n=500, dtype=np.float32)))
    inputs, labels = everything(data.train)
    picks = [RNG.integers(0, 500, 32) for _ in range(40)]
    with ThreadPoolExecutor(8) as pool:
        for pick, (x, y) in zip(picks, pool.map(lambda pick: taken(data.train, pick), picks), strict=True):
            assert np.array_equal(x, inputs[pick])
            assert np.array_equal(y, labels[pick])


@pytest.mark.parametrize("trick", ["soft", "external", "virtual", "raw"])
def test_hdf5_reads_no_other_file(tmp_path, trick):
    path, other = tmp_path / "data.h5", tmp_path / "other.h5"
    named = arrays()
    with h5py.File(other, "w") as file:
        file["secret"] = named["train_x"]
    with h5py.File(path, "w") as file:
        for name in NAMES[1:]:
            file[name] = named[name]
        if trick == "soft":
            file["train_x"] = h5py.SoftLink("/val_x")
        elif trick == "external":
            file["train_x"] = h5py.ExternalLink(str(other), "/secret")
        elif trick == "virtual":
            layout = h5py.VirtualLayout((30, 4, 3), np.uint8)
            layout[...] = h5py.VirtualSource(str(other), "secret", (30, 4, 3))
            file.create_virtual_dataset("train_x", layout)
        else:
            raw = tmp_path / "raw"
            raw.write_bytes(bytes(360))
            file.create_dataset("train_x", (30, 4, 3), np.uint8, external=[(str(raw), 0, 360)])
    text = fault("hdf5", path)
    assert "train_x" in text
    assert "of the file itself" in text


def test_wrong_kind_of_file(tmp_path):
    np.save(tmp_path / "one.npy", np.zeros(3))
    assert "single array" in fault("npz", tmp_path / "one.npy")
    assert "is a folder, and this is a file" in fault("npy", tmp_path / "one.npy")
    for kind in ("npz", "hdf5"):
        assert "no readable" in fault(kind, tmp_path)


@pytest.mark.parametrize("name", ["valid", "validation", "dev"])
def test_arrays_of_a_validation_part_are_taken_by_each_of_its_names(tmp_path, kind, name):
    named = arrays()
    more = {f"{name}_{k}": named[f"val_{k}"] for k in "xy"} | {f"test_{k}": named[f"val_{k}"][:4] for k in "xy"}
    data = opened(kind, write(kind, tmp_path, {k: x for k, x in named.items() if k.startswith("train")} | more))
    test = for_testing(kind, tmp_path if kind == "npy" else tmp_path / f"data.{kind}")
    assert (len(data.train), len(data.val), len(test)) == (30, 10, 4)
    assert np.array_equal(everything(test)[1], named["val_y"][:4])
    held = {f"holdout_{k}": named[f"val_{k}"] for k in "xy"} | {k: x for k, x in named.items() if k.startswith("train")}
    assert "holdout_x, holdout_y beside train_x: arrays whose part is not known" in fault(
        kind, write(kind, tmp_path / "b", held)
    )


def test_headers_that_promise_too_much(tmp_path):
    """Before NumPy or HDF5 take memory for it."""
    path = write("npy", tmp_path, arrays(dtype=np.float32, shape=(3,)))
    for shape in ("(-1, 3)", "(999999999999, 3)", "(30, 4)"):
        head = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
        content = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head.encode() + bytes(360)
        (path / "train_x.npy").write_bytes(content)
        text = fault("npy", path)
        assert "no readable NumPy file: its header promises" in text and "360 are there" in text, text
        with zipfile.ZipFile(tmp_path / "data.npz", "w") as archive:
            for name in NAMES:
                archive.writestr(f"{name}.npy", (path / f"{name}.npy").read_bytes())
        text = fault("npz", tmp_path / "data.npz")
        assert "no readable NumPy file: its header promises" in text and "train_x" in text


def test_hdf5_that_claims_more_than_it_holds(tmp_path, monkeypatch):
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        for name, shape in (("x", (10**12, 3)), ("y", (10**12,))):
            file.create_dataset(name, shape, "int64", chunks=(1000, *shape[1:]))
    assert "claims (1000000000000, 3) int64, 24,000.0 GB, and only 0 bytes of it were written" in fault("hdf5", path)
    monkeypatch.setattr("hvd_train.data.memory.free", lambda: 10**9)
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (900, 1000, 1000), "float32", chunks=(900, 1000, 1000), compression="gzip")
        file["x"].id.write_direct_chunk((0, 0, 0), bytes(1 << 20))
        file["y"] = np.zeros(900, int)
    assert "reading a sample, of chunks (900, 1000, 1000), takes 7.2 GB of memory, and 1.0 GB are free" in fault(
        "hdf5", path
    )


def test_arrays_that_are_not_read_are_told(tmp_path):
    """Weights of samples had no effect, without a word."""
    x, y = np.zeros((20, 3), np.float32), np.arange(20) % 2
    np.savez(tmp_path / "data.npz", x=x, y=y, sample_weight=np.ones(20))
    config = DataConfig(name="npz", path=str(tmp_path / "data.npz"))
    assert any(line.endswith("data.npz: not read: sample_weight") for line in open_data(config, TaskConfig()).remarks)
