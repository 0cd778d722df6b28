"""What the names of classes of images are for a loss of numbers: the numbers that they are, or a reason."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hvd_train.config import DataConfig, TaskConfig
from hvd_train.data.catalog import open_data, pack
from hvd_train.data.dataset import DataRequest
from hvd_train.data.packing import Alone
from hvd_train.errors import DataError
from tests.data.files import pictures
from tests.data.test_tables import cifar
from tests.data.test_webdataset import samples, write

MSE, OWN, BCE = TaskConfig(loss="mse"), TaskConfig(loss="mine:loss"), TaskConfig(loss="bce")
FRACTIONS, WHOLE, WORDS = ("2.5", "10.0", "-33.0"), ("10", "2", "33"), ("low", "mid", "high")


def folders(path, names, count=5):
    return pictures(path, names, n=count)


def tar(path, names, ending="cls"):
    """30 samples, of which k has the class names[k % len(names)]."""
    texts = [*names] * 15
    rows = samples(range(30), lambda _: texts.pop(0), ending)
    path.mkdir()
    write(path / "a.tar", rows)
    return path


def shards(path, names):
    return tar(path, names)


def in_json(path, names):
    return tar(path, [json.dumps({"cls": float(name) if "." in name else int(name)}) for name in names], "json")


KINDS = {"imagefolder": folders, "webdataset": shards, "json": in_json}


def opened(kind, path, task=MSE, request=None, **keys):
    name = "webdataset" if kind == "json" else kind
    return open_data(DataConfig(name=name, path=str(path), **keys), task, request=request or DataRequest())


def fault(*args, **keys):
    with pytest.raises(DataError) as caught:
        opened(*args, **keys)
    return str(caught.value)


def all_labels(data):
    parts = [part.fetch(np.arange(len(part)))[1]["label"] for part in data.parts.values()]
    return np.concatenate(parts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("names", [FRACTIONS, WHOLE])
def test_names_that_are_numbers_are_the_labels_of_a_loss_of_numbers(tmp_path, kind, names):
    """They were numbered in the order of their letters, and learned as 0, 1, 2."""
    data = opened(kind, KINDS[kind](tmp_path / "p", names))
    found = all_labels(data)
    assert found.dtype == np.float32 and data.sample.labels["label"].classes is None
    assert np.unique(found).tolist() == sorted(map(float, names))
    assert all((found == float(name)).sum() == len(found) / 3 for name in names)


def test_samples_keep_their_number_and_negative_ones_are_labels(tmp_path):
    names = [f"{k - 7.25}" for k in range(30)]
    data = opened("webdataset", tar(tmp_path / "p", names), request=DataRequest(split="all"))
    assert all_labels(data).tolist() == [k - 7.25 for k in range(30)]
    whole = opened("webdataset", tar(tmp_path / "q", [f"{100 * k - 7}" for k in range(30)]))
    assert sorted(all_labels(whole).tolist()) == [100 * k - 7 for k in range(30)]


@pytest.mark.parametrize("kind", ["imagefolder", "webdataset"])
def test_words_have_no_order_for_a_loss_of_numbers(tmp_path, kind):
    path = KINDS[kind](tmp_path / "p", WORDS)
    said = fault(kind, path)
    assert "classes high, low, mid have no order that task.loss: mse could learn" in said
    in_order = opened(kind, path, classes=[*WORDS])
    assert in_order.sample.labels["label"].names == WORDS and set(all_labels(in_order).tolist()) == {0, 1, 2}
    assert opened(kind, path, target="inputs").sample.labels["label"].shape  # no label is read
    two = opened(kind, KINDS[kind](tmp_path / "q", WORDS[:2]), BCE)
    assert set(all_labels(two).tolist()) == {0, 1}


def test_a_loss_of_the_users_gets_fractions_as_they_are_and_is_told_of_places(tmp_path):
    for kind in ("imagefolder", "webdataset"):
        found = all_labels(opened(kind, KINDS[kind](tmp_path / kind, FRACTIONS), OWN))
        assert set(found.tolist()) == {2.5, 10, -33}
    data = opened("imagefolder", folders(tmp_path / "whole", WHOLE), OWN)
    assert "mine:loss gets classes in alphabetical order: 10 as 0, 2 as 1, 33 as 2 (data.classes" in data.remarks[0]
    assert not opened("imagefolder", folders(tmp_path / "places", ("0", "1", "2")), OWN).remarks


def test_all_parts_and_the_run_decide_what_names_are(tmp_path):
    folders(tmp_path / "p" / "train", ("1", "2"))
    folders(tmp_path / "p" / "val", ("1.5",))
    data = opened("imagefolder", tmp_path / "p", OWN)
    assert all_labels(data).tolist() == [1] * 5 + [2] * 5 + [1.5] * 5
    whole = folders(tmp_path / "whole", ("3", "4"))
    of_run = opened("imagefolder", whole, OWN, DataRequest(data.sample, "all"))
    assert all_labels(of_run).tolist() == [3] * 5 + [4] * 5
    folders(tmp_path / "words", ("3", "cat"))
    said = fault("imagefolder", tmp_path / "words", OWN, DataRequest(data.sample, "all"))
    assert "class cat is not a number, and the run was trained on numbers" in said


def test_numbers_are_packed(tmp_path):
    config = DataConfig(name="webdataset", path=str(tar(tmp_path / "p", FRACTIONS)))
    pack(config, MSE, tmp_path / "packed", Alone())
    packed = open_data(DataConfig(name="packed", path=str(tmp_path / "packed")), MSE)
    assert np.unique(all_labels(packed)).tolist() == [-33, 2.5, 10]
    config = DataConfig(name="imagefolder", path=str(folders(tmp_path / "q", WHOLE)))
    pack(config, OWN, tmp_path / "classes", Alone())
    with pytest.raises(DataError, match="labels 'label' were packed as the numbers of classes 10, 2, 33; "):
        open_data(DataConfig(name="packed", path=str(tmp_path / "classes")), MSE)
    assert open_data(DataConfig(name="packed", path=str(tmp_path / "classes")), OWN).sample.num_classes == 3


def test_words_of_cifar_have_no_order_either(tmp_path):
    cifar(tmp_path)
    config = DataConfig(name="cifar10", path=str(tmp_path))
    with pytest.raises(DataError, match="have no order that task.loss: mse could learn"):
        open_data(config, MSE)
    assert open_data(config, OWN).sample.num_classes == 10
    assert len(open_data(config.model_copy(update={"target": "inputs"}), MSE).train)


# ---- classes of tar files


def test_classes_of_cross_entropy_are_numbers_or_words_and_not_both(tmp_path):
    """One odd label made words of all, whose order is that of the alphabet."""
    for k, (names, words) in enumerate(
        {
            ("0", "1", "0x2"): "class '0x2' is no whole number, and others are, as '0'",
            ("0", "1", "2.0"): "class '2.0' is no whole number",
            ("0.0", "2.0", "10.0"): "class '0.0' is no whole number",
            ("cat", "dog", "7"): "class '7' is a whole number, and others are words",
            ("7", "007", "1"): "classes '",
        }.items()
    ):
        path = tar(tmp_path / str(k), names)
        said = fault("webdataset", path, TaskConfig())
        assert words in said and "list data.classes, as words" in said, said
        listed = opened("webdataset", path, TaskConfig(), classes=[*names])  # the advice
        assert listed.sample.labels["label"].names == names
        assert np.bincount(all_labels(listed)).tolist() == [10, 10, 10]
    padded = opened("webdataset", tar(tmp_path / "zeros", ("00", "01", "10")), TaskConfig())
    assert sorted(set(all_labels(padded).tolist())) == [0, 1, 10]


def test_a_part_of_numbers_keeps_the_words_of_the_training(tmp_path):
    (tmp_path / "p").mkdir()
    for part, names in (("train", ("1", "2", "none")), ("val", ("1", "2"))):
        texts = [*names] * 20
        write(tmp_path / "p" / f"{part}.tar", samples(range(30), lambda _, texts=texts: texts.pop(0)))
    data = opened("webdataset", tmp_path / "p", TaskConfig(), classes=["1", "2", "none"])
    assert data.val.fetch(np.arange(4))[1]["label"].tolist() == [0, 1, 0, 1]
    val = opened("webdataset", tmp_path / "p" / "val.tar", TaskConfig(), DataRequest(data.sample, "all"))
    assert val.parts["all"].fetch(np.arange(4))[1]["label"].tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "a class without a name"),
        (b" \n", "a class without a name"),
        ("Bär".encode("latin-1"), "a class that is not UTF-8"),
    ],
)
def test_classes_that_are_none(tmp_path, data, words):
    files = samples(range(9)) | {"0004.cls": data}
    write(tmp_path / "a.tar", files)
    said = fault("webdataset", tmp_path, TaskConfig())
    assert words in said and "a.tar/0004.cls" in said
    write(tmp_path / "a.tar", samples(range(9)) | {"0004.cls": b"\xef\xbb\xbf4\n"})  # as Windows writes it
    assert opened("webdataset", tmp_path, TaskConfig(), DataRequest(split="all")).sample.num_classes == 9
