"""Streams: each sample on one rank, in the stream's order, from where a run stopped."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from hvd_train.config import DataConfig, TaskConfig
from hvd_train.data.catalog import open_data, pack
from hvd_train.data.loader import Loader
from hvd_train.errors import DataError

N = 23


class Iterated:
    """Sample k is k, in every epoch; ``ends`` before its length."""

    num_classes, fingerprint = 5, "numbers"

    def __init__(self, ends=N):
        self.ends, self.read = ends, 0

    def __len__(self):
        return N

    def __iter__(self):
        for k in range(self.ends):
            self.read += 1
            yield {"x": np.full(3, k, np.float32), "again": np.int64(k)}, k % 5


class Jumping(Iterated):
    """Sample k of epoch e is 100 e + k."""

    __iter__ = None  # not asked for

    def iterate(self, epoch, start):
        for k in range(start, self.ends):
            self.read += 1
            yield {"x": np.full(3, 100 * epoch + k, np.float32), "again": np.int64(k)}, k % 5


def opened(own, **more):
    sys.modules["own_stream"] = SimpleNamespace(pair=lambda: (own, Iterated()))
    return open_data(DataConfig(name="own_stream:pair", **more))


def numbers(batch):
    k = int(batch.weights.sum())
    assert (batch.labels["label"][:k] == batch.inputs["again"][:k] % 5).all()
    return batch.inputs["x"][:k, 0].astype(int).tolist()


@pytest.mark.parametrize("own", [Iterated, Jumping])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_ranks_share_each_global_batch_in_the_streams_order(own, size):
    sources = [opened(own()).train for _ in range(size)]
    loaders = [Loader(s, global_batch=4, accumulate=2, rank=r, size=size) for r, s in enumerate(sources)]
    for epoch, first in ((0, 0), (1, 100 * (own is Jumping))):
        steps = [list(loader.epoch(epoch)) for loader in loaders]
        for k, together in enumerate(zip(*steps, strict=True)):
            found = [x for m in range(2) for step in together for x in numbers(step.micro_batches[m])]
            assert found == [first + i for i in range(4 * k, min(4 * k + 4, N))]


@pytest.mark.parametrize("own", [Iterated, Jumping])
def test_a_run_goes_on_where_it_was(own):
    whole = [numbers(s.micro_batches[0]) for s in Loader(opened(own()).train, global_batch=4).epoch(2)]
    stream = own()
    source = opened(stream).train
    stream.read = 0
    rest = [numbers(s.micro_batches[0]) for s in Loader(source, global_batch=4).epoch(2, consumed=8)]
    assert rest == whole[2:]
    assert stream.read == (N if own is Iterated else N - 8)  # one that can jump reads nothing twice


def test_evaluation_sees_every_sample_and_may_be_repeated():
    data = opened(Iterated())
    loaders = [Loader(data.val, global_batch=6, rank=rank, size=3) for rank in range(3)]
    for _ in range(2):
        found = [x for loader in loaders for batch in loader.evaluation() for x in numbers(batch)]
        assert sorted(found) == list(range(N))


def test_transforms_and_targets_keep_the_order():
    sys.modules["own_stream_more"] = SimpleNamespace(ten=lambda sample, rng: sample | {"x": sample["x"] + 10})
    data = opened(Jumping(), transforms=[{"name": "own_stream_more:ten"}])
    steps = Loader(data.train, global_batch=4).epoch(1)
    assert numbers(next(steps).micro_batches[0]) == [110, 111, 112, 113]
    steps.close()
    steps = Loader(opened(Jumping(), target="inputs").train, global_batch=4).epoch(0)
    assert next(steps).micro_batches[0].labels["x"][:, 0].tolist() == [0, 1, 2, 3]
    steps.close()


def test_an_iterable_dataset_of_pytorch():
    pytest.importorskip("torch")
    from torch import tensor
    from torch.utils.data import IterableDataset

    class Own(IterableDataset):
        num_classes, fingerprint = 5, "torch"

        def __len__(self):
            return N

        def __iter__(self):
            return ((tensor([1.0 * k]), k % 5) for k in range(N))

    sys.modules["own_stream"] = SimpleNamespace(pair=lambda: (Own(), Own()))
    found = open_data(DataConfig(name="own_stream:pair")).train
    assert found.sample.input_shape == (1,) and found.fetch(np.array([2, 4]))[0]["input"].tolist() == [[2], [4]]


def test_a_stream_may_write_all_samples_in_one_place():
    class Own(Iterated):
        def __iter__(self):
            x = np.zeros(3, np.float32)
            for k in range(N):
                x[:] = k
                yield {"x": x, "again": np.int64(k)}, k % 5

    assert opened(Own()).train.fetch(np.array([1, 2, 5]))[0]["x"][:, 0].tolist() == [1, 2, 5]


class Bare:
    def __iter__(self):
        return iter(())


class Alone(Iterated):
    def __iter__(self):
        yield 3


class Once(Iterated):
    """Goes on where it was."""

    def __iter__(self):
        self.read += 1
        return iter([({"x": np.full(3, self.read, np.float32), "again": np.int64(0)}, 0)])


class Endless(Iterated):
    def __len__(self):
        raise TypeError("no length")


@pytest.mark.parametrize(
    ("own", "more", "words"),
    [
        (Iterated(7), {}, "the stream ended before sample 7 of epoch 0, and its length is 23"),
        (Iterated(0), {}, "the stream ended before sample 0 of epoch 0"),
        (Bare(), {}, "Bare has no __len__, fingerprint"),
        (Once(), {}, "a second iteration has other samples, so ranks and resumed runs would"),
        (Endless(), {}, "the stream failed: TypeError: no length"),
        (np.zeros((4, 3)), {}, "ndarray has no fetch, fingerprint, num_classes"),
        (Alone(), {}, "the stream gives a int as sample 0"),
        (Iterated(), {"workers": 2}, "a stream is read by one thread, in order; data.workers"),
    ],
)
def test_faults(own, more, words):
    with pytest.raises(DataError) as told:
        list(Loader(opened(own, **more).train, global_batch=4).epoch(0))
    assert words in str(told.value)


@pytest.mark.parametrize("own", [Iterated, Jumping])
def test_a_stream_is_not_packed(own, tmp_path):
    """Training from packed data shuffles: other weights, without a word."""
    sys.modules["own_stream"] = SimpleNamespace(pair=lambda: (own(), Iterated()))
    with pytest.raises(DataError, match="a stream is read in its own order, which packed data do not keep"):
        pack(DataConfig(name="own_stream:pair"), TaskConfig(), tmp_path / "packed", None)
    assert not (tmp_path / "packed").exists()
