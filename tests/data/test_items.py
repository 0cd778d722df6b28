"""Data sets that give one sample at a time: the same samples on any number of ranks and workers, also random ones."""

from __future__ import annotations

import functools
import gc
import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image, ImageOps

from hvd_train.config import load_config
from hvd_train.data import items
from hvd_train.data.catalog import open_data
from hvd_train.data.dataset import DataRequest
from hvd_train.data.formats import read_digits
from hvd_train.data.generators import seed_all
from hvd_train.data.item_workers import ItemWorkers
from hvd_train.data.loader import Loader
from hvd_train.errors import ConfigError, DataError
from tests.launching import needs_horovod
from tests.limits import SECONDS

ROOT = Path(__file__).parents[2]
torch = pytest.importorskip("torch")
utils = torch.utils.data
IMAGES, LABELS = read_digits()


class Digits(utils.Dataset):
    """As torchvision's: ``targets``, and a transform; ``noise`` is drawn from all three generators."""

    targets = LABELS.tolist()

    def __init__(self, noise=0.0, count=1797):
        self.noise, self.targets = noise, LABELS[:count].tolist()

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, k):
        image = torch.tensor(IMAGES[k] / 16, dtype=torch.float32)[None]
        if self.noise:
            image += self.noise * (torch.rand_like(image) + random.random() + np.random.rand())
        return image, int(LABELS[k])


class Named(utils.Dataset):
    """Its samples are dicts, as Hugging Face's."""

    def __len__(self):
        return 200

    def __getitem__(self, k):
        return {"image": IMAGES[k], "label": int(LABELS[k]), "id": k}


def opened(data, request=None, **keys):
    config = load_config(base={"data": {"name": "mine:data", **keys}})
    return open_data(config.data, config.task, data, request or DataRequest())


def trained_on(data, ranks, workers, epoch=0):
    """All samples of an epoch by their order in it, (n, ...), put together from the ranks' parts."""
    parts = []
    for rank in range(ranks):
        loader = Loader(data, global_batch=60, rank=rank, size=ranks, seed=3, workers=workers)
        batches = [batch for step in loader.epoch(epoch) for batch in step.micro_batches]
        parts.append([(one.inputs["input"][: one.count], one.labels["label"][: one.count]) for one in batches])
    steps = list(zip(*parts, strict=True))
    return tuple(np.concatenate([part[k] for step in steps for part in step]) for k in (0, 1))


def generators():
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_any_number_of_ranks_and_workers_gets_the_same_samples(noise):
    data = Digits(noise, 300)
    want = trained_on(opened((data, data)).train, 1, 1)
    assert len(want[0]) == 300 and want[0].shape[1:] == (8, 8, 1)
    for workers in (1, 2):
        train = opened((data, data), workers=workers).train
        before = generators()
        for ranks in (1, 2, 3):
            assert all(map(np.array_equal, trained_on(train, ranks, workers), want))
        assert before == generators()  # the training draws from these
    again = trained_on(train, 2, 2, epoch=1)[0]
    assert np.array_equal(np.sort(again, 0), np.sort(want[0], 0)) == (not noise)


def test_one_data_set_is_divided_by_class():
    data = opened(Digits(count=500))
    rows = np.sort([*data.train.rows, *data.val.rows])
    assert np.array_equal(rows, np.arange(500)) and len(data.val) == 100
    shares = np.bincount(LABELS[data.val.rows]) / np.bincount(LABELS[:500])
    assert np.allclose(shares, 0.2, atol=0.02)
    inputs, labels = data.val.fetch(np.arange(4))
    assert np.array_equal(labels["label"], LABELS[data.val.rows[:4]])
    assert np.array_equal(inputs["input"][..., 0], (IMAGES[data.val.rows[:4]] / 16).astype(np.float32))
    assert data.train.fingerprint != data.val.fingerprint
    folds = [opened(Digits(count=500), fold=[k, 4]).val.rows for k in range(4)]
    assert np.array_equal(np.sort(np.concatenate(folds)), np.arange(500))


def dataloader(**options):
    return utils.DataLoader(Digits(count=200), **options)


def collated(items):
    return torch.stack([image for image, _ in items]) * 2, torch.tensor([label for _, label in items])


def weighted(weights, noise=0.0, replacement=True):
    """A loader that draws as many samples as there are weights."""
    sampler = utils.WeightedRandomSampler(weights, len(weights), replacement)
    return utils.DataLoader(Digits(noise, len(weights)), batch_size=16, sampler=sampler)


def test_samples_are_drawn_by_the_weights_of_a_sampler():
    rare = np.where(LABELS[:900] == 3, 9.0, 1.0) * (LABELS[:900] != 5)
    want = rare / rare.sum()
    data = opened((weighted(rare), Digits(count=900)))
    epochs = [trained_on(data.train, 1, 1, epoch)[1] for epoch in range(20)]
    drawn = np.bincount(np.concatenate(epochs), minlength=10) / (20 * 900)
    share = np.bincount(LABELS[:900], want, minlength=10)
    assert drawn[5] == 0 and np.abs(drawn - share).max() < 5 * np.sqrt(0.25 / 18000)
    assert not np.array_equal(epochs[0], epochs[1])
    assert np.array_equal(data.train.fetch(np.arange(900))[1]["label"], LABELS[:900])  # an evaluation reads all once
    for ranks in (1, 2, 3):
        assert np.array_equal(trained_on(data.train, ranks, 2)[1], epochs[0])
    other = opened((weighted(rare + 1), Digits(count=900)))
    assert other.train.fingerprint != data.train.fingerprint
    with pytest.raises(DataError, match="samples are drawn once; .*leave one of the two out"):
        opened((weighted(rare + 1), Digits(count=900)), sampling="balanced")


def test_a_sample_that_is_drawn_twice_gets_other_random_numbers():
    only = np.zeros(60)
    only[7] = 1
    data = opened((weighted(only, noise=1.0), Digits(1.0, 60))).train
    images, labels = trained_on(data, 2, 1)
    assert set(labels) == {LABELS[7]} and len({image.tobytes() for image in images}) == 60
    assert np.array_equal(trained_on(data, 3, 1)[0], images)


def test_a_held_out_part_keeps_the_weights_of_its_samples():
    rare = np.where(LABELS[:500] == 3, 0.0, 1.0)
    data = opened(weighted(rare))
    assert np.array_equal(data.train.items.weights, rare[data.train.rows])
    assert 3 not in trained_on(data.train, 1, 1)[1] and 3 in data.val.fetch(np.arange(len(data.val)))[1]["label"]


@pytest.mark.parametrize(
    ("part", "keys", "count"),
    [
        (utils.Subset(Digits(), range(5, 105)), {}, 100),
        (utils.ConcatDataset([Digits(count=50), Digits(count=70)]), {}, 120),
        (utils.TensorDataset(torch.tensor(IMAGES[:90] / 16), torch.tensor(LABELS[:90])), {}, 90),
        (dataloader(batch_size=7, shuffle=True), {}, 200),
        (dataloader(collate_fn=collated), {}, 200),
        (dataloader(collate_fn=functools.partial(collated)), {}, 200),
        (Named(), {"features": ["image"], "num_classes": 10}, 200),
    ],
)  # fmt: skip
def test_what_people_have(part, keys, count):
    data = opened((part, part), **keys)
    assert len(data.train) == count and data.sample.labels["label"].classes == 10
    inputs, labels = data.train.fetch(np.arange(count))
    first = 5 if isinstance(part, utils.Subset) else 0
    if not isinstance(part, utils.ConcatDataset):
        assert np.array_equal(labels["label"], LABELS[first : first + count])
        collate = getattr(part, "collate_fn", None)
        own = collated in (collate, getattr(collate, "func", None))
        scale = 2 / 16 if own else 1 if part.__class__ is Named else 1 / 16
        want = IMAGES[first : first + count] * scale
        assert np.allclose(inputs["input"].reshape(count, -1), want.reshape(count, -1))


class Flipped(Digits):
    """Half of the samples are turned around: two seeds may well do the same to sample 0."""

    def __getitem__(self, k):
        image, label = super().__getitem__(k)
        return (image.flip(-1) if torch.rand(1) < 0.5 else image), label


def test_a_flip_is_random_whatever_it_does_to_the_first_sample():
    data = Flipped(count=90)
    want = trained_on(opened((data, data)).train, 1, 1)
    for seed in range(3):
        torch.manual_seed(seed)
        source = opened((data, data)).train
        assert source.items.random
        assert all(map(np.array_equal, trained_on(source, 3, 1), want))
    assert not opened((Digits(), Digits())).train.items.random


class OwnGenerator(Digits):
    """Noise of a generator that it holds, in a list as transforms are, and for one class alone."""

    def __init__(self, generator, rare=None):
        super().__init__(count=300)
        self.steps, self.rare = [{"noise": generator}], rare

    def __getitem__(self, k):
        image, label = super().__getitem__(k)
        generator = self.steps[0]["noise"]
        if self.rare in (None, label):
            own = torch.rand(1, generator=generator).item() if isinstance(generator, torch.Generator) else None
            image = image + (generator.random() if own is None else own)
        return image, label


class RareDraws(Digits):
    """Two samples of 300 draw numbers."""

    targets = [int(k in (77, 211)) for k in range(300)]

    def __init__(self):
        super().__init__(count=300)
        self.targets = RareDraws.targets

    def __getitem__(self, k):
        image, _ = super().__getitem__(k)
        return image + np.random.rand() * self.targets[k], self.targets[k]


class Augmented(utils.Subset):
    """A part of a data set of tensors that adds noise, as people write it."""

    def __getitem__(self, k):
        image, label = super().__getitem__(k)
        return image + np.random.rand(), label

    def __getitems__(self, rows):  # torch wants it beside the other
        return [self[k] for k in rows]


class LongList(Digits):
    """A generator beside a long list of samples."""

    def __init__(self):
        super().__init__(count=300)
        self.generator, self.samples = np.random.default_rng(0), [(f"{k}.png", k) for k in range(5000)]

    def __getitem__(self, k):
        image, label = super().__getitem__(k)
        return image + self.generator.random(), label


TENSORS = utils.TensorDataset(torch.tensor(IMAGES[:300] / 16), torch.tensor(LABELS[:300]))


def noisy(items):
    images = torch.stack([image for image, _ in items])
    return images + torch.rand_like(images), torch.tensor([label for _, label in items])


@pytest.mark.parametrize(
    "data",
    [
        OwnGenerator(np.random.default_rng(0)),
        OwnGenerator(np.random.RandomState(0)),
        OwnGenerator(random.Random(0)),
        OwnGenerator(torch.Generator()),
        OwnGenerator(np.random.default_rng(0), rare=3),
        RareDraws(),
        utils.DataLoader(Digits(count=300), collate_fn=noisy),
        Augmented(TENSORS, range(300)),
        LongList(),
    ],
)  # fmt: skip
def test_all_kinds_of_randomness_are_the_same_on_any_number_of_ranks(data):
    want = trained_on(opened((data, data)).train, 1, 1)
    source = opened((data, data), workers=2).train
    assert source.items.random
    assert all(np.array_equal(trained_on(source, ranks, 2)[0], want[0]) for ranks in (2, 3))
    assert not np.array_equal(np.sort(trained_on(source, 1, 2, epoch=1)[0], 0), np.sort(want[0], 0))


def centered(items):
    images = torch.stack([image for image, _ in items])
    return images - images.mean(0), torch.tensor([label for _, label in items])


def listed(items):
    return torch.stack([image for image, _ in items]), [label for _, label in items]


def tensors_listed(items):
    return torch.stack([image for image, _ in items]), [torch.tensor(label) for _, label in items]


@pytest.mark.parametrize("collate", [listed, tensors_listed])
def test_a_collator_may_give_lists(collate):
    part = dataloader(collate_fn=collate)
    assert np.array_equal(opened((part, part)).train.fetch(np.arange(9))[1]["label"], LABELS[:9])


def mixed_up(items):
    images, share = torch.stack([image for image, _ in items]), np.random.beta(0.4, 0.4)
    return share * images + (1 - share) * images[torch.randperm(len(items))], torch.tensor([y for _, y in items])


@pytest.mark.parametrize("collate", [centered, mixed_up])
def test_a_collator_that_compares_samples_is_refused(collate):
    part = dataloader(collate_fn=collate)
    with pytest.raises(DataError, match="makes a sample's values of the others in its list, .*mixup and cutmix"):
        opened((part, part))


def test_tensors_that_are_no_images_keep_their_axes():
    rows = utils.TensorDataset(torch.arange(840.0).reshape(8, 3, 5, 7), torch.arange(8) % 2)
    data = opened((rows, rows), num_classes=2, images=False)
    assert np.array_equal(data.train.fetch(np.arange(8))[0]["input"], rows.tensors[0].numpy())
    moved = opened((rows, rows), num_classes=2).train.fetch(np.arange(8))[0]["input"]
    assert np.array_equal(moved, rows.tensors[0].movedim(1, -1).numpy())


def test_axes_that_nobody_can_tell():
    rows = utils.TensorDataset(torch.arange(216.0).reshape(8, 3, 3, 3), torch.arange(8) % 2)
    with pytest.raises(DataError, match=r"tensors of \(3, 3, 3\) may be images, .*data.images: true"):
        opened((rows, rows), num_classes=2)
    for images, want in ((True, rows.tensors[0].movedim(1, -1)), (False, rows.tensors[0])):
        data = opened((rows, rows), num_classes=2, images=images)
        assert np.array_equal(data.train.fetch(np.arange(8))[0]["input"], want.numpy())


class Pictures(utils.Dataset):
    """Pillow's images of one shape in several modes."""

    targets = [0, 1, 0, 1]

    def __init__(self):
        image = Image.fromarray(np.arange(0, 240, dtype=np.uint8).reshape(12, 20)).convert("RGB")
        turned = image.transpose(Image.Transpose.ROTATE_90)
        turned.getexif()[274] = 6
        self.images = [image, image.quantize(40), image.convert("CMYK"), turned]

    def __len__(self):
        return 4

    def __getitem__(self, k):
        return self.images[k], self.targets[k]


def test_images_of_pillow_are_read_as_their_files():
    rows = Pictures()
    got = opened((rows, rows)).train.fetch(np.arange(4))[0]["input"]
    want = np.stack([np.asarray(ImageOps.exif_transpose(image).convert("RGB")) for image in rows.images])
    assert np.array_equal(got, want) and got.dtype == np.uint8
    rows.images[2] = rows.images[2].convert("I")
    with pytest.raises(DataError, match="an image of mode I"):
        opened((rows, rows)).train.fetch(np.arange(4))


def test_several_inputs_by_their_names():
    data = opened((Named(), Named()), features=["image", "id"], num_classes=10)
    assert set(data.sample.inputs) == {"image", "id"}


def test_parts_by_hugging_faces_names():
    splits = {"train": Digits(count=60), "validation": Digits(count=40), "test": Digits(count=20)}
    data = opened(splits, DataRequest(test=True))
    assert [len(data.parts[name]) for name in ("train", "val", "test")] == [60, 40, 20]


class Folder(utils.Dataset):
    """As torchvision's ImageFolder: ``classes``."""

    def __init__(self, *classes):
        self.classes, self.targets = list(classes), [k % len(classes) for k in range(40)]

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, k):
        return torch.full((3,), float(self.targets[k])), self.targets[k]


def hugging_face(*names):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(x=datasets.Sequence(datasets.Value("float32")), y=datasets.ClassLabel(names=[*names]))
    rows = {"x": [[float(k)] * 3 for k in range(40)], "y": [k % len(names) for k in range(40)]}
    return datasets.Dataset.from_dict(rows, features)


@pytest.mark.parametrize("kind", [Folder, hugging_face])
def test_parts_number_their_classes_alike(kind):
    """A folder that lacks a class numbers the others anew: a perfect model had an accuracy of 0.5, without a word."""
    keys = {} if kind is Folder else {"features": ["x"], "labels": ["y"]}
    data = opened((kind("cat", "dog", "fish"), kind("cat", "dog", "fish")), **keys)
    names = {name: field.names for name, field in data.sample.labels.items()}
    assert [*names.values()] == [("cat", "dog", "fish")] and data.val.sample.labels == data.sample.labels
    assert not data.remarks and "taken as" not in data.val.note
    for other in (("cat", "fish"), ("dog", "cat", "fish"), ("cat", "dog", "fish", "owl")):
        told = (
            f"numbers its classes {', '.join(other)}, and the training part has cat, dog, fish; .*give it the training"
        )
        with pytest.raises(DataError, match=told):
            opened((kind("cat", "dog", "fish"), kind(*other)), **keys)
    opened((kind("cat", "dog", "fish"), kind("cat", "dog")), **keys)  # its numbers mean the same
    request = DataRequest(run=data.sample, split="all")
    (part,) = opened((kind("cat", "dog", "fish"), None), request, **keys).parts.values()
    assert part.sample.labels == data.sample.labels
    with pytest.raises(DataError, match="and the run has cat, dog, fish"):
        opened((kind("dog", "cat", "fish"), None), request, **keys)


def test_classes_of_a_data_set_that_are_no_names_of_its_numbers():
    for one in (Folder("1", "2", "3"), Folder("a", "a", "b")):
        assert not next(iter(opened(one).sample.labels.values())).names
    changed = Folder("cat", "dog")
    changed.target_transform = lambda k: 1 - k
    assert not next(iter(opened(changed).sample.labels.values())).names
    assert next(iter(opened(Folder("cat", "dog")).val.sample.labels.values())).names == ("cat", "dog")
    with pytest.raises(DataError, match="joined data sets number their classes in two ways: cat, dog and dog, fish"):
        opened(utils.ConcatDataset([Folder("cat", "dog"), Folder("dog", "fish")]))


class Texts(utils.Dataset):
    """Token ids of 1 to 6 tokens, and a class for each text, or for each token."""

    def __init__(self, labels=lambda k: k % 3, count=40):
        self.labels, self.count = labels, count

    def __len__(self):
        return self.count

    def __getitem__(self, k):
        ids = torch.arange(k, k + 1 + k % 6)
        return {"ids": ids, "types": ids * 0, "size": 1.0, "label": self.labels(k)}


def test_samples_of_different_lengths():
    keys = {"lengths": {"max_length": 8}, "num_classes": 3}
    data = opened(Texts(), **keys)
    assert set(data.sample.inputs) == {"ids", "types", "size", "mask"} and len(data.val) == 9  # by class
    inputs, labels = data.train.fetch(np.arange(len(data.train)))
    rows = data.train.rows
    assert labels["label"].tolist() == (rows % 3).tolist()
    assert inputs["mask"].sum(1).tolist() == (1 + rows % 6).tolist() and inputs["size"].tolist() == [1.0] * len(rows)
    assert all(one[:2].tolist() == [k, k + 1] for one, k in zip(inputs["ids"], rows, strict=True) if k % 6)
    data = opened(Texts(), features=["ids"], **keys)
    assert set(data.sample.inputs) == {"ids", "mask"}  # by its name: a model of transformers has such arguments
    data = opened(Texts(lambda k: torch.arange(1 + k % 6) % 3), features=["ids"], **keys)
    assert data.train.fetch(np.array([3]))[1]["label"][0].tolist()[:1] == [0]
    assert (data.train.fetch(np.array([3]))[1]["label"] == -100).any()
    listed = [(torch.arange(1 + k % 3), k % 3) for k in range(30)]
    assert set(opened((List(listed), List(listed)), **keys).sample.inputs) == {"input", "mask"}
    padded = utils.DataLoader(List(listed), collate_fn=padding)
    drawn = Texts(lambda k: int(torch.randint(3, ())))
    for part, told in ((drawn, "samples are random, and"), (padded, "has a collate_fn or a sampler of its own, and")):
        with pytest.raises(DataError, match=f"{told} with data.lengths they are read once"):
            opened(part, **keys)


def padding(items):
    ids = torch.nn.utils.rnn.pad_sequence([x for x, _ in items], batch_first=True)
    return torch.nn.functional.pad(ids, (0, 8 - ids.shape[1])), torch.tensor([y for _, y in items])


class List(utils.Dataset):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, k):
        return self.samples[k]


class Clock(Digits):
    def __getitem__(self, k):
        return torch.tensor([time.perf_counter()]), 0


class Uneven(Digits):
    def __getitem__(self, k):
        return torch.zeros(3 + k % 2), 0


class Growing(Digits):
    def __getitem__(self, k):
        self.targets.append(0)
        return torch.zeros(3), 0


class Three(Digits):
    def __getitem__(self, k):
        return torch.zeros(3), 0, 0


class Two(Digits):
    """A pair of images, which torch's own collation keeps apart."""

    def __getitem__(self, k):
        return (torch.zeros(3), torch.ones(3)), k % 2


class Gaps(utils.Dataset):
    """One of four samples has no number."""

    targets = (0, 1) * 4

    def __init__(self, gap):
        self.gap = gap

    def __len__(self):
        return 8

    def __getitem__(self, k):
        return {"a": 0.5, "b": self.gap if k % 4 == 3 else k % 2 == 0}, k % 2


class Without(utils.Dataset):
    def __len__(self):
        return 9

    def __getitem__(self, k):
        return torch.zeros(3), k % 2


@pytest.mark.parametrize(
    ("part", "told"),
    [
        (Clock(), r"sample \d+ differs each time it is read, .*; draw what is random"),
        (Uneven(), r"samples have unequal shapes, as \(3,\) and \(4,\); .*; give them one shape"),
        (Gaps(None), "sample 3 holds None, and sample 0 a number; .*; give all samples numbers of one type"),
        (Gaps("no"), "sample 3 holds 'no', and sample 0 a number"),
        (Gaps(np.uint8(1)), "sample 3 is of uint8, and sample 0 of bool; .*: bytes are divided by 255"),
        (Two(), "the inputs of sample 0 are a tuple of 2 arrays; .*; name them, as the model's arguments are"),
        (Growing(), "the data set had 1,797 samples, and has 1,[78].. now; .*; its length must not change"),
        (Three(), "a sample is a tuple of 3; .*; let __getitem__ return"),
        (Without(), "the number of classes is not known: .*; set data.num_classes"),
        (Named(), "the number of classes is not known"),
        (dataloader(sampler=utils.WeightedRandomSampler([1.0] * 9, 9)), "draws 9 of 200 samples; .*num_samples=200"),
        (weighted(np.ones(200), replacement=False), "draws 200 of 200 samples without replacement"),
        (weighted(np.zeros(200)), "negative, not finite, or all 0"),
        (dataloader(sampler=utils.SubsetRandomSampler(range(9))), "a SubsetRandomSampler, and the order"),
        (dataloader(sampler=utils.RandomSampler(range(200), num_samples=8)), "gives 8 of 200 samples.*Subset"),
        (dataloader(sampler=utils.SequentialSampler(range(9))), "gives 9 of 200 samples of another object; .*Subset"),
        (dataloader(batch_sampler=utils.BatchSampler(range(9), 3, True)), "a batch sampler of its own, and the order"),
        (utils.TensorDataset(torch.zeros(9, 3)), "a sample is a tuple of 1"),
        ({"train": Digits()}, "there is no part 'validation' among train"),
    ],
)  # fmt: skip
def test_bad_data(part, told):
    with pytest.raises(DataError, match=told):
        opened(part if isinstance(part, dict) else (part, part)).train.fetch(np.arange(4))


def test_columns_that_are_not_there():
    with pytest.raises(DataError, match="a sample has image, label, id, not picture; .*data.features"):
        opened(Named(), features=["picture"], num_classes=10)
    with pytest.raises(ConfigError, match="data.features: belongs to name: table, or to your own data set"):
        load_config(base={"data": {"name": "digits", "features": ["x"]}})


@pytest.fixture
def forks(monkeypatch):
    """Other tests of this process may have computed with TensorFlow, after which none is forked."""
    monkeypatch.setattr(items, "_tensorflow_runs", lambda: False)


def test_no_process_is_left(forks):
    train = opened(Digits(1.0), workers=2).train
    mine = [child for child in psutil.Process().children() if child.name() == psutil.Process().name()]
    assert len(mine) >= 2
    train.drawn(np.arange(3), 0, 0)
    del train
    gc.collect()
    assert len(psutil.wait_procs(mine, timeout=20)[1]) == 0


def test_a_process_that_dies_is_told(forks):
    train = opened(Digits(1.0)).train
    for child in psutil.Process().children():
        os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(DataError, match="a process that fetches samples has ended; .*look for a crash"):
        train.drawn(np.arange(3), 0, 0)


JOB = """
import numpy as np, random, torch
from hvd_train.data.formats import read_digits

IMAGES, LABELS = read_digits()

class Digits(torch.utils.data.Dataset):
    targets = LABELS.tolist()
    def __len__(self):
        return len(LABELS)
    def __getitem__(self, k):
        noise = 0.1 * torch.rand(1, 8, 8) + np.random.rand() + random.random()
        return torch.tensor(IMAGES[k] / 16)[None] + noise, LABELS[k]

def data():
    return Digits()
"""


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_a_random_data_set_trains_the_same_on_two_ranks(framework, tmp_path):
    needs_horovod()
    (tmp_path / "mine.py").write_text(JOB)
    words = [sys.executable, "-P", "-m", "hvd_train", "fit", "--set", "data.name=mine:data", "--set", "data.workers=2"]
    for setting in (f"framework={framework}", "model={name: mlp, hidden: [8]}", "max_epochs=1", "precision=64"):
        words += ["--set", setting]
    losses = []
    for ranks in (1, 2):
        line = [*words, "-np", str(ranks), "--set", f"batch_size={64 // ranks}", "--run-dir", f"runs/{ranks}"]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "samples are random: drawn by (seed, epoch, index)" in done.stdout + done.stderr
        losses.append(json.loads((tmp_path / "runs" / str(ranks) / "summary.json").read_text())["val_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


OF_TENSORFLOW = """
import numpy as np, tensorflow as tf, time
from hvd_train.config import load_config
from hvd_train.data.catalog import open_data

class Rows:
    targets = [0, 1] * 30
    def __len__(self):
        return 60
    def __getitem__(self, k):
        wide = tf.random.stateless_uniform([600, 600], [1, k])
        return tf.reduce_mean(wide @ wide, 0)[:4].numpy(), k % 2

config = load_config(base={"data": {"name": "mine:data", "workers": 2}})
data = open_data(config.data, config.task, (Rows(), Rows()))
for part in (data.train, data.val):
    inputs, _ = part.drawn(np.arange(60), 0, 0)
    print("read", inputs["input"].shape)
"""


def test_a_data_set_that_computes_with_tensorflow_does_not_wait_forever():
    pytest.importorskip("tensorflow")
    line = [sys.executable, "-c", OF_TENSORFLOW]
    env = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.stdout.count("read (60, 4)") == 2, done.stderr[-3000:]


class Wide(Digits):
    """Its samples are computed by all threads of torch."""

    def __getitem__(self, k):
        image, label = super().__getitem__(k)
        wide = torch.ones(600, 600) @ torch.ones(600, 600)
        return image * wide.exp().clamp(max=1).mean(), label


def test_a_process_does_not_wait_for_threads_that_it_lacks(forks):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        train = opened((Wide(count=30), Wide(count=30)), workers=2).train
        assert len(trained_on(train, 2, 2)[0]) == 30
    finally:
        torch.set_num_threads(before)


def test_targets_of_a_loss_of_numbers_are_numbers():
    """They tell neither classes nor what is held out of each."""
    samples = utils.TensorDataset(torch.rand(40, 3), torch.arange(40) // 2)
    config = load_config(base={"data": {"name": "mine:data", "val_fraction": 0.2}, "task": {"loss": "mse"}})
    data = open_data(config.data, config.task, samples)
    assert (len(data.train), len(data.val)) == (32, 8) and data.sample.declared_classes is None
    classes = opened(samples, val_fraction=0.25)
    assert classes.sample.num_classes == 20
    own = load_config(base={"data": {"name": "mine:data"}, "task": {"loss": "math:hypot"}})
    note = open_data(own.data, own.task, samples).train.note
    assert "the data set lists targets of 20 classes (data.num_classes says otherwise)" in note


def test_masked_values_are_missing():
    class Masked(Digits):
        def __getitem__(self, k):
            return np.ma.masked_greater(IMAGES[k] / 16, 0.9), int(LABELS[k])

    with pytest.raises(DataError, match="values of a sample are a masked array, and .* missing"):
        opened(Masked(count=50))


def test_changed_labels_are_other_data():
    """Also those of samples that the fingerprint does not look at."""
    x, y = torch.rand(60, 3), torch.arange(60) % 3
    other = torch.where(torch.arange(60) == 31, (y + 1) % 3, y)
    one, two = (opened(utils.TensorDataset(x, labels)).train.fingerprint for labels in (y, other))
    assert one != two and one == opened(utils.TensorDataset(x, y)).train.fingerprint


@pytest.mark.parametrize(("shape", "wanted"), [((4,), (3, 5, 7)), ((3, 5, 7), (5, 7, 3)), ((1, 5, 7), (5, 7, 3))])
def test_labels_are_images_only_beside_an_image(shape, wanted):
    """An own loss got a tensor (3, 5, 7) as (5, 7, 3) where no input was an image."""
    samples = utils.TensorDataset(torch.rand(20, *shape), torch.rand(20, 3, 5, 7))
    config = load_config(base={"data": {"name": "mine:data"}, "task": {"loss": "math:hypot", "metrics": []}})
    data = open_data(config.data, config.task, samples)
    label = data.sample.labels["label"]
    assert label.shape == wanted and label.image == (wanted == (5, 7, 3))


def sized(count: int, kind: str = "float32"):
    """Give arrays whose size depends on the call: some go through the pipe, the others through common memory."""
    return {"x": np.arange(count * 3, dtype=kind).reshape(count, 3), "y": [np.ones(2), np.full(count, 7, np.int64)]}


@pytest.mark.parametrize("memory", [True, False])
def test_arrays_of_any_size_come_back_from_a_process(monkeypatch, memory):
    if not memory:  # as a sandbox may
        monkeypatch.setattr(os, "memfd_create", lambda *_: (_ for _ in ()).throw(PermissionError()))
    workers = ItemWorkers(2, sized, "here")
    kept = []
    for count in (1, 100_000, 10, 400_000, 20_000, 0):
        for kind in ("float32", "int64"):
            kept.append((count, kind, workers.run(count, kind)))
    for count, kind, got in kept:  # what came later has not changed it
        want = sized(count, kind)
        assert got["x"].dtype == kind and np.array_equal(got["x"], want["x"]) and got["x"].flags.writeable
        assert all(map(np.array_equal, got["y"], want["y"]))
    with ThreadPoolExecutor(2) as pool:
        got = [*pool.map(workers.run, range(30_000, 30_040))]
    assert all(
        np.array_equal(one["x"], sized(count)["x"]) for one, count in zip(got, range(30_000, 30_040), strict=True)
    )
    with pytest.raises(DataError, match="fetch failed: TypeError"):
        workers.run("a")


def test_pytorchs_numbers_are_seeded_as_manual_seed_does():
    for key in (0, 3, 2**63 + 5, 2**64 - 1):
        torch.manual_seed(key)
        want = torch.rand(3)
        seed_all(key)
        assert torch.equal(torch.rand(3), want)
