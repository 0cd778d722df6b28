"""Every sample exactly once, the same global batches for every N, and a thread that leaves nothing behind."""

import gc
import itertools
import threading
import time
import tracemalloc
from itertools import product

import numpy as np
import pytest

from hvd_train.data import loader as loader_module
from hvd_train.data.arrays import Arrays
from hvd_train.data.loader import AHEAD, Loader
from hvd_train.data.order import permute, steps
from hvd_train.data.synthetic import Synthetic
from hvd_train.errors import DataError
from tests.limits import SECONDS


def source(n):
    """Sample i holds the value i, so that inputs tell which sample they are."""
    return Arrays(np.arange(n, dtype=np.float32)[:, None], np.zeros(n, np.int64), "test")


def ranks(n, size, batch, accumulate=1, seed=0):
    return [
        Loader(source(n), global_batch=batch, accumulate=accumulate, rank=rank, size=size, seed=seed)
        for rank in range(size)
    ]


def made(works):
    return [work() for work in works]


def epoch_of(loaders, epoch=0, consumed=0):
    """[(count, consumed, indices in order)] of all ranks together; checks every batch on the way."""
    found = []
    # The thread is tested below; without it the grids take a tenth of the time.
    for together in zip(*(made(one._steps(epoch, consumed)) for one in loaders), strict=True):
        assert len({(step.count, step.consumed) for step in together}) == 1
        # Micro-batch by micro-batch, each over all ranks: so every world cuts the global batch in the same places.
        batches = [b for micro in zip(*(step.micro_batches for step in together), strict=True) for b in micro]
        for batch in batches:
            check(batch, loaders[0])
        found.append((together[0].count, together[0].consumed, np.concatenate([b.indices for b in batches])))
    return found


def check(batch, one):
    assert batch.inputs["input"].shape == (one.length, 1)
    assert batch.labels["label"].shape == batch.weights.shape == (one.length,)
    types = [a.dtype.name for a in (batch.inputs["input"], batch.labels["label"], batch.weights, batch.indices)]
    assert types == ["float32", "int64", "float32", "int64"]
    assert batch.weights.tolist() == [1.0] * batch.count + [0.0] * (one.length - batch.count)
    assert batch.inputs["input"][: batch.count, 0].tolist() == batch.indices.tolist()
    assert (batch.inputs["input"][batch.count :] == batch.inputs["input"][0]).all()


@pytest.mark.parametrize("n", [5, 8, 13, 64, 101])
@pytest.mark.parametrize("batch", [1, 3, 8, 10, 200])
def test_every_sample_once_in_the_same_batches_for_every_world(n, batch):
    expected = permute(np.arange(n), n, 4, 2)
    for size, accumulate in product([1, 2, 3, 4, 5], [1, 2, 3]):
        found = epoch_of(ranks(n, size, batch, accumulate, seed=4), epoch=2)
        assert len(found) == steps(n, 0, batch)
        for k, (count, consumed, indices) in enumerate(found):
            assert consumed == min((k + 1) * batch, n)
            assert count == len(indices)
            assert indices.tolist() == expected[k * batch : consumed].tolist()


@pytest.mark.parametrize(("size", "batch", "accumulate"), [(1, 7, 1), (2, 8, 2), (3, 8, 1), (5, 20, 1)])
def test_resume_goes_on_in_the_same_order(size, batch, accumulate):
    """From wherever another world, or another batch size, has stopped."""
    n, expected = 61, permute(np.arange(61), 61, 0, 1)
    for consumed in range(n + 1):
        rest = epoch_of(ranks(n, size, batch, accumulate), epoch=1, consumed=consumed)
        assert [i for _, _, part in rest for i in part] == expected[consumed:].tolist()
        assert len(rest) == steps(n, consumed, batch)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_labels_of_any_shape_are_padded(size):
    """Also on a rank whose part is empty: shapes never change."""
    tokens = np.arange(28).reshape(7, 4)
    places = Arrays(tokens, tokens, "test")
    seen = []
    for rank in range(size):
        one = Loader(places, global_batch=6, rank=rank, size=size)
        for batch in [*(step.micro_batches[0] for step in made(one._steps(0, 0))), *made(one._evaluation())]:
            assert (
                batch.labels["label"].shape == batch.inputs["input"].shape == (one.length, 4)
                and batch.labels["label"].dtype == np.int64
            )
            assert batch.labels["label"][: batch.count].tolist() == tokens[batch.indices].tolist()
            for x in (batch.labels["label"], batch.inputs["input"]):
                assert (x[batch.count :] == x[0]).all()
            seen += batch.indices.tolist()
    assert sorted(seen) == sorted([*range(7)] * 2)


def test_the_order_does_not_depend_on_the_chunk(monkeypatch):
    whole = [part.tolist() for _, _, part in epoch_of(ranks(3000, 3, 17, 2))]
    monkeypatch.setattr(loader_module, "CHUNK", 20)
    assert [part.tolist() for _, _, part in epoch_of(ranks(3000, 3, 17, 2))] == whole


@pytest.mark.parametrize(("n", "batch", "accumulate"), list(product([5, 8, 13, 64, 101], [1, 3, 8, 50], [1, 2, 3])))
def test_evaluation_covers_every_sample_once(n, batch, accumulate):
    for size in (1, 2, 3, 4, 5):
        loaders = ranks(n, size, batch, accumulate)
        rounds = list(zip(*(made(one._evaluation()) for one in loaders), strict=True))
        for together in rounds:
            for one in together:
                check(one, loaders[0])
        assert [i for together in rounds for one in together for i in one.indices] == list(range(n))
        # A batch of 10 was one of 12 on three ranks: limit_val_batches took others, and samples were cut elsewhere.
        batches = [np.concatenate([one.indices for one in together]).tolist() for together in rounds]
        assert batches == [one.indices.tolist() for one in made(ranks(n, 1, batch, accumulate)[0]._evaluation())]


def test_an_evaluation_of_some_batches_takes_those_of_all_parts():
    for size, batch in ((1, 8), (2, 8), (3, 7)):
        loaders = ranks(53, size, batch)
        for batches in (1, 3, 100):
            taken = sum(one.count for each in loaders for one in itertools.islice(each.evaluation(), batches))
            assert loaders[0].evaluated(batches) == taken


@pytest.mark.parametrize("workers", [1, 3])
def test_both_iterators_give_the_same_through_threads(workers):
    (one,) = ranks(50, 1, 8, 2)
    one.workers = workers
    pairs = [(one.epoch(3, 8), made(one._steps(3, 8))), (one.evaluation(), made(one._evaluation()))]
    for threaded, direct in pairs:
        a, b = list(threaded), list(direct)
        assert len(a) == len(b) > 0
        flat = [[x for step in side for x in getattr(step, "micro_batches", (step,))] for side in (a, b)]
        assert all(np.array_equal(x.inputs["input"], y.inputs["input"]) for x, y in zip(*flat, strict=True))


def test_length_is_that_of_the_longest_part():
    lengths = [ranks(100, size, batch, parts)[0].length for batch, size, parts in ((64, 2, 1), (65, 2, 1), (10, 3, 3))]
    assert lengths == [32, 33, 2]


def test_a_billion_samples():
    one = Loader(Synthetic(10**9, (2, 2, 1), 10), global_batch=64, rank=1, size=3)
    tracemalloc.start()
    it = one.epoch(0, 500_000_000)
    got = [next(it) for _ in range(5)]
    it.close()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**21
    assert one.steps_per_epoch == 15_625_000
    assert got[-1].consumed == 500_000_320


def test_fewer_samples_than_ranks():
    with pytest.raises(DataError, match="3 samples for 4 ranks"):
        Loader(source(3), global_batch=8, rank=0, size=4)


def test_impossible_places_are_refused():
    for bad in ({"global_batch": 0}, {"accumulate": 0}, {"rank": 2, "size": 2}, {"rank": -1}, {"workers": 0}):
        with pytest.raises(ValueError, match="no loader"):
            Loader(source(9), **{"global_batch": 4, **bad})
    for consumed in (-1, 10):
        with pytest.raises(ValueError, match="consumed"):
            Loader(source(9), global_batch=4).epoch(0, consumed)


# ---- the thread


class Watched:
    """A source that counts its fetches."""

    fingerprint = "watched"

    def __init__(self, n):
        self.n, self.fetches = n, 0

    def __len__(self):
        return self.n

    def fetch(self, indices):
        self.fetches += 1
        return {"input": np.zeros((len(indices), 1), np.float32)}, {"label": np.zeros(len(indices), np.int64)}


def threads():
    return [t for t in threading.enumerate() if t.name.startswith("prefetch")]


def wait_for_none():
    end = time.monotonic() + SECONDS
    while threads() and time.monotonic() < end:
        time.sleep(0.01)
    return not threads()


@pytest.mark.parametrize("workers", [1, 2])
def test_threads_run_ahead_but_not_away(workers):
    watched = Watched(10_000)
    it = Loader(watched, global_batch=1, workers=workers).epoch(0)
    next(it)
    end = time.monotonic() + SECONDS
    while watched.fetches < AHEAD and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.05)
    assert AHEAD <= watched.fetches <= AHEAD + 1
    it.close()


@pytest.mark.parametrize("taken", [0, 1, 2, 7, 20])
@pytest.mark.parametrize("leave", ["close", "collect"])
@pytest.mark.parametrize("workers", [1, 3])
def test_leaving_early_ends_the_threads(taken, leave, workers):
    it = Loader(source(20), global_batch=1, workers=workers).epoch(0)
    for _ in range(taken):
        next(it)
    if leave == "close":
        it.close()
        assert not threads()
    del it
    gc.collect()
    assert wait_for_none()


@pytest.mark.parametrize("workers", [1, 3])
def test_running_to_the_end_leaves_no_thread(workers):
    one = Loader(source(20), global_batch=3, workers=workers)
    for epoch in range(20):
        assert len(list(one.epoch(epoch))) == 7
    assert not threads()


class Slow(Watched):
    """Later steps are done before earlier ones; tells which threads fetched, and how many at a time.

    Nobody comes out of the first fetches before all workers are in one.
    """

    def __init__(self, n, workers):
        super().__init__(n)
        self.begun = threading.Barrier(workers)
        self.busy, self.most, self.seen = 0, 0, set()
        self.lock = threading.Lock()

    def fetch(self, indices):
        with self.lock:
            self.busy += 1
            self.most, self.fetches = max(self.most, self.busy), self.fetches + 1
            self.seen.add(threading.current_thread().name)
            number = self.fetches
        if number <= self.begun.parties:
            self.begun.wait(SECONDS)
        time.sleep(0.004 if number % 2 else 0.001)
        with self.lock:
            self.busy -= 1
        return {"input": indices[:, None].astype(np.float32)}, {"label": indices}


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("place", [0, 1, 7])
def test_an_error_of_a_worker_reaches_the_consumer_in_its_place(place, workers):
    bad = permute(np.arange(20), 20, 0, 0)[place]

    class Broken(Watched):
        def fetch(self, indices):
            if bad in indices:
                raise DataError(f"sample {bad} holds NaN", where="x")
            return super().fetch(indices)

    it, got = Loader(Broken(20), global_batch=1, workers=workers).epoch(0), 0
    with pytest.raises(DataError, match=f"sample {bad} "):
        for _ in it:
            got += 1
    assert got == place and not threads()


@pytest.mark.parametrize("workers", [2, 4])
def test_workers_fetch_at_the_same_time_and_keep_the_order(workers):
    slow = Slow(60, workers)
    batches = [step.micro_batches[0] for step in Loader(slow, global_batch=2, workers=workers).epoch(0)]
    assert np.concatenate([batch.indices for batch in batches]).tolist() == permute(np.arange(60), 60, 0, 0).tolist()
    assert all((batch.labels["label"] == batch.indices).all() for batch in batches)
    assert slow.most == len(slow.seen) == workers
