"""Labels that do not count are left out of the confusion matrix and of the mistakes, whatever their number is."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from hvd_train.config import Config, DataConfig, TaskConfig
from hvd_train.data.arrays import Arrays
from hvd_train.data.catalog import open_data, pack
from hvd_train.data.loader import Loader
from hvd_train.data.packing import Alone
from hvd_train.errors import ConfigError, DataError
from hvd_train.frontends.serial import Serial
from hvd_train.jobs.confusion import confusion, names_of
from hvd_train.jobs.mistakes import mistakes

LABELS = np.array([0, 0, 1, 2, 2, 1, 0, 2])
YES_OR_NO = LABELS.clip(0, 1)


def job(ignored, labels=LABELS, task=None, predict=lambda batch: np.tile(np.eye(3)[1], (len(batch.weights), 1))):
    """A job whose model says class 1 of every sample."""
    task = task or TaskConfig(ignore_index=ignored)
    part = Arrays(np.zeros((len(labels), 2), np.float32), labels, "here", 3, task)
    serial = Serial()
    return SimpleNamespace(
        config=Config(task=task),
        data=SimpleNamespace(sample=part.sample),
        split="val",
        loader=lambda split: Loader(part, global_batch=3),
        frontend=SimpleNamespace(to_device=lambda batch: batch, predict=predict),
        session=SimpleNamespace(groups=SimpleNamespace(data=serial)),
        communicator=serial,
    )


@pytest.mark.parametrize(("ignored", "zeros"), [(-100, 3), (0, 0)])
def test_the_label_of_places_that_do_not_count_may_be_0(ignored, zeros):
    """The accuracy left them out, and the matrix beside it held them."""
    assert confusion(job(ignored)).tolist() == [[0, zeros, 0], [0, 2, 0], [0, 3, 0]]
    assert len(mistakes(job(ignored))) == 3 + zeros


def test_shares_of_yes_are_classes():
    """With loss bce, 0.9 is a yes for the accuracy; for the matrix it was a no, and each one was a mistake."""
    labels = np.array([0.9, 0.1, 0.6, 0.0, 1.0, 0.2], np.float32)
    soft = job(-100, labels, TaskConfig(loss="bce"), predict=lambda batch: np.where(batch.labels["label"] > 0.5, 3, -3))
    assert confusion(soft).tolist() == [[3, 0], [0, 3]] and mistakes(soft) == []
    soft.frontend.predict = lambda batch: np.full(len(batch.weights), 3.0)
    assert confusion(soft).tolist() == [[0, 3], [0, 3]]
    assert sorted(index for _, index, *_ in mistakes(soft)) == [1, 3, 5]


def images(task, predict, labels=YES_OR_NO, classes=2):
    """A job of samples whose labels are classes whatever the loss is, as those of images are."""
    made = job(-100, labels, TaskConfig(), predict)
    made.config = Config(task=task)
    (field,) = made.data.sample.labels.values()
    made.data.sample = replace(made.data.sample, labels={"label": replace(field, classes=classes)})
    return made


@pytest.mark.parametrize("loss", ["bce", "own:loss"])
@pytest.mark.parametrize("column", [True, False])
def test_one_output_is_the_logit_of_class_1(loss, column):
    """Of images of two classes and one logit, the matrix took all samples for class 0, at an accuracy of 0.96."""
    logits = np.array([-3.0, 2.0, 1.0, 0.5, -1.0, 4.0, -2.0, 0.0])

    def predict(batch):
        z = np.pad(logits[batch.indices], (0, len(batch.weights) - batch.count))
        return z[:, None] if column else z

    one = images(TaskConfig(loss=loss), predict)
    assert confusion(one).tolist() == [[2, 1], [2, 3]]
    assert [index for _, index, *_ in mistakes(one)] == [1, 4, 7]
    assert mistakes(one)[0][0] == pytest.approx(1 - 1 / (1 + np.exp(-2)))


@pytest.mark.parametrize("show", [confusion, mistakes])
def test_outputs_that_are_no_classes_are_not_shown_as_classes(show):
    """Digits learned by mse: one number for each sample, and the matrix took all of them for class 0."""
    numbers = partial(images, predict=lambda batch: np.ones((len(batch.weights), 1)))
    with pytest.raises(ConfigError, match="the labels label are not one label of classes"):
        show(numbers(TaskConfig(loss="mse")))
    with pytest.raises(ConfigError, match=r"gives \(1,\) for a sample, and not a number for each of 3 classes"):
        show(numbers(TaskConfig(loss="own:loss"), labels=LABELS, classes=3))
    two = images(TaskConfig(loss="own:loss"), lambda batch: {"a": batch.weights, "b": batch.weights})
    with pytest.raises(ConfigError, match="the model gives a, b, and one output has the classes"):
        show(two)


def test_classes_without_a_name_have_their_number():
    """Three words and data.num_classes: 5 ended with a traceback."""
    more = images(TaskConfig(), lambda batch: np.eye(5)[np.full(len(batch.weights), 4)], LABELS, 5)
    field = replace(more.data.sample.labels["label"], names=("ant", "bee", "cow"))
    more.data.sample = replace(more.data.sample, labels={"label": field})
    assert names_of(more) == ["ant", "bee", "cow", "3", "4"] and confusion(more)[:, 4].tolist() == [3, 2, 3, 0, 0]


def opened(labels, ignored, classes=None):
    part = np.zeros((len(labels), 2), np.float32), labels
    return open_data(DataConfig(name="own", classes=classes), TaskConfig(ignore_index=ignored), user_data=(part, part))


@pytest.mark.parametrize("classes", ["auto", [1, 2, 3], [3, 2, 1]], ids=str)
def test_a_class_that_gets_the_number_of_no_label_is_refused(classes):
    """Of the labels 0 to 3 with 0 ignored, those of class 1 got the number 0 and were ignored, too."""
    labels = np.arange(12) % 4
    with pytest.raises(DataError, match=r"class [13] gets the number 0, which is task.ignore_index"):
        opened(labels, 0, classes)
    texts = labels[labels > 0].astype(str)
    with pytest.raises(DataError, match="gets the number 0"):
        opened(texts, 0)
    data = opened(labels - 1, -1, "auto")  # -1 is no number of a class
    assert data.train.fetch(np.arange(4))[1]["label"].tolist() == [-1, 0, 1, 2]
    assert opened(labels, 0).sample.labels["label"].classes == 4
    assert not opened(labels, 0).remarks, "class 0 was said to occur nowhere, with the advice to number the others"


def test_one_class_of_words_is_ignored_by_its_number():
    """bee, ant and cow in this order, and 0 ignored: ant kept its place 0 in the alphabet, so both did not count."""
    words = np.array(["ant", "bee", "cow"])[np.arange(12) % 3]
    for classes, wanted in ((["bee", "ant", "cow"], [1, 0, 2]), (None, [0, 1, 2])):
        data = opened(words, 0, classes)
        assert data.train.fetch(np.arange(3))[1]["label"].tolist() == wanted
        assert data.sample.labels["label"].masked and not opened(words, 3, classes).sample.labels["label"].masked


@pytest.mark.parametrize("ignored", [-100, 3])
def test_built_in_data_ignore_a_class_too(tmp_path, ignored):
    """They knew -100 alone: with task.ignore_index: 3 all samples counted, without a word."""
    text, folder = tmp_path / "a.txt", tmp_path / "images"
    text.write_bytes(bytes(range(200)) * 10)
    for number in range(8):
        (folder / f"c{number // 2}").mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4)).save(folder / f"c{number // 2}" / f"{number}.png")
    settings = {"digits": {}, "synthetic": {"num_samples": 20}, "text": {"path": str(text), "sequence_length": 8}}
    task = TaskConfig(ignore_index=ignored)
    for name, keys in (settings | {"imagefolder": {"path": str(folder)}}).items():
        data = open_data(DataConfig(name=name, **keys), task)
        assert data.sample.labels["label"].masked == (ignored == 3), name

    class Own:
        fingerprint, num_classes = "a", 4
        __len__, fetch = (lambda self: 8), (lambda self, rows: (np.ones((len(rows), 2)), rows % 4))

    data = open_data(DataConfig(name="own"), task, user_data=(Own(), Own()))
    assert data.sample.labels["label"].masked == (ignored == 3)


def test_packed_labels_are_not_ignored_later(tmp_path):
    """Packed with 5 as a class, and trained with task.ignore_index: 5: it was learned as a class."""
    np.savez(tmp_path / "a.npz", x=np.zeros((12, 2), np.float32), y=np.arange(12) % 6)
    pack(DataConfig(name="npz", path=str(tmp_path / "a.npz")), TaskConfig(), tmp_path / "packed", Alone())
    settings = DataConfig(name="packed", path=str(tmp_path / "packed"))
    with pytest.raises(DataError, match="packed with ignore_index -100, and task.ignore_index is 5"):
        open_data(settings, TaskConfig(ignore_index=5))
    assert open_data(settings, TaskConfig(ignore_index=255)).sample.num_classes == 6
