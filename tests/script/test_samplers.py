"""Samplers, batch samplers and streams of the user's, divided among ranks."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils import data

from hvd_train.errors import DataError
from hvd_train.script.shared.dataloader import passes, shares
from tests.script.loaders import world_of


def passed(loaders: list) -> list[list[list[int]]]:
    """[batch][rank] -> samples of a pass; each rank's weights must be those of a mean over the samples."""
    rounds = [list(loader) for loader in loaders]
    assert len({len(part) for part in rounds}) == 1
    iterators, steps = [iter(loader) for loader in loaders], []
    for parts in zip(*iterators, strict=True):
        parts = [part.tolist() for part in parts]
        steps.append(parts)
        total = sum(map(len, parts))
        assert [p.weights[p.rank] for p in iterators] == [len(part) * len(parts) / total for part in parts]
        passes.exchanged()
    assert [[batch.tolist() for batch in part] for part in rounds] == [list(part) for part in zip(*steps, strict=True)]
    return steps


class Ordered(data.Sampler):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(np.random.permutation(self.count).tolist() + [random.randrange(3), int(torch.randint(3, ()))])


class Buckets(data.Sampler):
    """Batches of other lengths each, in an order that is drawn."""

    def __iter__(self):
        ends = np.cumsum([0, 3, 1, 4, 1, 5, 2, 6])
        batches = [list(range(a, b)) for a, b in zip(ends, ends[1:], strict=False)]
        random.shuffle(batches)
        return iter(batches)


class Lines(data.IterableDataset):
    def __init__(self, count, shuffle=True):
        self.count, self.shuffle = count, shuffle

    def __iter__(self):
        worker = data.get_worker_info()
        part = list(range(self.count))[worker.id :: worker.num_workers] if worker else list(range(self.count))
        if self.shuffle:
            random.shuffle(part)
        yield from part


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_sampler_of_ones_own(size):
    """All that it gives, in its order; another one after a step, the same for every number of ranks."""
    seen = []
    for world in (1, size):
        loaders = world_of(lambda world=world: data.DataLoader(range(44), 12 // world, sampler=Ordered(44)), world)
        for _ in range(2):
            seen.append([[i for part in parts for i in part] for parts in passed(loaders)])
            shares.stepped()
            assert len(loaders[0]) == len(seen[-1]) == 4
    one, again, first, second = seen
    assert [sorted(batch) for batch in first] == [sorted(batch) for batch in one]
    assert [sorted(batch) for batch in second] == [sorted(batch) for batch in again]
    assert one != again and set(sum(one, [])) == set(range(44)) and len(sum(one, [])) == 46


class Numbered(data.Sampler):
    """Another order for each epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(np.random.default_rng(self.epoch).permutation(12).tolist())


def test_a_sampler_that_is_told_the_epoch():
    """Also if somebody asked for the length before, or tells it through the loader."""

    def order(epoch):
        return np.random.default_rng(epoch).permutation(12).tolist()

    sampler = Numbered()
    batches = data.BatchSampler(Numbered(), 4, drop_last=False)
    (loader,) = world_of(lambda: data.DataLoader(range(12), batch_size=4, sampler=sampler), 1)
    (batched,) = world_of(lambda: data.DataLoader(range(12), batch_sampler=batches), 1)
    for epoch in (0, 3, 1000):
        assert len(loader) == len(batched) == 3
        sampler.set_epoch(epoch)
        batched.set_epoch(epoch)
        for part in (loader, batched):
            assert torch.cat(list(part)).tolist() == order(epoch)
    loader.set_epoch(7)
    assert torch.cat(list(loader)).tolist() == order(7)
    loader.share.load_state_dict({**loader.share.state_dict(), "epoch": 300})
    assert sampler.epoch == 7  # steps are no epochs


class Chosen(data.Sampler):
    """Some samples, whose list lies elsewhere."""

    def __init__(self, chosen):
        self.chosen = chosen

    def __len__(self):
        return len(self.chosen["now"])

    def __iter__(self):
        return iter(self.chosen["now"])


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", ["weights", "indices", "elsewhere", "batches"])
def test_a_sampler_that_is_changed_after_the_length_was_asked_for(size, kind):
    """``total / len(loader)`` at the end of an epoch had drawn the next one already: changes came an epoch late."""
    rows = list(range(24))
    weights, elsewhere = torch.ones(48, dtype=torch.float64), {"now": rows}
    batches = [[0, 1, 2], [3, 4], [5, 6, 7]]
    samplers = {
        "weights": lambda: {"sampler": data.WeightedRandomSampler(weights, 24)},
        "indices": lambda: {"sampler": data.SubsetRandomSampler(rows)},
        "elsewhere": lambda: {"sampler": Chosen(elsewhere)},
        "batches": lambda: {"batch_sampler": batches},
    }
    made = lambda: data.DataLoader(range(48), **({"batch_size": 4} if kind != "batches" else {}), **samplers[kind]())  # noqa: E731
    loaders = world_of(made, size)
    for epoch in range(3):
        seen = {i for parts in passed(loaders) for part in parts for i in part}
        if kind == "weights":
            assert max(seen) < 24 if epoch == 1 else max(seen) >= 24
        elif kind == "batches":
            assert seen == set(range(8 + 2 * epoch))
        else:
            assert seen == set(range(24 + 8 * epoch))
        shares.stepped()
        assert all(len(loader) == len(loaders[0]) for loader in loaders)
        weights[24:] = 0.0 if epoch == 0 else 1.0
        batches.append([8 + 2 * epoch, 9 + 2 * epoch])
        rows.extend(range(24 + 8 * epoch, 32 + 8 * epoch))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_batch_sampler_of_ones_own(size):
    """Its batches, one for each rank; what is left of 7 is divided by samples."""
    loaders = world_of(lambda: data.DataLoader(range(22), batch_sampler=Buckets()), size)
    found = passed(loaders)
    assert sorted(i for parts in found for part in parts for i in part) == list(range(22))
    lengths = [3, 1, 4, 1, 5, 2, 6]
    assert sum(len(part) in lengths for parts in found[:-1] for part in parts) == (len(found) - 1) * size
    few = data.BatchSampler(range(22), 4, drop_last=True)
    assert [len(list(part)) for part in world_of(lambda: data.DataLoader(range(22), batch_sampler=few), size)] == (
        [5 // size] * size
    )


@pytest.mark.parametrize("count", [3, 24, 25, 26, 29, 35])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_stream(size, count):
    """Each sample once, on one rank, in as many batches on every rank; the last counts by its samples."""
    made = [[], []]
    for found, world in zip(made, (1, size), strict=True):
        loaders = world_of(lambda world=world: data.DataLoader(Lines(count), 12 // world), world)
        before = random.getstate()
        found += [sorted(i for part in parts for i in part) for parts in passed(loaders)]
        assert random.getstate() == before
    assert sorted(sum(made[1], [])) == list(range(count))
    if count % 12 == 0 or count % 12 >= size:  # else the last few join the batch before
        assert made[0] == made[1]
    dropped = world_of(lambda: data.DataLoader(Lines(count), 12 // size, drop_last=True), size)
    assert [len(list(part)) for part in dropped] == [count // 12] * size


@pytest.mark.parametrize("persistent", [False, True])
def test_a_stream_of_workers(persistent):
    options = dict(num_workers=2, persistent_workers=persistent)
    loaders = world_of(lambda: data.DataLoader(Lines(27), 3, **options), 2)
    found = passed(loaders)
    assert sorted(i for parts in found for part in parts for i in part) == list(range(27))
    assert {len({i % 2 for part in parts for i in part}) for parts in found} == {1}  # of one worker's part each


def test_a_stream_too_short_and_its_length():
    class Counted(Lines):
        def __len__(self):
            return self.count

    with pytest.raises(DataError, match="a stream of 2 samples is too short for 3 ranks"):
        list(passes.shared(data.DataLoader(Lines(2), 4), 0, 0, 3))
    assert len(passes.shared(data.DataLoader(Counted(29), 4), 0, 0, 3)) == 3
    loader = passes.shared(data.DataLoader(Lines(29), 4), 0, 0, 3)
    assert loader.dataset.count == 29
    with pytest.raises(TypeError):
        len(loader)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_orders_that_ranks_do_not_share_have_other_digests(accumulate):
    class Alone(Lines):
        def __init__(self, count):
            super().__init__(count)
            self.rng = random.Random()

        def __iter__(self):
            part = list(range(self.count))
            self.rng.shuffle(part)
            yield from part

    class AloneOrdered(data.Sampler):
        def __iter__(self):
            return iter(random.SystemRandom().sample(range(40), 40))

    def digests(make):
        both = [iter(loader) for loader in world_of(make, 2)]
        for part in both * 2:
            for _ in range(accumulate):
                next(part)
            passes.exchanged()
            assert part.digest == ""  # a look
        shares.stepped()
        return [part.digest for part in both]

    for make, alike in {
        lambda: data.DataLoader(Lines(40), 4): True,
        lambda: data.DataLoader(range(40), 4, sampler=Ordered(40)): True,
        lambda: data.DataLoader(range(88), batch_sampler=data.BatchSampler(Ordered(88), 3, False)): True,
        lambda: data.DataLoader(Alone(40), 4): False,
        lambda: data.DataLoader(range(40), 4, sampler=AloneOrdered()): False,
    }.items():
        one, two = digests(make)
        assert one and two and (one == two) == alike


class Curriculum(data.Sampler):
    """Batches of what is easy enough, in one list that is filled again and again."""

    limit = 8

    def __iter__(self):
        batch = []
        for start in range(0, self.limit, 4):
            batch[:] = range(start, start + 4)
            yield batch

    def __len__(self):
        return self.limit // 4


def test_what_a_script_sets_on_its_batch_sampler_counts():
    """The loader hands out the script's own; torch's has a batch size and ``drop_last``."""
    loaders = world_of(lambda: data.DataLoader(range(32), batch_sampler=Curriculum()), 2)
    for limit in (8, 16, 32):
        for loader in loaders:
            loader.batch_sampler.limit = limit
        assert sorted(i for loader in loaders for batch in loader for i in batch.tolist()) == list(range(limit))
        shares.stepped()
    for make in (
        lambda: data.DataLoader(range(30), 4),
        lambda: data.DataLoader(range(30), 4, sampler=data.SequentialSampler(range(30))),
        lambda: data.DataLoader(range(30), 4, sampler=data.SubsetRandomSampler(range(30))),
    ):
        loaders = world_of(make, 2)
        assert [len(list(loader)[0]) for loader in loaders] == [4, 4]
        for loader in loaders:
            loader.batch_sampler.batch_size, loader.batch_sampler.drop_last = 8, True
        assert [[len(x) for x in loader] for loader in loaders] == [[8], [8]] and len(loaders[0]) == 1
        assert isinstance(loaders[0].batch_sampler.sampler, data.Sampler)


def test_a_batch_size_that_changes_within_a_pass_counts_from_the_next_one_on():
    loaders = world_of(lambda: data.DataLoader(range(48), 4), 2)
    seen = []
    with pytest.warns(UserWarning, match="batch_size became 2 within a pass, whose batches keep 4 samples"):
        for loader in loaders:
            for k, batch in enumerate(loader):
                seen += batch.tolist()
                if k == 1:
                    loader.batch_sampler.batch_size = 2
    assert sorted(seen) == list(range(48)) and [len(loader) for loader in loaders] == [12, 12]


class Range(data.IterableDataset):
    """PyTorch's documented example of a stream."""

    def __init__(self, start, end):
        self.start, self.end = start, end

    def __len__(self):
        return self.end - self.start

    def __iter__(self):
        return iter(range(self.start, self.end))


def divide(worker):
    """Its ``worker_init_fn``."""
    info = data.get_worker_info()
    part = (info.dataset.end - info.dataset.start) // info.num_workers
    info.dataset.start += worker * part
    info.dataset.end = info.dataset.start + part


def test_a_script_sets_attributes_of_its_stream():
    """In a worker, and through the loader."""
    loaders = world_of(lambda: data.DataLoader(Range(0, 32), 4, num_workers=2, worker_init_fn=divide), 2)
    assert sorted(i for loader in loaders for batch in loader for i in batch.tolist()) == list(range(32))
    loaders = world_of(lambda: data.DataLoader(Range(0, 32), 4), 2)
    for loader in loaders:
        loader.dataset.start = 16
        assert len(loader.dataset) == 16 and len(loader) == 2
    assert sorted(i for loader in loaders for batch in loader for i in batch.tolist()) == list(range(16, 32))
