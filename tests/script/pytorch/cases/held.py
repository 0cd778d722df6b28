"""What a script holds, replaces or restores after ht.distribute: largest differences from one process, or facts."""

from __future__ import annotations

import copy
import itertools

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import hvd_train.torch as ht

ROWS, BATCH = 27, 2  # the last global batch of two ranks is uneven


def data():
    draw = torch.Generator().manual_seed(3)
    return torch.randn(ROWS, 5, generator=draw, dtype=torch.float64), torch.arange(ROWS) % 3


def model_of(norm=False):
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4) if norm else nn.Tanh(), nn.Linear(4, 3)).double()


def large():
    """Its second layer is a bucket of its own, which is sent before backward ends."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(5, 800), nn.Tanh(), nn.Linear(800, 800), nn.Tanh(), nn.Linear(800, 3)).double()


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1)


def batches():
    """Global batches, one after the other."""
    return zip(*(part.split(BATCH * ht.size()) for part in data()), strict=True)


def loader(batch=BATCH):
    return ht.shard(DataLoader(TensorDataset(*data()), batch))


def steps(model, optimizer, parts, loss=F.cross_entropy):
    for x, y in parts:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()


def apart(*models):
    """Largest difference of weights and buffers."""
    first, second = (model.state_dict().values() for model in models)
    return max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))


class Keeps(nn.Module):
    """A model that keeps its last batch in a buffer."""

    def __init__(self):
        super().__init__()
        self.inner = model_of()
        self.register_buffer("last", torch.zeros(BATCH, 5, dtype=torch.float64))

    def forward(self, x):
        self.last = x.detach()
        return self.inner(x)


def kept_batches():
    """A buffer that becomes rank 0's shares no memory with the script's data: rows that were overwritten."""
    rows, labels = data()
    model = Keeps()
    model, optimizer = ht.distribute(model, sgd(model))
    mine = slice(ht.rank() * BATCH, (ht.rank() + 1) * BATCH)
    own, before = rows[mine], rows.clone()
    for _ in range(3):
        steps(model, optimizer, [(own, labels[mine])])
    return [int((rows != before).any(1).sum()), ht.rank() == 0 or bool((model.last != own).any())]


def restored_statistics():
    """Statistics that were NaN after a bad batch are the script's again: as if the batch had not come."""

    def run(bad):
        model = model_of(norm=True)
        model, optimizer = ht.distribute(model, sgd(model))
        shared = loader(7)
        for k, (x, y) in enumerate(itertools.chain(shared, shared)):
            if k == 1 and bad:
                good = copy.deepcopy(model.state_dict())
                F.cross_entropy(model(x * torch.nan), y).backward()
                model.load_state_dict(good)
            elif k != 1:
                steps(model, optimizer, [(x, y)])
        return model

    first, second = run(True), run(False)
    return [apart(first, second), bool(torch.isfinite(first[1].running_mean).all())]


def later_hooks():
    """A hook on accumulated gradients, made after ht.distribute, changes them before the ranks join them."""

    def doubled(p):
        if p.grad is not None:
            p.grad.mul_(2)

    def hooked(model):
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(doubled)
        return model

    bare, found = large(), large()
    steps(hooked(bare), sgd(bare), batches())
    found, optimizer = ht.distribute(found, sgd(found), overlap=True)
    steps(hooked(found), optimizer, loader())
    return apart(found, bare)


def held_groups():
    """A parameter group that the script holds since before ht.distribute, and a slot of another type."""

    class Masked(torch.optim.SGD):
        def __init__(self, parameters):
            super().__init__(parameters, 0.1)
            for p in self.param_groups[0]["params"]:
                self.state[p]["mask"] = torch.ones(p.shape, dtype=torch.bool)

    def run(model, optimizer, group, parts):
        group["lr"] = 0.3
        steps(model, optimizer, parts)
        return model

    bare, found = model_of(), model_of()
    optimizer = Masked(bare.parameters())
    run(bare, optimizer, optimizer.param_groups[0], batches())
    optimizer = Masked(found.parameters())
    group = optimizer.param_groups[0]
    found, optimizer = ht.distribute(found, optimizer)
    run(found, optimizer, group, loader())
    return [apart(found, bare), str(next(iter(optimizer.state.values()))["mask"].dtype)]


def mean_and_sum():
    """A mean and a sum train in turns, and the loop takes batches ahead; at first the mean trains alone."""

    def ahead(parts):
        return (first for first, _ in itertools.pairwise([*parts, None]))

    def run(mean, summed, parts, count):
        for epoch in range(3):
            for x, y in ahead(parts()):
                if epoch:
                    steps(*summed, [(x, y)], lambda z, y: F.cross_entropy(z, y, reduction="sum") / count(y))
                steps(*mean, [(x, y)])

    def both():
        return [(model, sgd(model)) for model in (model_of(), model_of())]

    bare, found = both(), both()
    run(*bare, lambda: batches(), len)
    ht.distribute(*found[0])
    ht.distribute(*found[1], average=False)
    shared = loader()
    run(*found, lambda: shared, lambda y: ht.sum(len(y)))
    return [apart(one, other) for (one, _), (other, _) in zip(found, bare, strict=True)]


def reseeded():
    """Loaders whose generators the script seeds for each epoch: pairs in one order, of all."""
    x, generators = torch.arange(float(ROWS)), [torch.Generator(), torch.Generator()]
    model = model_of()
    model, optimizer = ht.distribute(model, sgd(model))
    ways = [
        [ht.shard(DataLoader(x, BATCH, shuffle=True)) for _ in generators],
        [ht.shard(DataLoader(x, BATCH, sampler=RandomSampler(x, generator=one))) for one in generators],
    ]
    equal, orders = 0, []
    for epoch in range(3):
        for way, loaders in enumerate(ways):
            for one in (loader.generator for loader in loaders) if way == 0 else generators:
                one.manual_seed(epoch)
            pairs = [torch.cat(list(each)) for each in loaders]
            equal += int((pairs[0] == pairs[1]).sum())
            orders.append(pairs[0].tolist())
        steps(model, optimizer, [[part[ht.rank() :][:2] for part in data()]])
    return [ht.sum(equal), len({str(one) for one in orders[::2]})]


def held():
    return {
        "kept batches": kept_batches(),
        "restored statistics": restored_statistics(),
        "later hooks": later_hooks(),
        "held groups": held_groups(),
        "mean and sum": mean_and_sum(),
        "reseeded": reseeded(),
    }
