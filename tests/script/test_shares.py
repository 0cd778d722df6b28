"""A rank's share of a DataLoader, and the order of its passes."""

from __future__ import annotations

import random
import threading
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import data

import hvd_train.torch as ht
from hvd_train.errors import ConfigError, DataError
from hvd_train.script.shared.dataloader import passes, shares, user_order
from tests.script.loaders import Doubled, world_of


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("count", [4, 5, 9, 12, 13, 17, 1100])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_shares(count, batch_size, shuffle, drop_last):
    """Every sample once; as many batches on every rank; a global batch is the same set for every number of ranks."""
    for size in (1, 2, 3, 4):
        options = dict(shuffle=shuffle, drop_last=drop_last, seed=5, size=size)
        if drop_last and count < batch_size * size:
            with pytest.raises(DataError, match="drop_last=False"):
                shares.Share(count, batch_size, rank=0, **options)
            continue
        ranks = [shares.Share(count, batch_size, rank=rank, **options) for rank in range(size)]
        epochs = [[list(own) for own in ranks] for _ in range(2) if not shares.stepped()]
        for batches in epochs:
            counts = Counter(i for own in batches for batch in own for i in batch)
            assert set(counts.values()) == {1}
            assert len(counts) == (count - count % (batch_size * size) if drop_last else count)
            assert {len(own) for own in batches} == {len(ranks[0])}
            lengths = [[len(batch) for batch in own] for own in batches]
            assert all(max(row) - min(row) <= 1 and min(row) >= 1 for row in zip(*lengths, strict=True))
        if shuffle and count > 8:
            assert epochs[0] != epochs[1]
        alone = shares.Share(count, batch_size * size, shuffle=shuffle, drop_last=drop_last, seed=5, rank=0, size=1)
        alone.set_epoch(1)
        for whole, *parts in zip(alone, *epochs[0], strict=False):
            union = [i for part in parts for i in part]
            assert set(union) >= set(whole)  # the last may hold samples that fill no batch of their own


def test_a_loader_keeps_its_options_and_class():
    samples = data.TensorDataset(torch.arange(20.0))
    own = data.DataLoader(samples, batch_size=6, collate_fn=lambda rows: len(rows), drop_last=True)
    loader = ht.shard(own)
    assert list(loader) == list(loader) == [6, 6, 6] and len(loader) == len(iter(loader)) == 3
    assert loader.batch_size == 6 and loader.drop_last
    with pytest.raises(ConfigError, match="sharded already"):
        ht.shard(loader)
    doubled = ht.shard(Doubled(range(20), batch_size=4, shuffle=True, factor=3))
    assert isinstance(doubled, Doubled) and doubled.batch_size == 4
    assert sorted(torch.cat(list(doubled)).tolist()) == list(range(0, 60, 3))


def test_each_loader_has_its_own_order_and_leaves_the_generators_alone():
    loaders = [ht.shard(data.DataLoader(range(40), batch_size=5, shuffle=True)) for _ in range(2)]
    loaders.append(ht.shard(data.DataLoader(range(40), batch_size=5, generator=torch.Generator().manual_seed(1))))
    before, numpys, pythons = torch.get_rng_state(), np.random.get_state()[1], random.getstate()
    first, second, _ = [torch.cat(list(loader)).tolist() for loader in loaders]
    assert first != second and sorted(first) == sorted(second)
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[1] == numpys).all() and random.getstate() == pythons


def test_an_order_is_that_of_the_steps():
    def order():
        return torch.cat(list(loader)).tolist()

    loader = ht.shard(data.DataLoader(range(40), batch_size=5, shuffle=True))
    model = nn.Linear(1, 1)
    optimizer = torch.optim.LBFGS(model.parameters())
    ht.distribute(model)
    first = order()
    with pytest.warns(UserWarning, match="twice in the same order.*set_epoch"):
        assert order() == first
    torch.optim.SGD(nn.Linear(1, 1).parameters()).step()  # of no distributed model
    assert order() == first
    saved = loader.share.state_dict()
    optimizer.step(lambda: torch.zeros(()))
    second = order()
    assert second != first
    loader.set_epoch(5)
    fifth = order()
    assert fifth not in (first, second)
    optimizer.step(lambda: torch.zeros(()))
    assert order() != fifth
    with torch.random.fork_rng():
        loader.share.load_state_dict(saved)
        assert order() == first


def test_workers_that_persist_follow_the_steps():
    model = nn.Linear(1, 1)
    _, optimizer = ht.distribute(model, torch.optim.SGD(model.parameters()))
    options = dict(batch_size=5, num_workers=1, persistent_workers=True)
    loader = passes.shared(data.DataLoader(range(40), shuffle=True, **options), 3, 0, 1)
    orders = []
    for _ in range(2):
        next(iter(loader))
        orders.append(torch.cat(list(loader)).tolist())
        optimizer.step()
    share = shares.Share(40, 5, shuffle=True, drop_last=False, seed=3, rank=0, size=1)
    share.set_epoch(0)
    assert orders[0] == [i for batch in share for i in batch]
    shares.stepped()
    assert orders[1] == [i for batch in share for i in batch]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_steps_within_a_compiled_function_count(backend):
    model = nn.Linear(1, 1)
    model, optimizer = ht.distribute(model, torch.optim.SGD(model.parameters()))
    model(torch.ones(1, 1)).sum().backward()
    before = shares.steps()
    step = torch.compile(lambda: optimizer.step(), backend=backend)
    for _ in range(12):
        step()
    assert shares.steps() == before + 12


def test_steps_of_what_was_frozen_count():
    """Alone as in a world, where the optimizer of what is unfrozen later is known by its parameters."""
    model = nn.Linear(1, 1)
    model.bias.requires_grad_(False)
    ht.distribute(model)
    model.bias.requires_grad_(True)
    before = shares.steps()
    torch.optim.SGD([model.bias]).step()
    assert shares.steps() == before + 1


def test_a_sampler_of_a_part_and_a_data_set_that_grows():
    samples = list(range(20))
    (part,) = world_of(lambda: data.DataLoader(samples, batch_size=5, sampler=data.SequentialSampler(range(7))), 1)
    assert torch.cat(list(part)).tolist() == list(range(7))
    (loader,) = world_of(lambda: data.DataLoader(samples, batch_size=5, shuffle=True), 1)
    assert len(list(loader)) == 4
    samples.append(20)
    with pytest.raises(DataError, match="the data set has 21 samples, and had 20; ht.shard"):
        list(loader)


def test_passes_of_another_thread_are_counted_by_themselves():
    """They begin while the main thread makes steps, which are others on each rank."""
    orders = []
    for extra in (0, 1):
        share = shares.Share(40, 5, shuffle=True, drop_last=False, seed=1, rank=0, size=2)
        for _ in range(2):
            _ = [shares.stepped() for _ in range(extra)]
            thread = threading.Thread(target=lambda share=share: orders.append(list(share)))
            thread.start()
            thread.join()
    assert orders[:2] == orders[2:] and orders[0] != orders[1] != list(share)


def test_ranks_are_to_be_compared_at_the_end_of_a_pass_with_steps():
    asked = []
    for kind in (data.DataLoader, Doubled):
        loader = passes.shared(kind(range(12), batch_size=2), 0, 0, 2)
        for steps in (0, 1, 1):
            for _ in loader:
                asked.append(passes.asked())
                _ = [shares.stepped() for _ in range(steps)]
            asked.append(passes.asked())
    assert np.diff(asked).nonzero()[0].tolist() == [5, 9, 18, 22]


class Begun(data.DataLoader):
    def __init__(self, *args):
        super().__init__(*args)
        self.own = super().__iter__()


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda s: data.DataLoader(s, sampler=data.DistributedSampler(s, 2, 0)),
            "DistributedSampler; ht.shard; remove",
        ),
        (Begun, "this Begun has already begun a pass over its data"),
        (lambda s: data.DataLoader(s, batch_size=None), "batch_size"),
        (lambda s: s, "torch.utils.data.DataLoader, not a TensorDataset"),
    ],
)
def test_loaders_that_cannot_be_shared(make, message):
    with pytest.raises(ConfigError, match=message):
        ht.shard(make(data.TensorDataset(torch.arange(20.0))))


def test_a_batch_size_counts_from_the_next_pass_on():
    loader = ht.shard(data.DataLoader(data.TensorDataset(torch.arange(20.0)), batch_size=2))
    assert [len(x) for (x,) in loader] == [2] * 10 and loader.batch_sampler.batch_size == 2
    loader.batch_sampler.batch_size = 8
    assert len(loader) == 3 and [len(x) for (x,) in loader] == [8, 8, 4]


def test_an_endless_sampler_is_refused(monkeypatch):
    class Endless(data.Sampler):
        def __iter__(self):
            while True:
                yield 0

    monkeypatch.setattr(user_order, "MOST", 1000)
    loader = ht.shard(data.DataLoader(data.TensorDataset(torch.arange(20.0)), batch_size=2, sampler=Endless()))
    with pytest.raises(DataError, match="1,000 samples and more: an order without an end cannot be divided"):
        next(iter(loader))
