"""Cases that give something else than weights: sums, gradients, files."""

from __future__ import annotations

import copy
import hashlib
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler

import hvd_train.torch as ht
from hvd_train.errors import TrainError
from hvd_train.script.pytorch import registry
from tests.script.pytorch.cases.batches import PAGE_BLOCKS
from tests.script.pytorch.cases.gradients import Checkpointed
from tests.script.pytorch.cases.models import WIDE, cnn, digest, digits, fit, loader, mlp, sgd


def scaler_skips(**options):
    """Rank 1 alone overflows at step 1: every rank leaves this step out, and only this one."""
    model = mlp(hidden=WIDE).float()
    model, optimizer = ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    scaler, steps = torch.amp.GradScaler("cpu", init_scale=2.0), []
    for step, (x, y) in zip(range(3), loader(), strict=False):
        before = digest(model)
        optimizer.zero_grad()
        factor = 1e38 if step == 1 and ht.rank() == ht.size() - 1 else 1.0
        loss = F.cross_entropy(model(x.float()), y) * factor * factor
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        steps.append([scaler.get_scale(), digest(model) != before])
    return steps


class Dynamic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(4, 1, bias=False, dtype=torch.float64) for _ in range(3)])

    def forward(self, x, which):
        return self.parts[which](x).sum()


def dynamic():
    """Each rank takes a part of its own, nobody takes the last but one, then nobody the first."""
    model = Dynamic()
    model, optimizer = ht.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=1.0))
    start = [part.weight.detach().clone() for part in model.parts]
    model(torch.ones(1, 4, dtype=torch.float64), 2 * (ht.rank() % 2)).backward()
    gradients = [None if p.weight.grad is None else p.weight.grad[0, 0].item() for p in model.parts]
    optimizer.step()
    untouched = bool((start[1] == model.parts[1].weight).all())
    optimizer.zero_grad()
    model(torch.ones(1, 4, dtype=torch.float64), 2).backward()
    return {"gradients": gradients, "untouched": untouched, "then": model.parts[0].weight.grad is None}


def thrown_away():
    """Training is the same bits whether gradients that nobody used were computed in between or not."""

    batches = list(loader(480))

    def train(waste, **options):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(64, WIDE), nn.ReLU(), nn.Linear(WIDE, 60), nn.ReLU(), nn.Linear(60, 10)
        )
        model, first, second = ht.distribute(model.double(), sgd(model[:3]), sgd(model[3:]), **options)
        for step, (x, y) in enumerate(batches):
            for other in batches[:2] * (waste is not None and step % 2 == 1):
                F.cross_entropy(model(other[0]), other[1]).backward()
                (model if waste else first).zero_grad(set_to_none=step % 4 == 1)
                second.zero_grad(set_to_none=step % 4 == 1)
            # As adversaries do: the gradients of one half are used, those of the other cleared.
            for half in (first, second):
                F.cross_entropy(model(x), y).backward()
                half.step()
                model.zero_grad()
        return digest(model)

    kinds = {"topk": {"ratio": 0.05}, "powersgd": {"rank": 2}, "int8": {}, "int4": {}}
    return {
        name: [train(waste, compression=name, **options) for waste in (None, True, False)]
        for name, options in kinds.items()
    }


def residual_by_hand():
    """A loop that updates weights itself keeps what its compressor leaves out, and a half's residual is its own."""
    kinds = ({"compression": "topk", "ratio": 0.05}, {"compression": "int4"})
    return [trained_by_hand(**options) for options in kinds]


def trained_by_hand(**options):
    out, batches = [], list(loader())
    for by_hand in (False, True):
        torch.manual_seed(0)
        model = mlp(hidden=WIDE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ht.distribute(model, **options)
        for x, y in batches:
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if by_hand:
                for p in model.parameters():
                    p.data.sub_(p.grad, alpha=0.1)
            else:
                optimizer.step()
        out.append(digest(model))
    return out


def pickled(folder: Path):
    model = cnn(norm=True)
    fit(*ht.distribute(model, sgd(model), sync_batchnorm=True))
    path = folder / f"whole.{ht.rank()}.pt"
    torch.save(model, path)
    other, copied = torch.load(path, weights_only=False), copy.deepcopy(model)
    return {
        "same": digest(other) == digest(model) == digest(copied),
        "class": type(other[1]) is nn.BatchNorm2d,
        "joined": type(copied[1]) is type(model[1]),
        "batches": int(model[1].num_batches_tracked),
    }


def transfers():
    """name -> how many backward passes were exchanged in three steps."""
    passes = {}
    for name, model in {"plain": mlp(), "checkpointed": Checkpointed()}.items():
        model, optimizer = ht.distribute(model, sgd(model), overlap=False)
        fit(model, optimizer, batches=[batch for _, batch in zip(range(3), loader(), strict=False)])
        passes[name] = registry.distributed[-1][1].passes
    return passes


def broadcast():
    """Rank 0's weights, buffers and slots reach all ranks, though each began with its own."""
    torch.manual_seed(ht.rank())
    model = cnn(norm=True)
    model[1].running_mean.fill_(ht.rank() + 1.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    F.cross_entropy(model(digits(8)[:][0]), digits(8)[:][1]).backward()
    optimizer.step()
    ht.distribute(model, optimizer)
    tensors = [*model.state_dict().values(), *(x for s in optimizer.state.values() for x in s.values())]
    return hashlib.sha256(b"".join(x.numpy().tobytes() for x in tensors)).hexdigest()


def sums():
    """Whole numbers in, whole numbers out, exact beyond 2^53; one that is whole on some ranks only gives a float."""
    correct, count = ht.sum(torch.tensor(3) + ht.rank(), 10)
    mixed = ht.sum(0 if ht.rank() else 0.5)
    totals = [correct, count, ht.sum(0.1), ht.sum(2**53 + 1), ht.sum(np.array([True])), mixed, ht.sum(2.0)]
    return [[type(x).__name__, x] for x in totals]


def sums_of_tensors():
    """[type, values] of sums over ranks, each as it came in: a confusion matrix, one of 8 bits, floats, an array."""
    labels = torch.arange(3 + ht.rank()) % 3
    matrix = torch.zeros(3, 3, dtype=torch.int64).index_put((labels, labels), torch.tensor(1), accumulate=True)
    alone = ht.sum(matrix + 2**60)
    small, floats, half, array, one, number = ht.sum(
        torch.full((2,), 200, dtype=torch.uint8), torch.full((2, 2), 0.1, requires_grad=True),
        torch.full((2,), 60000.0, dtype=torch.float16), np.array([[True, False]]), torch.ones(1), 3,
    )  # fmt: skip
    message = ""
    try:
        ht.sum([1, 2])
    except TrainError as error:
        message = str(error)
    pair = torch.tensor([1 + 2j, 3 - 1j])
    assert [x.tolist() for x in ht.sum(pair.conj(), pair.conj().imag)] == [
        [(1 - 2j) * ht.size(), (3 + 1j) * ht.size()], [-2 * ht.size(), ht.size()],
    ]  # fmt: skip
    totals = [alone - 2**60 * ht.size(), small, floats, half, torch.from_numpy(array)]
    return [*([str(x.dtype), x.tolist()] for x in totals), one, number, type(array).__name__, message]


def equal_generators():
    """Loaders of inputs and targets whose generators have one seed are in one order; those of one generator are not."""
    x = torch.arange(48.0)

    def pairs(first, second):
        parts = [ht.shard(DataLoader(x, 4, shuffle=True, generator=g)) for g in (first, second)]
        return ht.sum(sum(int((a == b).sum()) for a, b in zip(*parts, strict=True)))

    one = torch.Generator().manual_seed(7)

    def sampled(kind):
        return ht.shard(DataLoader(x, 4, sampler=kind(range(48), generator=torch.Generator().manual_seed(7))))

    equal = [
        ht.sum(sum(int((a == b).sum()) for a, b in zip(sampled(kind), sampled(kind), strict=True)))
        for kind in (SubsetRandomSampler, RandomSampler)
    ]
    again = torch.Generator().manual_seed(7)
    return [pairs(one, again), pairs(one, one) < 24, *equal]


def library_metric():
    """A metric of torchmetrics over this rank's samples, joined as the guide says, with rank + 1 of rank + 2 right."""
    names: dict = {}
    code = next(block for block in PAGE_BLOCKS if "torchmetrics" in block)
    exec(code.partition("accuracy = ")[0], names)
    metric = names["torchmetrics"].Accuracy(task="multiclass", num_classes=3, average="micro", **names["joined"])
    metric.update(torch.ones(ht.rank() + 2, dtype=torch.long), torch.arange(ht.rank() + 2).clamp(max=1))
    return float(metric.compute())


def waits(folder: Path):
    """A file that rank 0 writes late is there for all behind the barrier."""
    if ht.rank() == 0:
        time.sleep(0.3)
        torch.save(mlp().state_dict(), folder / "plain.pt")
    ht.barrier()
    return sorted(torch.load(folder / "plain.pt"))


def resume(folder: Path):
    """Two epochs at once, and one, saved, loaded by a model of other weights, and another one: the same bits."""

    def job():
        model = cnn(norm=True).insert(4, nn.Dropout(0.3))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [10, 25])
        return model, optimizer, schedule, loader()

    path = folder / "own.ckpt"
    torch.manual_seed(0)
    model, optimizer, schedule, batches = job()
    ht.distribute(model, optimizer)
    fit(model, optimizer, scheduler=schedule, batches=batches)
    torch.rand(3 + ht.rank())  # a validation that draws
    ht.save(path, model=model, optimizer=optimizer, schedule=schedule, batches=batches, epoch=1, best=float("inf"))
    fit(model, optimizer, scheduler=schedule, batches=batches)
    digests = {digest(model)}
    for early in (True, False):
        torch.manual_seed(7)
        other, second, later, again = job()
        if not early:
            ht.distribute(other, second)
        values = ht.load(path, model=other, optimizer=second, schedule=later, batches=again)
        if early:
            ht.distribute(other, second)
        fit(other, second, scheduler=later, batches=again)
        digests.add(digest(other))
    return {
        "same": len(digests) == 1,
        "found": values,
        "left": sorted(p.name for p in folder.glob("*tmp*")),
    }
