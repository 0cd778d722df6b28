"""Cases that tell something else than weights: messages, random numbers, sums."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import itertools
import random
import time
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hvd_train.torch as ht
from hvd_train.core import meeting
from hvd_train.errors import TrainError
from hvd_train.torch import registry, step_hooks
from tests.torch.cases.models import WIDE, cnn, digest, digits, fit, loader, mlp, sgd
from tests.torch.cases.same import Checkpointed, in_parts


def scaler_skips(**options):
    """Rank 1 alone overflows at step 1: every rank leaves this step out, and only this one."""
    model = mlp(hidden=WIDE).float()
    model, optimizer = ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    scaler, found = torch.amp.GradScaler("cpu", init_scale=2.0), []
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
        found.append([scaler.get_scale(), digest(model) != before])
    return found


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

    batches = list(loader())

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
            for own in (first, second):
                F.cross_entropy(model(x), y).backward()
                own.step()
                model.zero_grad()
        return digest(model)

    kinds = {"topk": {"ratio": 0.05}, "powersgd": {"rank": 2}, "int8": {}}
    return {
        name: [train(waste, compression=name, **options) for waste in (None, True, False)]
        for name, options in kinds.items()
    }


def residual_by_hand():
    """A loop that updates weights itself keeps what its compressor leaves out, and a half's residual is its own."""
    out, batches = [], list(loader())
    for own in (False, True):
        torch.manual_seed(0)
        model = mlp(hidden=WIDE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ht.distribute(model, compression="topk", ratio=0.05)
        for x, y in batches:
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if own:
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


def forgotten():
    """What is told where only one of two models is distributed, and where a copy of it trains on."""
    model, optimizer = ht.distribute(model := mlp(), sgd(model))
    found = []
    for other in (model, mlp(), copy.deepcopy(model)):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            fit(other, optimizer if other is model else torch.optim.Adagrad(other.parameters()))
        found.append([str(x.message) for x in told if "ht.distribute" in str(x.message)])
        step_hooks.warn_of_local_optimizer.cache_clear()
    return found


class Words(torch.utils.data.Dataset):
    """Of the user's own. What a rank has by itself is right."""

    def __init__(self, count: int = 60) -> None:
        self.rank, self.shape, self.folder = ht.rank(), (ht.rank(), 3), f"/tmp/rank{ht.rank()}"
        self.files = [f"{self.folder}/{k}.png" for k in range(count)]
        self.options = {"device": f"cuda:{ht.rank()}", "seconds": time.perf_counter()}
        self.ready, self.made = {}, [None] * count
        self.seen = np.zeros(count, bool)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i):
        self.ready[i], self.made[i], self.seen[i] = i, torch.ones(1), True
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


def own_data():
    """Caches that are filled on each rank apart, a seeded shuffle for each epoch."""
    for epoch, _ in enumerate(walked(samples := Words(), shuffle=True, epochs=4)):
        random.Random(epoch).shuffle(samples.files)
    return len(samples.ready)


def same_work():
    """What is told where ranks take the same batches, and where they do not."""
    found = []
    for batches in (DataLoader(digits(240), 60), loader(240)):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            model = mlp()
            fit(*ht.distribute(model, sgd(model)), batches=batches)
        found.append([str(x.message) for x in told if "same gradients" in str(x.message)])
    return found


def plain_tensors():
    """Attributes that are no buffers: drawn on each rank apart, the same, made anew in each forward."""
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(2, 2)), nn.utils.spectral_norm(nn.Linear(2, 2)))
    model[1].table, model.scale = torch.full((3,), 1.0 + ht.rank()), torch.ones(2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ht.distribute(model)
    return [str(x.message) for x in told if "register_buffer" in str(x.message)]


def transfers():
    """name -> how many backward passes were exchanged in three steps."""
    found = {}
    for name, model in {"plain": mlp(), "checkpointed": Checkpointed()}.items():
        model, optimizer = ht.distribute(model, sgd(model), overlap=False)
        fit(model, optimizer, batches=[batch for _, batch in zip(range(3), loader(), strict=False)])
        found[name] = registry.distributed[-1][1].passes
    return found


def slow():
    """What rank 0 tells where rank 1 takes 20 ms longer than the others, from step 20 on."""
    registry.slow_rank_report.cache_clear()
    own, meeting.MOST_SECONDS = meeting.MOST_SECONDS, 0.04
    model, optimizer = ht.distribute(model := mlp(), sgd(model))
    with contextlib.redirect_stderr(told := io.StringIO()):
        for step in range(80):
            time.sleep(0.02 if ht.rank() == 1 and step >= 20 else 0)
            fit(model, optimizer, batches=[digits(8)[:]])
    meeting.MOST_SECONDS = own
    return told.getvalue()


def masks():
    torch.manual_seed(0)
    model = mlp(dropout=0.5)
    ht.distribute(model)
    return F.dropout(torch.ones(64), 0.5).tolist()


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
    told = ""
    try:
        ht.sum([1, 2])
    except TrainError as error:
        told = str(error)
    found = [alone - 2**60 * ht.size(), small, floats, half, torch.from_numpy(array)]
    return [*([str(x.dtype), x.tolist()] for x in found), one, number, type(array).__name__, told]


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
    kept, found = [], []

    def look():
        if ht.rank() == 0:
            for one in loaders:
                next(iter(one))
                kept.append(iter(one))
                next(kept[-1])

    look()
    for epoch in range(4):
        found.append([[], []])
        for step, parts in enumerate(zip(*loaders, strict=True)):
            for mine, (x,) in zip(found[-1], parts, strict=True):
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
    return found


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
        found = ht.load(path, model=other, optimizer=second, schedule=later, batches=again)
        if early:
            ht.distribute(other, second)
        fit(other, second, scheduler=later, batches=again)
        digests.add(digest(other))
    return {
        "same": len(digests) == 1,
        "found": found,
        "left": sorted(p.name for p in folder.glob("*tmp*")),
    }


def alone():
    """What is said of a validation: not joined, joined, read for a look, read whole by each rank; and at the end."""

    def score(batches):
        with torch.no_grad():
            return sum(F.cross_entropy(model(x), y, reduction="sum").item() for x, y in batches)

    model, optimizer = ht.distribute(model := mlp(), sgd(model))
    checks, found = ht.shard(DataLoader(digits(101), batch_size=7)), []
    loops = [
        lambda: score(checks),
        lambda: ht.sum(score(checks)),
        lambda: score(itertools.islice(checks, 2)),
        lambda: score(DataLoader(digits(101), batch_size=7)),
    ]
    for loop in loops:
        registry.unshared_sums()._main = ht.rank() == 0
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            fit(model, optimizer, batches=loader(240))
            loop()
            fit(model, optimizer, batches=loader(240))
        found.append([str(one.message) for one in told if "ht.sum" in str(one.message)])
    score(checks)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        registry.unshared_sums()._main = ht.rank() == 0
        registry.unshared_sums().begins()
        registry.unshared_sums().begins()
    return [*found, [str(one.message) for one in told]]


def parts_told():
    """What is said of parts that travel by themselves, where a run of them has said nothing so far."""
    registry.part_sync()._warned = False
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        in_parts()()
        in_parts()()
    return [str(one.message) for one in told if "shares of a batch" in str(one.message)]


def main_rank():
    """What is printed, the end of the bar, and the batches that a loop within a bar gets."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        ht.print(ht.size(), "ranks,", "all", flush=True)
    bar = ht.tqdm(ht.shard(DataLoader(digits(20 * ht.size()), batch_size=2)), file=(shown := io.StringIO()))
    batches = len(list(bar))
    bar.set_postfix(loss=0.5)
    assert ht.is_main() == (ht.rank() == 0)
    return [printed.getvalue(), shown.getvalue(), batches]
