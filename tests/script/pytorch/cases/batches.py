"""Trainings on uneven batches, on the order of a sampler or a stream, and in parts of a batch."""

from __future__ import annotations

import contextlib
import itertools
import random
import re

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import hvd_train.torch as ht
from hvd_train.cli import guide
from tests.script.prefetching import early
from tests.script.pytorch.cases.models import GLOBAL_BATCH, WIDE, cnn, digits, fit, loader, mlp, sgd

PAGE_BLOCKS = re.findall(r"^```python\n(.*?)^```$", guide.page("pytorch-script"), re.MULTILINE | re.DOTALL)
PART = 9  # samples of a part: of 28 and 27, or 19, 18 and 18, ranks make unequal numbers


def uneven():
    """The last of 4 global batches has 55 samples: 28 and 27 for two ranks, 19, 18 and 18 for three."""
    model = mlp()
    model, optimizer = ht.distribute(model, sgd(model))
    batches = loader(count=235)
    checks = ht.shard(DataLoader(digits(101), batch_size=7))
    for order in (iter, early, early):
        for inputs, labels in order(batches):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            with torch.no_grad():
                ht.sum(*[F.cross_entropy(model(x), y, reduction="sum") for x, y in checks])
    return model


def left_early(batches):
    for batch in batches:
        return [batch]


@torch.no_grad()
def without_gradients(batches):
    for inputs, labels in batches:
        yield inputs * 1, labels


class Yielding(DataLoader):
    """Its batches go through a generator of its own, as of loaders that move them to a device."""

    def __iter__(self):
        yield from super().__iter__()


def skipped(at):
    return lambda batches: (batch for k, batch in enumerate(batches) if k not in at)


WAYS = {
    "cycle": lambda batches: itertools.islice(itertools.cycle(batches), 2 * len(batches)),
    "list": list,
    "next": lambda batches: [next(iter(batches))],
    "break": left_early,
    "again": lambda batches: [next(iter(batches))] * 3,
    "range": lambda batches: map(next, [iter(batches)] * len(batches)),
    "without the first": skipped({0}),
    "without two": skipped({0, 1}),
    "without one in the middle": skipped({1}),
    "under no_grad": without_gradients,
}


ONE_BATCH = ("next", "break", "again")


def by_rows(model, inputs):
    """Give the model the 8 rows of every image, as tokens that are samples of their own."""
    return model(inputs.reshape(-1, 8)).reshape(len(inputs), 8, -1).mean(1)


def transposed(model, inputs):
    """Give the model samples in the second dimension."""
    return model(inputs.flatten(1).t())


class Across(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, x):
        return self.inner(x.t())


def rows_mlp():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 10)).double()


def taken(way, kind=DataLoader, count=235, make=mlp, forward=nn.Module.__call__):
    """Batches that are not taken in a plain loop, the last one uneven; then steps on data of the script's own."""

    def case():
        model = make()
        model, optimizer = ht.distribute(model, sgd(model))

        def step(inputs, labels):
            optimizer.zero_grad()
            F.cross_entropy(forward(model, inputs), labels).backward()
            optimizer.step()

        batches = ht.shard(kind(digits(count), GLOBAL_BATCH // ht.size()))
        for _ in range(2):
            for inputs, labels in way(batches):
                step(inputs, labels)
        inputs, labels = next(iter(DataLoader(digits(count), 36)))
        for _ in range(2):
            step(inputs[ht.rank() :: ht.size()], labels[ht.rank() :: ht.size()])
        return model

    return case


def looked_at_alone(way, keep):
    """Rank 0 alone looks at batches before each pass, as for a picture of samples. ``keep``: also afterwards."""

    def case():
        model = mlp()
        model, optimizer = ht.distribute(model, sgd(model))
        batches, kept = ht.shard(DataLoader(digits(235), GLOBAL_BATCH // ht.size())), []
        for _ in range(2):
            if ht.rank() == 0:
                iterator = iter(batches)
                next(iterator)
                kept += [iterator] * keep
            for inputs, labels in way(batches):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
        return model

    return case


def own_after_each():
    """After each batch a step on data of the script's own, as in rehearsal, and one on the batch again."""
    model = mlp()
    model, optimizer = ht.distribute(model, sgd(model))
    memory = [part[ht.rank() :: ht.size()] for part in next(iter(DataLoader(digits(72), 72)))]
    for _ in range(2):
        for batch in loader(count=235):
            for inputs, labels in (batch, memory, batch):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
    return model


def back_to_the_first():
    """A step on a batch, one on the batch of another loader, and one on the first batch again."""
    model = mlp()
    model, optimizer = ht.distribute(model, sgd(model))
    first, second = loader(count=235), loader(count=240)
    for _ in range(2):
        others = iter(second)
        for batch in first:
            for inputs, labels in (batch, next(others), batch):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
    return model


def norms_in_a_list():
    model = cnn(norm=True)
    model, optimizer = ht.distribute(model, sgd(model), sync_batchnorm=True)
    for _ in range(2):
        for inputs, labels in list(loader(count=235)):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    return model


def two_losses():
    """Two loaders with other lengths at the end, each for a loss and a model of its own."""
    models = nn.ModuleList([mlp(), mlp()])
    both = [ht.distribute(model, sgd(model)) for model in models]
    loaders = [ht.shard(DataLoader(digits(n), GLOBAL_BATCH // ht.size())) for n in (175, 179)]
    for _ in range(2):
        for several in zip(*loaders, strict=False):
            for (model, optimizer), (inputs, labels) in zip(both, several, strict=True):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
    return models


def loop_within():
    """For each batch of one loader a whole pass over another, each with its own model."""
    models = nn.ModuleList([mlp(), mlp()])
    both = [ht.distribute(model, sgd(model)) for model in models]
    outer, inner = (ht.shard(DataLoader(digits(n), GLOBAL_BATCH // ht.size())) for n in (235, 175))

    def step(k, inputs, labels):
        model, optimizer = both[k]
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    for batch in outer:
        for other in inner:
            step(1, *other)
        step(0, *batch)
    return models


def sampled_by(make):
    """Three epochs of 235 samples, uneven at the end, in an order that the script has a sampler for."""

    def case():
        model = mlp()
        model, optimizer = ht.distribute(model, sgd(model))
        batches = ht.shard(make(GLOBAL_BATCH // ht.size()))
        for _ in range(3):
            if ht.rank() == 0:
                next(iter(batches))
            fit(model, optimizer, batches=batches)
        return model

    return case


def weighted(batch_size):
    weights = torch.linspace(0.1, 3, 500)
    return DataLoader(digits(500), batch_size, sampler=torch.utils.data.WeightedRandomSampler(weights, 235))


class Halves(torch.utils.data.Sampler):
    """Of the user's own: each epoch another part of the samples, drawn from generators of its own."""

    def __init__(self):
        self.first, self.second = np.random.default_rng(3), random.Random(4)

    def __iter__(self):
        start = self.second.randrange(200)
        yield from (self.first.permutation(235) + start).tolist()


def batched(batch_size):
    sampler = torch.utils.data.BatchSampler(Halves(), batch_size, drop_last=False)
    return DataLoader(digits(500), batch_sampler=sampler)


class Stream(torch.utils.data.IterableDataset):
    """Reads its part of the samples, as workers do, through a buffer that shuffles."""

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        samples, buffer = digits(1200 // step + 200)[:], []
        for i in range(first, 235 * step, step):
            buffer.append((samples[0][i], samples[1][i]))
            if len(buffer) > 20:
                yield buffer.pop(random.randrange(20))
        yield from buffer


def streamed(workers):
    return lambda batch_size: DataLoader(Stream(), batch_size, num_workers=workers)


def tokens(sampler=None):
    """The recipe of the guide for means over tokens, half of which have no label, as the page has it."""

    def case():
        before, code, after = next(block for block in PAGE_BLOCKS if "average=False)" in block).partition("net, sgd")
        draws = torch.Generator().manual_seed(5)
        images, labels = digits(235)[:]
        labels = torch.where(torch.rand(235, generator=draws) < 0.5, -100, labels)
        data = torch.utils.data.TensorDataset(images, labels)
        net, batch = mlp(), GLOBAL_BATCH // ht.size()
        loader = DataLoader(data, batch_sampler=sampler()) if sampler else DataLoader(data, batch, shuffle=True)
        assert "torch.nn.Linear" in before
        names = {"ht": ht, "torch": torch, "batches": loader, "net": net, "sgd": sgd(net)}
        exec(code + after, names)
        return net

    return case


def two_loaders():
    """With rests that ranks share in other ways: 5 and 10 samples. The losses are means over all ranks' samples."""
    model = mlp()
    model, optimizer = ht.distribute(model, sgd(model), average=False)
    for batches in zip(loader(125), loader(130), strict=True):
        optimizer.zero_grad()
        counts = ht.sum(*[len(y) for _, y in batches])
        losses = [F.cross_entropy(model(x), y, reduction="sum") for x, y in batches]
        sum(loss / count for loss, count in zip(losses, counts, strict=True)).backward()
        optimizer.step()
    return model


class Lengths(torch.utils.data.Sampler):
    """Batches of unequal lengths, in the same steps on 1, 2 and 3 ranks: six batches of one rank are a step."""

    def __iter__(self):
        order, at, split = np.random.default_rng(2).permutation(235).tolist(), 0, 6 // ht.size()
        for step in range(6):
            lengths = [1 + (step + 2 * k) % 7 for k in range(6)]
            for k in range(0, 6, split):
                whole = sum(lengths[k : k + split])
                yield order[at : at + whole]
                at += whole


def in_parts(make=None, *, once=False, clip=0.0, models=1, **options):
    """Parts of each batch, as in Horovod's ImageNet example, each counted by its samples. ``once``: they travel
    together; ``models``: each with its own optimizer."""

    def case():
        nets = [mlp(hidden=WIDE), cnn()][:models]
        optimizers = [ht.distribute(net, sgd(net), **options)[1] for net in nets]
        batches = ht.shard(make(GLOBAL_BATCH // ht.size())) if make else loader(235)
        for _ in range(2):
            for inputs, labels in batches:
                for optimizer in optimizers:
                    optimizer.zero_grad()
                for at in range(0, len(labels), PART):
                    x, y = inputs[at : at + PART], labels[at : at + PART]
                    quiet = once and at + PART < len(labels)
                    with ht.no_sync(nets[0]) if quiet else contextlib.nullcontext():
                        outputs = sum(net(x) for net in nets)
                        (F.cross_entropy(outputs, y, reduction="sum") / len(labels)).backward()
                if clip:
                    nn.utils.clip_grad_norm_(nets[0].parameters(), clip)
                for optimizer in optimizers:
                    optimizer.step()
        return nn.ModuleList(nets)

    return case


def accumulated(make=None, **options):
    """Three batches a step, also across the end of a pass: the uneven one is first, second, then last of them."""

    def case():
        net, number = mlp(hidden=WIDE), 0
        _, optimizer = ht.distribute(net, sgd(net), **options)
        batches = ht.shard(make(GLOBAL_BATCH // ht.size())) if make else loader(235)
        for _ in range(4):
            for x, y in batches:
                number += 1
                with ht.no_sync(net) if number % 3 else contextlib.nullcontext():
                    (F.cross_entropy(net(x), y) / 3).backward()
                if number % 3 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        return net

    return case
