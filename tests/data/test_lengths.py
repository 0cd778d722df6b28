"""Samples of different lengths: buckets, masks and labels at places; the same for any number of ranks."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from hvd_train.config import DataConfig, TaskConfig, load_config
from hvd_train.data.catalog import open_data
from hvd_train.data.dataset import DataRequest
from hvd_train.data.loader import Loader
from hvd_train.errors import ConfigError, DataError
from tests.own_models import Strokes, strokes

(SAMPLES, LABELS), VAL = strokes()
LENGTHS = np.array([len(one) for one in SAMPLES])
AT_PLACES = strokes(at_places=True)


def opened(parts=((SAMPLES, LABELS), VAL), task=None, request=None, sampling=None, **lengths):
    sys.modules["own_lengths"] = SimpleNamespace(parts=lambda: parts)
    config = {"name": "own_lengths:parts", "sampling": sampling, "lengths": {"max_length": 24, "block": 32} | lengths}
    return open_data(DataConfig.model_validate(config), task or TaskConfig(), request=request or DataRequest())


def batches(source, size=1, consumed=0, batch=32, epoch=1, accumulate=1):
    """The batches of all ranks, in the order of the samples."""
    loaders = [
        Loader(source, global_batch=batch, rank=rank, size=size, seed=5, accumulate=accumulate) for rank in range(size)
    ]
    steps = zip(*(loader.epoch(epoch, consumed) for loader in loaders), strict=True)
    return [
        batch
        for step in steps
        for batches in zip(*(one.micro_batches for one in step), strict=True)
        for batch in batches
    ]


def rows(found):
    """The samples without padding, and their labels."""
    samples = [x[m] for b in found for x, m in zip(b.inputs["input"][: b.count], b.inputs["mask"], strict=False)]
    return samples, np.concatenate([b.labels["label"][: b.count] for b in found])


def same(a, b):
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("buckets", ["auto", [6, 10, 14], None])
def test_batches_are_cut_to_their_buckets_and_hold_each_sample_once(buckets):
    source = opened(buckets=buckets).train
    found = batches(source)
    samples, labels = rows(found)
    key = sorted(map(tuple, samples))
    assert key == sorted(map(tuple, SAMPLES)) and sorted(labels) == sorted(LABELS)
    for batch in found:
        longest = max(batch.inputs["mask"].sum(1))
        bounds = [6, 10, 14, 24] if buckets == [6, 10, 14] else [longest]
        wanted = min(bound for bound in bounds if bound >= longest)
        length = batch.inputs["input"].shape[1]
        assert (
            batch.inputs["mask"].shape == batch.inputs["input"].shape
            and not batch.inputs["input"][~batch.inputs["mask"]].any()
        )
        assert length >= wanted if buckets == "auto" else length == wanted
    padded = sum(b.inputs["input"].size for b in found)
    if buckets:  # in blocks of one bucket
        assert padded < 0.8 * len(SAMPLES) * LENGTHS.max()


@pytest.mark.parametrize("sampling", [None, "balanced"])
@pytest.mark.parametrize("parts", [((SAMPLES, LABELS), VAL), (Strokes(SAMPLES, LABELS), Strokes(*VAL))])
def test_every_world_and_every_resume_takes_the_same_samples_in_batches_as_long(sampling, parts):
    source = opened(parts, sampling=sampling).train
    whole = batches(source)
    samples, labels = rows(whole)
    for size in (2, 3, 4):
        found = batches(source, size)
        assert same(rows(found)[0], samples) and (rows(found)[1] == labels).all()
        lengths = [b.inputs["input"].shape[1] for b in found]
        assert lengths == [b.inputs["input"].shape[1] for b in whole for _ in range(size)], "as of one rank"
    assert same(rows(batches(source, 3, accumulate=2))[0], samples)
    assert same(rows(batches(source, 2, consumed=96))[0], samples[96:])
    # In batches of another size, as on more ranks with the same batch_size.
    assert same(rows(batches(source, 3, consumed=96, batch=50))[0], samples[96:])
    assert not same(rows(batches(source, epoch=2))[0], samples)


def tokens(most=200, **lengths):
    return opened(max_tokens=most, block=256, **lengths).train


@pytest.mark.parametrize("buckets", ["auto", [6, 10, 14]])
def test_batches_by_tokens_hold_samples_of_one_bucket_each_once_whatever_the_world(buckets):
    source = tokens(buckets=buckets)
    whole = batches(source)
    samples, labels = rows(whole)
    assert sorted(map(tuple, samples)) == sorted(map(tuple, SAMPLES)) and sorted(labels) == sorted(LABELS)
    places = [b.inputs["input"].size for b in whole]
    assert max(places) <= 200 and np.mean(sorted(places)[len(places) // 4 :]) > 150, "as full as they can be"
    of_bucket: dict[int, set] = {}
    for batch in whole:
        of_bucket.setdefault(batch.inputs["input"].shape[1], set()).add(len(batch.weights))
        longest = batch.inputs["mask"][: batch.count].sum(1).max()
        assert buckets == "auto" or batch.inputs["input"].shape[1] == min(b for b in (6, 10, 14, 24) if b >= longest)
    assert all(len(shapes) == 1 for shapes in of_bucket.values()), "one shape a bucket, its last batch too"
    for size in (2, 3, 4):
        found = batches(source, size)
        assert same(rows(found)[0], samples) and (rows(found)[1] == labels).all()
        assert [b.count for b in whole] == [
            sum(b.count for b in found[k : k + size]) for k in range(0, len(found), size)
        ]
    parts = batches(source, 3, accumulate=2)
    assert same(rows(parts)[0], samples) and (rows(parts)[1] == labels).all()


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_ranks_have_equal_parts_of_batches_by_tokens(size):
    several = [*SAMPLES] * 8, np.tile(LABELS, 8)
    source = opened((several, VAL), max_tokens=900, block=256).train
    found = batches(source, size)
    steps = [found[k : k + size] for k in range(0, len(found), size)]
    # The places that ranks compute, all padded to one length; the last batch of a bucket may have an odd sample.
    work = [[b.count * b.inputs["input"].shape[1] for b in step] for step in steps]
    uneven = [max(x) / np.mean(x) for x in work]
    assert np.mean(uneven) < 1.05 and np.median(uneven) < 1.03
    assert min(sum(x) for x in work) > 900 / 3, "no small rest"


def test_an_epoch_by_tokens_resumes_between_any_two_batches():
    source = tokens()
    ends = np.cumsum([b.count for b in batches(source)])
    samples = rows(batches(source))[0]
    loader = Loader(source, global_batch=8, seed=5)
    assert loader.steps_per_epoch == len(ends) and not same(rows(batches(source, epoch=2))[0], samples)
    for number in (1, 2, len(ends) // 2, len(ends) - 1):
        consumed = int(ends[number - 1])
        assert same(rows(batches(source, 3, consumed=consumed))[0], samples[consumed:])
        assert loader.place(1, consumed) == loader.steps_done(1, consumed) == number
        assert loader.samples(1, number) == consumed
        assert next(loader.epoch(1, consumed)).consumed == ends[number]
    assert loader.place(1, 0) == loader.samples(1, 0) == 0 and loader.place(1, len(source)) == len(ends)
    assert {len(batches(source, epoch=epoch)) for epoch in range(4)} == {len(ends)}


def test_an_evaluation_by_tokens_takes_as_many_samples_as_fit():
    data = opened(max_tokens=200, block=256)
    config = load_config(base={"data": {"lengths": {"max_length": 24, "max_tokens": 200}}})
    assert config.batch_size is None and config.global_batch(1) == config.global_batch(4) == 8
    found = [*Loader(data.val, global_batch=config.global_batch(1)).evaluation()]
    assert same(rows(found)[0], VAL[0]) and {len(b.weights) for b in found} == {8}


def test_ranks_that_wait_for_none_take_the_same_parts():
    source = opened().train
    loader = Loader(source, global_batch=32, size=2, seed=5)
    found = [loader.part(1, 64, rank).micro_batches[0] for rank in range(2)]
    wanted = batches(source, 2)[4:6]
    for a, b in zip(found, wanted, strict=True):
        assert same([*a.inputs.values(), *a.labels.values()], [*b.inputs.values(), *b.labels.values()])


def test_an_evaluation_is_in_order_and_padded_to_its_longest_sample():
    source = opened().val
    found = [*Loader(source, global_batch=32).evaluation()]
    assert same(rows(found)[0], VAL[0])
    assert all(b.inputs["mask"].any(0).all() for b in found)
    whole = [*Loader(source, global_batch=32).evaluation(whole=True)]
    assert {b.inputs["input"].shape[1] for b in whole} == {24} and same(rows(whole)[0], VAL[0])


def test_labels_at_places_are_padded_by_the_label_that_does_not_count():
    data = opened(AT_PLACES)
    assert data.sample.labels["label"].masked and data.sample.labels["label"].ragged
    for batch in batches(data.train):
        labels, mask = batch.labels["label"], batch.inputs["mask"]
        assert labels.shape == mask.shape and ((labels == -100) == ~mask).all()


def test_other_axes_and_several_inputs():
    curves = [np.stack([one, one * 2], 1).astype(np.float32) for one in SAMPLES]
    parts = (({"ids": SAMPLES, "curve": curves, "age": LABELS * 1.0}, LABELS),) * 2
    data = opened(parts, mask="present")
    fields = data.sample.inputs
    assert [name for name, x in fields.items() if x.ragged] == ["ids", "curve", "present"]
    assert data.sample.input_shape == {"ids": (None,), "curve": (None, 2), "age": (), "present": (None,)}
    for batch in batches(data.train):
        length = batch.inputs["ids"].shape[1]
        assert batch.inputs["curve"].shape[1:] == (length, 2) and batch.inputs["age"].shape == (32,)
        assert (batch.inputs["curve"][..., 1] == 2 * batch.inputs["ids"]).all()
    assert list(opened(parts, mask=None).sample.inputs) == ["ids", "curve", "age"]


def test_longer_samples_are_refused_or_cut():
    with pytest.raises(DataError) as caught:
        opened(max_length=12)
    first = int(np.argmax(LENGTHS))
    assert f"inputs of sample {first} has the length {LENGTHS.max()}, over 12" in str(caught.value)
    assert "data.lengths.truncate: true" in caught.value.fix
    source = opened(max_length=12, truncate=True).train
    samples = rows(batches(source))[0]
    assert max(map(len, samples)) == 12
    assert sorted(map(tuple, samples)) == sorted(tuple(one[:12]) for one in SAMPLES)
    fetched = opened((Strokes(SAMPLES, LABELS), Strokes(*VAL)), max_length=12, truncate=True).train
    assert same(rows(batches(fetched))[0], samples)


def test_the_start_tells_lengths_buckets_and_padding():
    note = opened(buckets=[6, 10, 14]).train.note
    assert f"data.lengths: {LENGTHS.min()} to {LENGTHS.max()} (max_length 24); buckets 6, 10, 14, 24: " in note
    assert "% padding (" in note


def wrong_lengths():
    part = Strokes(SAMPLES, LABELS)
    part.lengths = part.lengths + 1
    return part


def no_lengths():
    part = Strokes(SAMPLES, LABELS)
    del part.lengths
    return part


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ((np.zeros((5, 4), np.float32), np.arange(5)), "training samples do not differ in length"),
        (([[1], []], [0, 1]), "inputs of sample 1 has the length 0"),
        (([[1], [[2]]], [0, 1]), "differ in more than their lengths"),
        (
            ({"a": [[1], [2, 3]], "b": [[1], [2]]}, [0, 1]),
            "sample 1 has 2 positions in inputs 'a' and 1 positions in inputs 'b'",
        ),
        (({"mask": [[1], [2, 3]]}, [0, 1]), "the data have an input 'mask' of their own"),
        (no_lengths(), "Strokes has no lengths"),
        (wrong_lengths(), "does not have the length given by the source's lengths"),
    ],
)
def test_mistakes_in_the_data(train, words):
    with pytest.raises(DataError) as caught:
        opened((train, train))
    assert words in str(caught.value) and caught.value.fix


def test_numbers_at_places_are_refused():
    numbers = ([np.zeros(3), np.zeros(2)], [np.zeros(3), np.zeros(2)])
    with pytest.raises(DataError, match="are numbers of different lengths"):
        opened((numbers, numbers), task=TaskConfig(loss="mse"))


def test_ragged_data_without_the_key_name_it():
    sys.modules["own_lengths"] = SimpleNamespace(parts=lambda: ((SAMPLES, LABELS), VAL))
    with pytest.raises(DataError, match=r"different lengths.*set data.lengths"):
        open_data(DataConfig(name="own_lengths:parts"))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"lengths": {"buckets": [20, 10]}}, "must rise"),
        ({"lengths": {"max_length": 10, "buckets": [20]}}, "20 is more than max_length"),
        ({"lengths": {"mask": "a b"}}, "the name of an argument"),
        ({"lengths": {"max_tokens": 511}}, "max_tokens: 511 places are too few for a sample of max_length, 512"),
        ({"lengths": {"max_tokens": 900, "buckets": None}}, "max_tokens: needs buckets"),
        ({"lengths": {"max_tokens": 900, "block": 32}}, "block: with max_tokens, batches are the blocks"),
    ],
)
def test_mistakes_in_the_configuration(keys, words):
    with pytest.raises(ConfigError, match=words):
        load_config(base={"data": keys})
