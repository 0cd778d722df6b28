"""Images in tar files (WebDataset): the pixels and classes of the same files in folders, in any order, or a reason."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile

import numpy as np
import pytest
from PIL import Image

from hvd_train.config import DataConfig
from hvd_train.data import formats
from hvd_train.data.catalog import open_data
from hvd_train.data.dataset import DataRequest
from hvd_train.data.detect import kind_of
from hvd_train.errors import DataError

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def picture(pixels, kind="PNG") -> bytes:
    out = io.BytesIO()
    Image.fromarray((pixels * 15).astype(np.uint8)).save(out, kind)
    return out.getvalue()


def write(path, files):
    """A tar file of {name: bytes}."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, data in files.items():
            one = tarfile.TarInfo(name)
            one.size = len(data)
            archive.addfile(one, io.BytesIO(data))
    return path


def samples(rows, label=str, ending="cls"):
    pixels, labels = formats.read_digits()
    files = {}
    for k in rows:
        files |= {f"{k:04}.png": picture(pixels[k]), f"{k:04}.{ending}": label(int(labels[k])).encode()}
    return files


def opened(path, request=None, **keys):
    return open_data(DataConfig(name="webdataset", path=str(path), **keys), **({"request": request} if request else {}))


def fault(path, **keys) -> str:
    with pytest.raises(DataError) as told:
        opened(path, **keys)
    return str(told.value)


def shards(folder):
    for name, rows in (("train-0", range(0, 30)), ("train-1", range(30, 50)), ("val-0", range(50, 70))):
        write(folder / f"{name}.tar", samples(rows))
    return folder


def test_samples_of_several_shards_are_read_in_any_order(tmp_path):
    data, (pixels, labels) = opened(shards(tmp_path)), formats.read_digits()
    assert (len(data.train), len(data.val)) == (50, 20) and data.sample.num_classes == 10
    rows = np.array([49, 3, 30, 29, 3])
    inputs, found = data.train.fetch(rows)
    (x,), (y,) = inputs.values(), found.values()
    assert x.dtype == np.uint8 and (x[..., 0] == pixels[rows] * 15).all() and (y == labels[rows]).all()
    (x,), (y,) = (fields.values() for fields in data.val.fetch(np.array([0, 19])))
    assert (x[..., 0] == pixels[[50, 69]] * 15).all() and (y == labels[[50, 69]]).all()


def test_parts_are_folders_too_and_one_file_is_divided(tmp_path):
    whole = opened(write(tmp_path / "one" / "a.tar", samples(range(40))), val_fraction=0.25)
    assert len(whole.train) + len(whole.val) == 40 and len(whole.val) > 5
    for part, rows in (("train", range(20)), ("valid", range(20, 30)), ("test", range(30, 34))):
        write(tmp_path / "many" / part / "0.tar", samples(rows))
    many = opened(tmp_path / "many")
    assert (len(many.train), len(many.val)) == (20, 10) and "test" not in many.parts
    assert len(opened(tmp_path / "many", DataRequest(split="test")).parts["test"]) == 4
    assert (
        kind_of(tmp_path / "one") == kind_of(tmp_path / "one" / "a.tar") == kind_of(tmp_path / "many") == "webdataset"
    )


def test_a_tar_file_beside_what_was_unpacked_from_it_is_not_the_data(tmp_path):
    for name, data in (("photos/cat/1.png", picture(np.zeros((8, 8)))), ("tables/train.csv", b"a,b\n1,2\n")):
        file = tmp_path / name
        file.parent.mkdir(parents=True)
        file.write_bytes(data)
    for folder in ("photos", "tables"):
        write(tmp_path / folder / "all.tar", samples(range(4)))
    assert (kind_of(tmp_path / "photos"), kind_of(tmp_path / "tables")) == ("imagefolder", "table")


def test_any_word_of_a_name_says_the_part_and_hidden_files_are_not_read(tmp_path):
    for name, rows in (("digits-train-0", range(20)), ("digits_val_0", range(20, 30))):
        write(tmp_path / f"{name}.tar", samples(rows))
    (tmp_path / "._digits-train-0.tar").write_bytes(b"left by macOS")
    data = opened(tmp_path)
    assert (len(data.train), len(data.val)) == (20, 10)


def test_classes_that_are_words_or_in_json_have_the_names_of_folders(tmp_path):
    files = {"cls": samples(range(40), WORDS.__getitem__)}
    files["json"] = samples(range(40), lambda k: json.dumps({"cls": WORDS[k], "by": "hand"}), "json")
    for name, held in files.items():
        data = opened(write(tmp_path / f"{name}.tar", held), DataRequest(split="all"))
        assert data.sample.labels["label"].names == tuple(sorted(WORDS))
        numbers = next(iter(data.parts["all"].fetch(np.arange(5))[1].values()))
        assert [sorted(WORDS)[k] for k in numbers] == list(WORDS[:5])


def test_what_is_not_read_is_counted(tmp_path):
    files = samples(range(20)) | {"0003.txt": b"a three", "0004.txt": b"a four", "README": b"?", "0077.cls": b"1"}
    (note,) = opened(write(tmp_path / "a.tar", files)).remarks
    assert "a.tar: 2 .txt, 1 samples without an image" in note


def test_predictions_need_no_classes(tmp_path):
    run = opened(shards(tmp_path / "run")).sample
    files = {name: data for name, data in samples(range(9)).items() if name.endswith("png")}
    data = opened(write(tmp_path / "new.tar", files), DataRequest(run=run, split="all", labels=False))
    assert len(data.parts["all"]) == 9


FAULTS = {
    "a sample without a class; {tar}/0001.png; put its class into 0001.cls, or under 'cls' of .json": lambda f: {
        name: data for name, data in f.items() if name != "0001.cls"
    },
    "a sample of several images: 0001.png, 0001.left.png": lambda f: f | {"0001.left.png": f["0001.png"]},
    "not a JSON object: ": lambda f: {"0001.png": f["0001.png"], "0001.json": b"{"},
    "no images in the tar files": lambda f: {"0001.cls": b"1"},
    "{tar}/0001.png": lambda f: f | {"0001.png": f["0001.png"][:40]},
}


@pytest.mark.parametrize("told", FAULTS)
def test_samples_that_cannot_be_used(tmp_path, told):
    tar = write(tmp_path / "a.tar", FAULTS[told](samples(range(4))))
    assert told.format(tar=tar) in fault(tar)


def test_archives_that_are_not_whole(tmp_path):
    tar = write(tmp_path / "a.tar", samples(range(10)))
    data = tar.read_bytes()
    for size in range(0, len(data.rstrip(b"\0")) + 1, 512):
        tar.write_bytes(data[:size])
        assert "cut off" in (told := fault(tar)) or "the tar file cannot be read" in told, size
    tar.write_bytes(data + data)
    assert "data after the end of the archive" in fault(tar)
    subprocess.run(["gzip", "-k", str(write(tar, samples(range(10))))], check=True)
    assert "unpacked: gunzip" in fault(tar.with_name("a.tar.gz"))
    tar.unlink()
    assert "no .tar files" in fault(tmp_path)


def header_of(data, size):
    """The archive with another size in its first header, in the binary form that may be negative."""
    changed = bytearray(data)
    changed[124:136] = (size % (1 << 96)).to_bytes(12, "big")
    changed[148:156] = b" " * 8
    changed[148:156] = b"%06o\0 " % sum(changed[:512])
    return bytes(changed)


@pytest.mark.parametrize("size", [-512, -1, -(10**6)])
def test_a_negative_size_is_an_error_and_no_endless_loop(tmp_path, size):
    """CVE-2025-8194: Python before 3.11.14 and 3.12.12 reads the same header again and again."""
    tar = write(tmp_path / "a.tar", samples(range(4)))
    tar.write_bytes(header_of(tar.read_bytes(), size))
    line = f"from hvd_train.data import webdataset; webdataset._members(__import__('pathlib').Path({str(tar)!r}))"
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, timeout=30, check=False)
    assert f"the tar file cannot be read: a header says that a file has {size:,} bytes" in done.stderr
    in_words = io.BytesIO()
    with tarfile.open(fileobj=in_words, mode="w", format=tarfile.PAX_FORMAT) as archive:
        one = tarfile.TarInfo("1.cls")
        one.size, one.pax_headers = 1, {"size": str(size)}
        archive.addfile(one, io.BytesIO(b"1"))
    tar.write_bytes(in_words.getvalue())
    assert f"a header says that a file has {size:,} bytes" in fault(tar)


@pytest.mark.parametrize("key", ["GNU.sparse.map", "GNU.sparse.size", "size"])
def test_headers_that_python_does_not_read(tmp_path, key):
    """They ended in a traceback."""
    tar = tmp_path / "a.tar"
    with tarfile.open(tar, "w", format=tarfile.PAX_FORMAT) as archive:
        one = tarfile.TarInfo("1.cls")
        one.size, one.pax_headers = 1, {key: "9" * 30 if key == "size" else "x"}
        archive.addfile(one, io.BytesIO(b"1"))
    assert "the tar file cannot be read" in fault(tar)


def test_shards_whose_part_is_not_known(tmp_path):
    write(shards(tmp_path) / "holdout-0.tar", samples(range(5)))
    assert "holdout-0.tar beside those of train, val; " in fault(tmp_path)
