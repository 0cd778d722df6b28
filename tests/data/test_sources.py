"""Every format opens and reads back what was written; every fault is one line that names the file and the way out."""

import gzip
import struct
import sys
import tracemalloc
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hvd_train.config import DataConfig, TaskConfig
from hvd_train.data import formats
from hvd_train.data.arrays import Arrays
from hvd_train.data.catalog import catalog, open_data
from hvd_train.data.dataset import DataRequest
from hvd_train.data.kinds import KINDS
from hvd_train.data.synthetic import Synthetic
from hvd_train.errors import DataError
from hvd_train.protocol import Field

FASHION = Path("/usr/share/datasets/fashion-mnist")
RNG = np.random.default_rng(0)
DEFAULTS = {"num_samples": 100, "input_shape": [4, 4, 1]}


def config(name, path=None, **keys):
    return DataConfig(**{**DEFAULTS, "name": name, "path": path and str(path), **keys})


def opened(*args, **keys):
    return open_data(config(*args, **keys))


def for_testing(*args, **keys):
    """The test part, as ``eval --split test`` opens it."""
    return open_data(config(*args, **keys), request=DataRequest(split="test")).parts["test"]


def fault(*args, **keys):
    """The one line a user sees."""
    with pytest.raises(DataError) as caught:
        data = opened(*args, **keys)
        for part in (data.train, data.val):  # what only fetching shows
            part.fetch(np.arange(len(part)))
    text = str(caught.value)
    assert "\n" not in text
    return text


def taken(source, indices):
    """(the input as the device makes it of what travels, the label) of a source that has one of each."""
    (inputs,), (labels,) = (named.values() for named in source.fetch(indices))
    divisor = np.float32(source.sample.inputs["input"].divisor)
    return inputs if divisor == 1 else inputs / divisor, labels


def everything(source):
    inputs, labels = taken(source, np.arange(len(source)))
    assert inputs.dtype == np.float32
    assert labels.dtype == np.int64
    assert inputs.shape == (len(source), *source.sample.input_shape)
    assert labels.shape == (len(source),)
    return inputs, labels


# ---- IDX


def idx(array, code=8):
    return struct.pack(f">HBB{array.ndim}I", 0, code, array.ndim, *array.shape) + array.tobytes()


def mnist(folder, *, dot="-", gz=False, size=(6, 5)):
    """A small MNIST folder; returns {part: (images, labels)}."""
    parts = {}
    for part, n in (("train", 20), ("t10k", 10)):
        images = RNG.integers(0, 256, (n, *size), np.uint8)
        labels = np.arange(n, dtype=np.uint8) % 10
        parts[part] = images, labels
        for kind, array in (("images", images), ("labels", labels)):
            path = folder / f"{part}-{kind}{dot}idx{array.ndim}-ubyte{'.gz' if gz else ''}"
            path.write_bytes(gzip.compress(idx(array)) if gz else idx(array))
    return parts


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


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
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
    """F30."""
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


# ---- digits, synthetic


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


def test_synthetic_is_a_function_of_the_index():
    data = opened("synthetic", num_samples=1000, input_shape=[5, 3, 2], num_classes=4)
    inputs, labels = everything(data.train)
    assert np.array_equal(taken(data.train, np.array([7, 3, 7]))[0], inputs[[7, 3, 7]])
    assert 0 <= inputs.min() < 0.1 < 0.9 < inputs.max() <= 1
    assert (len(data.val), data.sample.num_classes) == (200, 4)
    flat = np.concatenate([inputs, everything(data.val)[0]]).reshape(1200, -1)
    assert len(np.unique(flat, axis=0)) == 1200
    means = np.stack([inputs[labels == k].mean(0).ravel() for k in range(4)])
    held, truth = everything(data.val)
    nearest = ((held.reshape(200, 1, -1) - means) ** 2).sum(-1).argmin(1)
    assert (nearest == truth).mean() > 0.95


def test_synthetic_takes_no_memory():
    tracemalloc.start()
    data = opened("synthetic", num_samples=10**9)
    inputs, labels = taken(data.train, np.array([0, 10**9 - 1]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20
    assert len(data.train) == 10**9
    assert np.array_equal(taken(Synthetic(5, [4, 4, 1], 10, start=10**9 - 1), np.zeros(1, np.int64))[0], inputs[1:])


# ---- named arrays: npz, npy, hdf5

NAMES = ["train_x", "train_y", "val_x", "val_y"]


def arrays(n=30, held=10, shape=(4, 3), dtype=np.uint8, classes=3):
    made = RNG.integers(0, 256, (n + held, *shape)) if dtype == np.uint8 else RNG.normal(size=(n + held, *shape))
    labels = np.arange(n + held) % classes
    made = made.astype(dtype)
    return {"train_x": made[:n], "train_y": labels[:n], "val_x": made[n:], "val_y": labels[n:]}


def write(kind, folder, named):
    folder.mkdir(exist_ok=True)
    if kind == "npy":
        for name, array in named.items():
            np.save(folder / f"{name}.npy", array)
        return folder
    path = folder / f"data.{kind}"
    if kind == "npz":
        np.savez(path, **named)
        return path
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        for name, array in named.items():
            file[name] = array
    return path


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


def test_labels_at_each_place_of_an_image_are_images():
    depth = np.ones((8, 4, 5), np.float32)
    assert source_of(np.ones((8, 4, 5, 3), np.uint8), depth, loss="mse").sample.labels["label"].shape == (4, 5, 1)
    assert source_of(depth, depth, loss="mse").sample.labels["label"] == Field((4, 5), "float32")
    assert not Field((4, 5, 6), "int64", classes=3).image and Field((4, 5, 6), "float32").image  # as manifests tell


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
    "no label array": (lambda: {"train_x": np.zeros((3, 2))}, ["train_x found", "train_x, train_y"]),
    "half a part": (lambda: {k: v for k, v in arrays().items() if k != "val_y"}, ["val_x found"]),
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
    """F30."""
    path = write(kind, tmp_path, arrays(n=3000))
    file = path / "train_x.npy" if kind == "npy" else path
    content = file.read_bytes()
    file.write_bytes(content[: keep if isinstance(keep, int) else int(keep * len(content))])
    text = fault(kind, path)
    assert file.name in text
    assert "no readable" in text


def test_nothing_is_unpickled(tmp_path):
    """F34."""

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
        DataError, match="column 0 of the inputs holds NaN or infinity in each of 3 samples; here; is it text"
    ):
        Arrays(named, np.zeros(6, int), "here").fetch(np.arange(3))
    large = np.full((2, 100), 3e38, np.float32)  # finite, though their sum is not
    assert np.array_equal(taken(Arrays(large, np.zeros(2, int), "here"), np.arange(2))[0], large)


def test_labels_are_read_in_pieces(monkeypatch):
    monkeypatch.setattr("hvd_train.data.labels.SCAN", 7)
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
    """F34."""
    h5py = pytest.importorskip("h5py")
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
    assert "folder is needed" in fault("npy", tmp_path / "one.npy")
    for kind in ("npz", "hdf5"):
        assert "no readable" in fault(kind, tmp_path)


# ---- folders of images


def pictures(folder, classes=("cat", "dog"), n=5, mode="RGB", size=(9, 7), suffix="png"):
    image = pytest.importorskip("PIL.Image")
    for k, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(n):
            image.new(mode, size, (20 * k + i,) * len(mode)).save(folder / name / f"{i}.{suffix}")
    return folder


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1), ("RGBA", 3), ("LA", 1)])
def test_imagefolder(tmp_path, mode, channels):
    pictures(tmp_path / "train", mode=mode)
    pictures(tmp_path / "val", mode=mode, n=2)
    (tmp_path / "train" / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "train" / ".hidden").mkdir()
    data = opened("imagefolder", tmp_path)
    assert data.sample.input_shape == (7, 9, channels)
    inputs, labels = everything(data.train)
    assert labels.tolist() == [0] * 5 + [1] * 5
    values = np.array([0, 1, 2, 3, 4, 20, 21, 22, 23, 24]) / np.float32(255)
    assert np.allclose(inputs, values[:, None, None, None])
    assert len(data.val) == 4
    assert opened("imagefolder", tmp_path, image_size=6).sample.input_shape == (6, 6, channels)


def test_one_gray_image_makes_no_others_gray(tmp_path):
    """Collections from the web have some, and one may come first."""
    image = pytest.importorskip("PIL.Image")
    pictures(tmp_path)
    image.new("L", (9, 7)).save(tmp_path / "cat" / "0.png")
    data = opened("imagefolder", tmp_path)
    assert data.sample.input_shape == (7, 9, 3)
    assert all(part.fetch(np.arange(len(part)))[0]["input"].shape[-1] == 3 for part in (data.train, data.val))


def test_imagefolder_split_and_jpeg(tmp_path):
    data = opened("imagefolder", pictures(tmp_path / "all", n=10, suffix="jpg"), image_size=8)
    assert (len(data.train), len(data.val)) == (16, 4)
    assert np.bincount(everything(data.val)[1]).tolist() == [2, 2]


def test_imagefolder_faults(tmp_path):
    """F31."""
    assert "no images in CLASS/ folders" in fault("imagefolder", tmp_path)
    pictures(tmp_path / "train")
    pictures(tmp_path / "val", classes=("cat", "cow"))
    assert "unknown class cow: the training part has cat, dog" in fault("imagefolder", tmp_path)
    (tmp_path / "val" / "cow").rename(tmp_path / "val" / "dog")
    odd = tmp_path / "train" / "dog" / "3.png"
    whole = odd.read_bytes()
    odd.write_bytes(whole[:40])
    assert str(odd) in fault("imagefolder", tmp_path)
    odd.write_bytes(b"no image at all")
    assert str(odd) in fault("imagefolder", tmp_path)
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (5, 5)).save(odd)
    assert "set data.image_size" in fault("imagefolder", tmp_path)
    image.fromarray(np.full((7, 9), 40_000, np.uint16)).save(odd)
    assert "8 bits" in fault("imagefolder", tmp_path)
    odd.write_bytes(whole)
    train = opened("imagefolder", tmp_path, image_size=8).train
    odd.unlink()  # while training
    with pytest.raises(DataError, match=f"No such file.*{odd}"):
        train.fetch(np.arange(len(train)))


@pytest.mark.parametrize("name", ["val", "valid", "Validation", "dev"])
def test_a_validation_folder_is_taken_by_each_of_its_names(tmp_path, name):
    pictures(tmp_path / "Training", n=9)
    pictures(tmp_path / name, n=3)
    data = opened("imagefolder", tmp_path)
    assert (len(data.train), len(data.val)) == (18, 6)
    with pytest.raises(DataError, match=r"there is no part 'test'; .*there are train, val and all"):
        for_testing("imagefolder", tmp_path)


def test_a_test_folder_is_a_split_of_its_own(tmp_path):
    pictures(tmp_path / "train", n=10)
    before = opened("imagefolder", tmp_path)
    pictures(tmp_path / "test", n=3)
    data = opened("imagefolder", tmp_path)
    test = for_testing("imagefolder", tmp_path)
    assert (len(data.train), len(data.val), len(test)) == (16, 4, 6)
    assert data.fingerprint == before.fingerprint and test.fetch(np.arange(6))[1]["label"].tolist() == [0] * 3 + [1] * 3
    (tmp_path / "test" / "dog").rename(tmp_path / "test" / "cow")
    opened("imagefolder", tmp_path)  # training does not read it
    with pytest.raises(DataError, match="unknown class cow: the training part has cat, dog"):
        for_testing("imagefolder", tmp_path)


def test_folders_whose_part_is_not_known_are_refused(tmp_path):
    pictures(tmp_path / "train")
    pictures(tmp_path / "holdout")
    assert "holdout beside train: a folder of images whose part is not known" in fault("imagefolder", tmp_path)
    pictures(tmp_path / "val")
    assert f"not read in {tmp_path}: holdout" in opened("imagefolder", tmp_path).remarks
    pictures(tmp_path / "valid")
    assert "val and valid are the same part, val" in fault("imagefolder", tmp_path)
    pictures(tmp_path / "other" / "val")
    assert "val holds classes, and there is no training part" in fault("imagefolder", tmp_path / "other")
    classes = pictures(tmp_path / "vehicles", classes=("train", "car"))
    assert opened("imagefolder", classes).sample.num_classes == 2


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


def test_a_function_may_give_a_test_part():
    part = np.ones((8, 3)), LABELS
    sys.modules["own_pair"] = SimpleNamespace(pair=lambda: (part, part, (part[0][:3], LABELS[:3])))
    assert len(for_testing("own_pair:pair")) == 3


def test_all_that_pillow_reads_is_read_and_the_rest_is_told(tmp_path):
    image = pytest.importorskip("PIL.Image")
    pictures(tmp_path, suffix="tiff", n=4)
    pictures(tmp_path, classes=("cow", "fox"), suffix="TIF", n=4)
    for name, kind in (("a.jfif", "JPEG"), ("b", "PNG"), ("c.ppm", "PPM"), ("d.0001", "JPEG"), ("e.tga", "TGA")):
        image.new("RGB", (9, 7)).save(tmp_path / "cat" / name, kind)
    data = opened("imagefolder", tmp_path)
    assert len(data.train) + len(data.val) == 21 and data.sample.num_classes == 4 and data.remarks == []
    for name in ("a.svg", "b.svg", "notes.txt", "LICENSE", "x.npy"):
        (tmp_path / "dog" / name).write_bytes(b"<svg/>" + bytes(90))
    (tmp_path / "dog" / "more").mkdir()
    (tmp_path / "labels.csv").write_text("a")
    (tmp_path / "cow" / ".DS_Store").write_text("a")
    (note,) = opened("imagefolder", tmp_path).remarks
    assert (
        f"not read in {tmp_path}, as these are not images in class folders: " in note
        and "beside the classes: 1 .csv" in note
    )
    assert (
        all(word in note for word in ("dog: 2 .svg", "1 .txt", "1 without an ending", "1 .npy", "1 folder"))
        and "cow" not in note
    )
    for file in (tmp_path / "fox").iterdir():
        file.rename(file.with_suffix(".heic"))
        file.with_suffix(".heic").write_bytes(b"ftypheic")
    assert f"class 'fox' has no image, but 4 .heic; {tmp_path / 'fox'}; add or convert" in fault(
        "imagefolder", tmp_path
    )


def test_images_without_classes_can_be_predicted(tmp_path):
    data = opened("imagefolder", pictures(tmp_path / "a"))
    flat = pictures(tmp_path / "b", classes=("",))
    assert "no images in CLASS/ folders" in fault("imagefolder", flat)
    found = open_data(config("imagefolder", flat), request=DataRequest(data.sample, "all", labels=False)).parts["all"]
    assert len(found) == 5 and found.fetch(np.arange(5))[0]["input"].shape == (5, 7, 9, 3)


def test_gray_or_colored_is_decided_from_all_files_of_all_parts(tmp_path):
    image = pytest.importorskip("PIL.Image")
    pictures(tmp_path / "train", mode="L", n=100)
    assert opened("imagefolder", tmp_path).sample.input_shape == (7, 9, 1)
    pictures(tmp_path / "test", n=2)
    data = opened("imagefolder", tmp_path)
    assert data.sample.input_shape == (7, 9, 1)
    assert "in color, which are read as gray" in for_testing("imagefolder", tmp_path).remarks[0]
    image.new("RGB", (9, 7), (200, 10, 10)).save(tmp_path / "train" / "cat" / "77.png")
    assert opened("imagefolder", tmp_path).sample.input_shape == (7, 9, 3)
    image.new("L", (9, 7)).save(tmp_path / "train" / "cat" / "77.png")
    pictures(tmp_path / "val", n=1)
    assert opened("imagefolder", tmp_path).train.sample.input_shape == (7, 9, 3)


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
def test_photographs_stand_upright(tmp_path, suffix):
    """As EXIF tells: left and right would be half the pictures' own, and half the camera's."""
    image = pytest.importorskip("PIL.Image")
    pictures(tmp_path, suffix=suffix)
    plain = opened("imagefolder", tmp_path)
    pixels = np.zeros((16, 8, 3), np.uint8)
    pixels[:8] = 255  # lies on its side: up is left
    exif = image.Exif()
    exif[0x0112] = 8
    for file in tmp_path.rglob(f"*.{suffix}"):
        image.fromarray(pixels).save(file, exif=exif, quality=95)
    data = opened("imagefolder", tmp_path)
    assert data.sample.input_shape == (8, 16, 3) and data.fingerprint != plain.fingerprint
    found = everything(data.train)[0]
    assert (
        found[:, :, :7].max() < 0.1
        and found[:, :, 9:].min() > 0.9
        or found[:, :, 9:].max() < 0.1 < found[:, :, :7].min()
    )
    upright = image.fromarray(pixels).transpose(image.Transpose.ROTATE_90)
    assert abs(found[0] * 255 - np.asarray(upright)).max() < 20


def test_more_memory_than_is_free_is_told_before_it_is_taken(tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    monkeypatch.setattr("hvd_train.data.memory.free", lambda: 100_000_000)
    pictures(tmp_path / "photos", classes=("cat",))
    big = tmp_path / "photos" / "cat" / "big.png"
    image.new("1", (9_000, 9_000)).save(big)
    text = fault("imagefolder", tmp_path / "photos", image_size=8)
    assert "an image of 9,000 x 9,000 pixels takes 567 MB of memory, and 100 MB are free" in text and str(big) in text
    mnist(tmp_path, gz=True)
    file = tmp_path / f"{IMAGES}.gz"
    file.write_bytes(gzip.compress(struct.pack(">HBB3I", 0, 8, 3, 200_000, 100, 100)))
    assert "unpacking (200000, 100, 100) takes 2.0 GB of memory" in fault("idx", tmp_path)
    assert "reading all arrays takes 240 MB" in fault(
        "npz", write("npz", tmp_path, {"x": np.zeros((10, 3_000_000)), "y": LABELS})
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
    h5py = pytest.importorskip("h5py")
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


# ---- text, and labels at every place


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
    assert "3 classes; data.num_classes" in fault("text", path, num_classes=3)


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
        with pytest.raises(DataError, match="per place of the inputs"):
            Arrays(tokens, np.zeros(shape, int), "test")
    tokens[11, 3] = -2
    with pytest.raises(DataError, match="label -2 of sample 11 "):
        Arrays(tokens, tokens, "test")


# ---- names, paths, the user's own


def test_unknown_names():
    text = fault("digitss")
    assert "did you mean 'digits'" in text
    assert all(name in text for name in KINDS)
    assert "imagefolder" in fault("qqq")


@pytest.mark.parametrize("name", ["idx", "npz", "npy", "hdf5", "imagefolder", "text"])
def test_missing_paths(tmp_path, name):
    """F31."""
    assert "needs a path; data.path" in fault(name)
    gone = tmp_path / "gone"
    text = fault(name, gone)
    assert "no such file or folder" in text
    assert str(gone) in text


def test_image_size_is_not_ignored(tmp_path):
    assert "data.image_size" in fault("synthetic", image_size=8)


def test_catalog_has_one_line_each():
    assert list(catalog()) == list(KINDS)
    assert all(line and "\n" not in line for line in catalog().values())


OWN = """
import numpy as np
class Mine:
    num_classes, fingerprint = 2, "mine"
    kind = np.float32
    def __len__(self): return 4
    def fetch(self, indices): return np.ones((len(indices), 3), self.kind), np.ones(len(indices), np.int64)
class Bytes(Mine):
    kind = np.uint8
class Uneven(Mine):
    def fetch(self, indices): return np.ones((len(indices), 2 + len(indices))), np.ones(len(indices), np.int64)
class Places(Mine):
    def fetch(self, indices): return np.ones((len(indices), 3), self.kind), np.ones((len(indices), 3), np.int64)
class Strange(Mine):
    label = 3
    def fetch(self, indices): return np.ones((len(indices), 3), self.kind), np.where(indices, self.label, 0)
class Ignored(Strange):
    label = -100
class Broken(Mine):
    def fetch(self, indices): return indices / {}
def pairs(n=4): return (np.ones((n, 3)), np.arange(n) % 2), (np.zeros((2, 3)), np.zeros(2, int))
def sources(): return Mine(), Mine()
def places(): return Places(), Places()
def one(): return Mine()
def nothing(): return None, None
def bytes(): return Bytes(), Mine()
def strange(): return Mine(), Strange()
def ignored(): return Mine(), Ignored()
def uneven(): return Uneven(), Uneven()
def broken(): return Mine(), Broken()
def raises(): raise KeyError("no key")
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_data.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_data", raising=False)


def test_own_function(own):
    data = opened("own_data:pairs", options={"n": 6})
    assert (len(data.train), len(data.val), data.sample.num_classes, data.sample.input_shape) == (6, 2, 2, (3,))
    assert opened("own_data:sources").train.fingerprint == "mine"
    assert taken(opened("own_data:places").train, np.arange(2))[1].shape == (2, 3)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("own_dat:pairs", "there is no module 'own_dat'"),
        ("own_data:pair", "own_data.py has no function 'pair'"),
        ("own_data:", "has no function"),
        (":pairs", "cannot be imported"),
        ("own_data:one", "must return (train, val)"),
        ("own_data:nothing", "NoneType has no __len__, fetch"),
        ("own_data:bytes", "input (3,) uint8, label () int64, validation samples of input (3,) float32"),
        ("own_data:uneven", "fetch gives inputs of shape (4, 6) for 4 indices, not (4, 3)"),
        ("own_data:strange", "sample 1 holds a label out of [0, 2)"),
        ("own_data:ignored", "sample 1 holds a label out of [0, 2)"),
        ("own_data:broken", "val; "),
        ("own_data:raises", "KeyError"),
    ],
)
def test_own_faults(own, name, words):
    text = fault(name)
    assert words in text or words in text + "; "
    assert f"data.name: {name}" in text


def test_own_options_that_do_not_fit(own):
    assert "unexpected keyword argument 'm'" in fault("own_data:pairs", options={"m": 1})


# ---- what a user's own function gives

IDS = np.array([[1, 200, 3], [4, 5, 255]] * 4)
LABELS = np.arange(8) % 2


def source_of(inputs, labels=LABELS, **task):
    """open_data of a function that gives the pair for both parts."""
    sys.modules["own_pair"] = SimpleNamespace(pair=lambda: ((inputs, labels), (inputs, labels)))
    return open_data(config("own_pair:pair"), TaskConfig(**task)).train


def test_bytes_are_divided_unless_they_are_ids_and_the_run_says_which():
    """They travel as bytes either way."""

    def divisor(source):
        assert source.fetch(np.arange(2))[0]["input"].dtype == np.uint8
        return source.sample.inputs["input"].divisor

    flat = source_of(IDS.astype(np.uint8))
    assert divisor(flat) == 255 and "divided by 255" in flat.note and "int32" in flat.note
    ids = source_of(IDS.astype(np.uint8), IDS[:, ::-1])
    assert divisor(ids) == 1 and np.array_equal(taken(ids, np.arange(2))[0], IDS[:2]) and "not divided" in ids.note
    column = source_of(IDS[:, :1].astype(np.uint8), LABELS[:, None])  # one number and one label a sample are no text
    assert divisor(column) == 255
    whole = source_of(IDS)
    assert np.array_equal(taken(whole, np.arange(2))[0], IDS[:2])
    assert "int64" in whole.note and "whole numbers" in whole.note and "float32" in whole.note
    assert source_of(IDS.astype(np.float32)).note == "" and source_of(list(IDS)).note == whole.note


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int32", "uint32", "int64", "uint64"])
def test_whole_numbers_stay_whole(dtype):
    most = 1 if dtype == "bool" else min(np.iinfo(dtype).max, (1 << 63) - 1)
    values = np.full((8, 3), most, dtype)
    source = source_of(values)
    found, field = taken(source, np.arange(8))[0], source.sample.inputs["input"]
    assert field.whole and found.dtype == field.dtype and (found == values).all()
    if dtype == "uint64":
        values[5, 1] = 1 << 63
        with pytest.raises(DataError, match="sample 5 holds a number of more than 63 bits"):
            source_of(values).fetch(np.arange(8))


def test_named_inputs_travel_as_they_are():
    """Several inputs have names, each its own type; a dict of one is one input; an object gives the same."""
    named = {"tokens": IDS.astype(np.int32), "mask": IDS > 3, "image": np.ones((8, 4, 5), np.uint8)}
    source = source_of(named)
    inputs, labels = source.fetch(np.array([6, 1]))
    assert source.sample.input_shape == {"tokens": (3,), "mask": (3,), "image": (4, 5)}
    assert {name: x.dtype.name for name, x in inputs.items()} == {"tokens": "int32", "mask": "bool", "image": "uint8"}
    assert all((x == named[name][[6, 1]]).all() for name, x in inputs.items()) and labels["label"].tolist() == [0, 1]
    assert {name: field.divisor for name, field in source.sample.inputs.items()}["image"] == 255
    assert source_of({"tokens": IDS}).sample.input_shape == (3,)

    class Own(OnlyFetch):
        num_classes, fingerprint = 2, "x"

        def __len__(self):
            return 8

        def fetch(self, indices):
            return {name: x[indices] for name, x in named.items()}, LABELS[indices]

    sys.modules["own_pair"] = SimpleNamespace(pair=lambda: (Own(), Own()))
    again = opened("own_pair:pair").train
    assert again.sample == source.sample
    assert all((x == inputs[name]).all() for name, x in again.fetch(np.array([6, 1]))[0].items())


def test_labels_are_what_the_loss_wants():
    """Numbers for a regression, several by name, places that are ignored."""
    found = source_of(IDS.astype(np.float32), LABELS / 2, loss="mse")
    assert taken(found, np.arange(2))[1].tolist() == [0, 0.5] and found.sample.num_classes is None
    assert source_of(IDS, -LABELS, loss="mse").sample.labels["label"] == Field((), "int64")
    images = source_of(np.ones((8, 4, 4), np.uint8), np.ones((8, 4, 4), np.uint8), loss="mse")
    assert images.sample.labels["label"] == images.sample.inputs["input"] == Field((4, 4, 1), "uint8", 255.0)
    words = np.where(IDS > 3, IDS, -100)
    source = source_of(
        {"tokens": IDS}, {"words": words, "next": LABELS}, loss=dict.fromkeys(("words", "next"), "cross_entropy")
    )
    fields = source.sample.labels
    assert (fields["words"].masked, fields["words"].classes, fields["next"]) == (
        True,
        256,
        Field((), "int64", classes=2),
    )
    assert source.sample.num_classes == {"words": 256, "next": 2}
    assert (source.fetch(np.arange(8))[1]["words"] == words).all()
    with pytest.raises(DataError, match="label -100 of sample 0"):
        source_of(IDS, words, ignore_index=-1)
    assert source_of(IDS, np.where(IDS > 3, IDS, -1), ignore_index=-1).sample.labels["label"].masked


def test_the_fingerprint_sees_each_named_array():
    named = {"a": IDS.astype(np.int32), "b": IDS.astype(np.float32)}
    prints = {source_of(named).fingerprint, source_of(named | {"b": named["b"] + 1}).fingerprint}
    prints |= {source_of({"a": named["a"], "c": named["b"]}).fingerprint, source_of({"a": named["a"]}).fingerprint}
    assert len(prints) == 4


class OnlyFetch:
    def fetch(self, indices):
        return IDS[indices], LABELS[indices]


class Fetching(OnlyFetch):
    num_classes, fingerprint = 2, "x"

    def __init__(self, fetched):
        self.fetched = fetched

    def __len__(self):
        return 8

    def fetch(self, indices):
        return self.fetched


OWN_FAULTS = {
    "tuple": (((IDS, IDS[:, :2]), LABELS), ["inputs are a tuple of 2", "a dict of named inputs"]),
    "list": (([IDS, IDS], LABELS), ["inputs are a list of 2", "a dict of named inputs"]),
    "no name": (({"a": IDS, "b c": IDS}, LABELS), ["a dict with a, b c", "names no argument"]),
    "lengths": (({"a": IDS, "b": IDS[1:]}, LABELS), ["inputs 'b' (7, 3)", "(8,)", "length"]),
    "named text": (({"a": IDS, "b": IDS.astype(str)}, LABELS), ["inputs 'b' of type <U"]),
    "targets": ((IDS, (LABELS, LABELS)), ["differ in length"]),
    "named targets": ((IDS, {"a": LABELS, "b": LABELS[1:]}), ["labels 'b' (7,)", "differ in length"]),
    "regression": ((IDS, LABELS / 2), ["labels of type float64", "wants classes", "regression"]),
    "ragged": (([[1], [2, 3, 4]] * 4, LABELS), ["inputs have samples of different lengths, 1 to 3", "pad them"]),
    "ragged objects": ((np.array([[1], [2, 3]] * 4, object), LABELS), ["different lengths, 1 to 2"]),
    "ragged arrays": (([np.zeros((k % 3 + 1, 2)) for k in range(8)], LABELS), ["different lengths, 1 to 3"]),
    "mixed": (([[1], "a"] * 4, LABELS), ["inputs are not an array of numbers"]),
    "weights": ((IDS, LABELS, LABELS), ["gives a tuple of 3", "(inputs, labels)"]),
    "a dict": ({"x": IDS, "y": LABELS}, ["gives a dict with x, y", "(inputs, labels)"]),
    "fetch alone": (OnlyFetch(), ["OnlyFetch has no __len__", "fingerprint", "num_classes"]),
    "fetch of a dict": (Fetching({"x": 1}), ["fetch gives a dict with x"]),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN_FAULTS)
def test_faults_of_own_data(name):
    part, words = OWN_FAULTS[name]
    sys.modules["own_pair"] = SimpleNamespace(pair=lambda: (part, part))
    text = fault("own_pair:pair")
    assert all(word in text for word in words) and "own_pair:pair" in text, text


def test_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    expected, (images, labels) = load_digits(), formats.read_digits()
    assert (images == expected.images).all() and (labels == expected.target).all()


def test_a_sample_itself_may_be_what_the_model_is_to_give():
    config = DataConfig(name="digits", target="inputs")
    data, usual = open_data(config), open_data(DataConfig(name="digits"))
    (inputs, labels), rows = data.val.fetch(np.array([5, 2])), usual.val.fetch(np.array([5, 2]))[0]
    assert (labels["label"] == rows["input"]).all() and (inputs["input"] == rows["input"]).all()
    assert data.sample.labels["label"] == data.sample.inputs["input"] and data.sample.num_classes is None
    assert len(data.val) == len(usual.val) and data.fingerprint != usual.fingerprint


@pytest.mark.parametrize("shape", [(8,), (8, 1), (8, 5), (8, 5, 4)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "int64", "uint8", "bool"])
def test_a_function_of_the_users_gets_labels_as_stored(shape, dtype):
    """(n, 1) stays (n, 1), bytes are not divided and no axis is added; a built-in loss gets (n,) as before."""
    labels = (RNG.uniform(0, 200, shape)).astype(dtype)
    for task in ({"loss": "own:loss"}, {"loss": "mse", "metrics": ["own:metric"]}):
        source = source_of(np.ones((8, 3), np.float32), labels, **task)
        _, found = source.fetch(np.arange(8))
        assert found["label"].shape == shape and (found["label"] == labels).all()
        assert source.sample.labels["label"].shape == shape[1:]
    if shape == (8, 1):
        assert source_of(np.ones((8, 3), np.float32), labels, loss="mse").sample.labels["label"].shape == ()


def test_a_loss_of_the_users_leaves_the_number_of_classes_told(tmp_path):
    """By the configuration, or by an object with ``num_classes``; where labels are classes, they tell it."""
    x, y = np.ones((8, 3), np.float32), np.arange(8)[:, None] % 2
    np.savez(tmp_path / "data.npz", x=x, y=y)
    task = TaskConfig(loss="own:loss")
    found = open_data(DataConfig(name="npz", path=str(tmp_path / "data.npz"), num_classes=2), task)
    assert found.sample.num_classes == 2 and found.sample.labels["label"].shape == (1,)
    assert open_data(DataConfig(name="npz", path=str(tmp_path / "data.npz")), task).sample.num_classes is None
    own = SimpleNamespace(fetch=lambda k: (x[k], y[k]), fingerprint="own", num_classes=3)
    part = type("Part", (), {"__len__": lambda self: 8, **vars(own), "fetch": lambda self, k: (x[k], y[k])})()
    assert open_data(DataConfig(), task, (part, part)).sample.num_classes == 3
