"""Random numbers and the order of samples."""

from __future__ import annotations

import random
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hvd_train.torch as ht
from tests.script.pytorch.cases.models import mlp


class Words(torch.utils.data.Dataset):
    """Of the user's own. What a rank has by itself is right."""

    def __init__(self, count: int = 60) -> None:
        self.rank, self.shape, self.folder = ht.rank(), (ht.rank(), 3), f"/tmp/rank{ht.rank()}"
        self.files = [f"{self.folder}/{k}.png" for k in range(count)]
        self.options = {"device": f"cuda:{ht.rank()}", "seconds": time.perf_counter()}
        self.ready, self.made = {}, [None] * count
        self.visited = np.zeros(count, bool)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i):
        self.ready[i], self.made[i], self.visited[i] = i, torch.ones(1), True
        return torch.full((1,), float(self.files[i].rpartition("/")[2][:-4]))


def walked(samples, epochs=2, **options):
    model, optimizer = ht.distribute(model := nn.Linear(1, 1), torch.optim.SGD(model.parameters(), lr=1e-9))
    batches = ht.shard(DataLoader(samples, batch_size=12 // ht.size(), **options))
    for _ in range(epochs):
        yield
        for x in batches:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()


def local_caches():
    """Caches that are filled on each rank apart, a seeded shuffle for each epoch."""
    for epoch, _ in enumerate(walked(samples := Words(), shuffle=True, epochs=4)):
        random.Random(epoch).shuffle(samples.files)
    return len(samples.ready)


def looks():
    """Samples in the order in which they were trained on: [epoch][loader] -> this rank's batches.

    Rank 0 looks at batches by itself, before training, within an epoch and after it; epoch 1 ends early; the second
    loader has an order of its own.
    """
    samples = TensorDataset(torch.arange(996.0, dtype=torch.float64))
    options = dict(batch_size=12 // ht.size(), shuffle=True)
    loaders = [ht.shard(DataLoader(samples, **options)) for _ in range(2)]
    model = nn.Linear(1, 1).double()
    model, optimizer = ht.distribute(model, torch.optim.SGD(model.parameters(), lr=1e-9))
    kept, orders = [], []

    def look():
        if ht.rank() == 0:
            for one in loaders:
                next(iter(one))
                kept.append(iter(one))
                next(kept[-1])

    look()
    for epoch in range(4):
        orders.append([[], []])
        for step, parts in enumerate(zip(*loaders, strict=True)):
            for mine, (x,) in zip(orders[-1], parts, strict=True):
                mine.append(x.long().tolist())
                optimizer.zero_grad()
                model(x[:, None]).mean().backward()
                look() if step % 40 == 3 else None
                optimizer.step()
            look() if step % 40 == 7 else None
            if epoch == 1 and step == 50:
                break
        if epoch == 2 and ht.rank() == 0:
            list(loaders[1])
    return orders


class Drawn(torch.utils.data.Dataset):
    """Samples of what the three generators draw."""

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()], dtype=torch.float64)


def draws():
    """What two trainings of the same seeds draw: [run] -> draws by the loop, by a loader, by its worker."""

    def run():
        torch.manual_seed(3)
        np.random.seed(3)
        random.seed(3)
        ht.distribute(mlp())
        loaders = [ht.shard(DataLoader(Drawn(), batch_size=2, num_workers=n)) for n in (0, 1)]
        return [Drawn()[0].tolist(), *[next(iter(one))[0].tolist() for one in loaders]]

    return [run()[:2], run()[:2], run()[2]]


def sampled():
    """Which samples ranks draw with replacement, each its own."""
    torch.manual_seed(0)
    ht.distribute(mlp())
    return list(torch.utils.data.WeightedRandomSampler(torch.ones(1000), 1000 // ht.size()))


def masks():
    torch.manual_seed(0)
    model = mlp(dropout=0.5)
    ht.distribute(model)
    return F.dropout(torch.ones(64), 0.5).tolist()
