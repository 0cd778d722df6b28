"""As many training samples of each class, the same for any number of ranks (``data.sampling: balanced``)."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from hvd_train.config import DataConfig, TaskConfig
from hvd_train.data.catalog import open_data
from hvd_train.data.dataset import DataRequest
from hvd_train.data.loader import Loader
from hvd_train.errors import DataError
from tests.own_models import uneven_digits

COUNTS = np.array([7, 1, 60, 2000])
LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(4), COUNTS))
INPUTS = np.arange(len(LABELS), dtype=np.float32)[:, None]


class Fetched:
    """A source that gives labels only with their inputs."""

    num_classes, fingerprint = 4, "fetched"

    def __len__(self):
        return len(LABELS)

    def fetch(self, indices):
        return INPUTS[indices], LABELS[indices]


def opened(train=(INPUTS, LABELS), val=(INPUTS[:9], LABELS[:9]), request=None, task=None, **keys):
    sys.modules["own_balanced"] = SimpleNamespace(parts=lambda: (train, val))
    config = DataConfig.model_validate({"name": "own_balanced:parts", "sampling": "balanced", **keys})
    return open_data(config, task or TaskConfig(), request=request or DataRequest())


def samples(source, seed=3, epoch=0):
    inputs, labels = source.drawn(np.arange(len(source)), seed, epoch)
    assert (LABELS[inputs["input"][:, 0].astype(int)] == labels["label"]).all()
    return inputs["input"][:, 0].astype(int), labels["label"]


@pytest.mark.parametrize("train", [(INPUTS, LABELS), Fetched()])
def test_an_epoch_has_as_many_of_each_class(train):
    source = opened(train).train
    assert len(source) == 2068
    for epoch in range(3):
        assert np.bincount(samples(source, epoch=epoch)[1]).tolist() == [517] * 4
    assert source.note.endswith(
        "data.sampling: balanced: an epoch takes 517 samples of each class (classes have 1 to 2,000)"
    )


def test_samples_without_a_class_are_left_out_and_told():
    labels = LABELS.copy()
    labels[np.flatnonzero(LABELS == 3)[:500]] = -100
    source = opened((INPUTS, labels)).train
    _, drawn = source.drawn(np.arange(len(source)), 3, 0)
    assert np.bincount(drawn["label"]).tolist() == [517] * 4
    assert source.note.endswith("(classes have 1 to 1,500); 500 samples without a class are left out")


def test_an_ignored_label_among_the_numbers_of_classes_is_no_class():
    source = opened(task=TaskConfig(ignore_index=0)).train
    assert source.sample.labels["label"].masked
    _, drawn = source.drawn(np.arange(len(source)), 3, 0)
    assert np.bincount(drawn["label"]).tolist() == [0, 690, 689, 689]
    assert source.note.endswith(
        "an epoch takes 689 or 690 samples of each class (classes have 1 to 2,000); "
        "7 samples without a class are left out"
    )


def test_no_sample_of_a_class_is_taken_more_often_than_another_but_once():
    source, taken = opened().train, np.zeros(len(LABELS), int)
    for epoch in range(5):
        of_epoch = np.bincount(samples(source, epoch=epoch)[0], minlength=len(LABELS))
        taken += of_epoch
        for label in range(4):
            # A round may end within an epoch, and the next one begin with any sample.
            assert np.ptp(of_epoch[label == LABELS]) <= 2
            assert np.ptp(taken[label == LABELS]) <= 1
    assert taken.sum() == 5 * len(LABELS) and (taken[LABELS == 3] > 0).all(), "5 x 517 of 2000"


def test_seeds_and_epochs_draw_anew():
    source = opened().train
    one = samples(source)[0]
    assert (one == samples(source)[0]).all()
    assert not (one == samples(source, epoch=1)[0]).all() and not (one == samples(source, seed=4)[0]).all()


def test_every_world_and_every_resume_takes_the_same_samples_in_the_same_order():
    source = opened().train

    def sequence(size, consumed=0, batch=48):
        loaders = [Loader(source, global_batch=batch, rank=rank, size=size, seed=5) for rank in range(size)]
        steps = zip(*(loader.epoch(2, consumed) for loader in loaders), strict=True)
        rows = [b.inputs["input"][: b.count, 0] for step in steps for part in step for b in part.micro_batches]
        return np.concatenate(rows)

    whole = sequence(1)
    assert len(whole) == len(source)
    for size in (2, 3, 4):
        assert (sequence(size) == whole).all()
    assert (sequence(2, 480) == whole[480:]).all() and (sequence(3, 480, batch=31) == whole[480:]).all()
    loader = Loader(source, global_batch=48, seed=5)
    (part,) = loader.part(2, 96, 0).micro_batches  # as ranks take it that wait for none
    assert (part.inputs["input"][:, 0] == whole[96:144]).all()


def test_an_evaluation_of_the_training_part_takes_each_sample_once():
    part = opened(request=DataRequest(split="train")).parts["train"]
    assert (part.fetch(np.arange(len(part)))[1]["label"] == LABELS).all()
    source = opened().train
    assert (source.fetch(np.arange(len(source)))[1]["label"] == LABELS).all()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_repeated_sample_of_a_random_data_set_is_drawn_anew_each_time(workers):
    torch = pytest.importorskip("torch")

    class Noisy(torch.utils.data.Dataset):
        targets = [0] * 7 + [1] + [2] * 16  # noqa: RUF012

        def __len__(self):
            return len(self.targets)

        def __getitem__(self, index):
            return torch.tensor([float(index), torch.rand(1).item()]), self.targets[index]

    source = opened(Noisy(), (np.zeros((3, 2), np.float32), np.arange(3)), workers=workers).train
    inputs, labels = source.drawn(np.arange(24), 3, 1)
    rows, numbers = inputs["input"].T
    assert np.bincount(labels["label"]).tolist() == [8, 8, 8]
    assert (rows[labels["label"] == 1] == 7).all() and len(np.unique(numbers)) == 24
    parts = [source.drawn(np.arange(24)[rank::2], 3, 1)[0]["input"] for rank in (0, 1)]
    assert np.array_equal(np.stack(parts, 1).reshape(24, 2), inputs["input"])


def test_repeated_samples_are_varied_each_time():
    (images, labels), val = uneven_digits()
    crop = [{"name": "random_crop", "padding": 3}]
    source = opened((images, labels), val, transforms=crop).train
    inputs, labels = source.drawn(np.arange(len(source)), 0, 0)
    zeros = inputs["input"][labels["label"] == 0]
    assert len(zeros) > 30 and len(np.unique(zeros, axis=0)) > 20, "of 3 images"


class Stream(Fetched):
    fetch = None

    def __iter__(self):
        return iter(zip(INPUTS, LABELS, strict=True))


del Stream.fetch


@pytest.mark.parametrize(
    ("train", "keys", "words"),
    [
        ((INPUTS, LABELS[:, None] * 1.0), {"task": TaskConfig(loss="mse")}, "the labels are not one class per sample"),
        ((np.zeros((9, 5), np.int64), np.arange(45).reshape(9, 5) % 3), {}, "the labels are not one class per sample"),
        ((INPUTS, LABELS), {"num_classes": 5}, "no training sample is of class 4"),
        ((INPUTS, np.array(["a", "b"])[LABELS % 2]), {"num_classes": 3}, "no training sample is of class 2"),
        ((INPUTS, np.minimum(LABELS, 1)), {"classes": ["a", "b", "c"]}, "no training sample is of class c"),
    ],
)
def test_what_has_no_classes_is_refused(train, keys, words):
    with pytest.raises(DataError) as caught:
        opened(train, train, **keys)
    assert words in str(caught.value) and caught.value.where == "data.sampling: balanced" and caught.value.fix
