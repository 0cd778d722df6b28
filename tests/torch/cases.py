"""One rank of a launched world: ``python -m tests.torch.cases FOLDER`` runs every case as a script would.

Writes FOLDER/NAME.RANK.npz (weights after training) and FOLDER/facts.RANK.json. Cases build their own model each.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import hashlib
import io
import itertools
import json
import os
import random
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import hvd_train.torch as ht
from hvd_train.core import meeting
from hvd_train.data.formats import read_digits
from hvd_train.errors import TrainError
from hvd_train.torch import registry, step_hooks
from tests.seconds import counted

SECONDS = 120  # of one case
GLOBAL_BATCH = 60
IMAGES, LABELS = read_digits()


def digits(count: int = 1200, dtype: torch.dtype = torch.float64) -> TensorDataset:
    images = torch.tensor(IMAGES[:count] / 16, dtype=dtype).unsqueeze(1)
    return TensorDataset(images, torch.tensor(LABELS[:count]))


def loader(count: int = 1200, **options) -> DataLoader:
    own = {"batch_size": GLOBAL_BATCH // ht.size(), "shuffle": True, **options}
    return ht.shard(DataLoader(digits(count), **own))


def mlp(dropout: float = 0.0, hidden: int = 32) -> nn.Module:
    first, last = nn.Linear(64, hidden), nn.Linear(hidden, 10)
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), nn.Dropout(dropout), last).double()


WIDE = 128  # with it the first layer is large enough to be compressed


def cnn(norm: bool = False) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8) if norm else nn.Identity(), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)
    ).double()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


def fit(model, optimizer, *, clip=0.0, to_none=True, accumulate=1, no_sync=True, scheduler=None, batches=None):
    """A loop as users write it; ``accumulate`` micro-batches of a batch, with or without no_sync."""
    for inputs, labels in loader() if batches is None else batches:
        optimizer.zero_grad(set_to_none=to_none)
        parts = list(zip(inputs.chunk(accumulate), labels.chunk(accumulate), strict=True))
        for k, (x, y) in enumerate(parts):
            quiet = no_sync and k + 1 < len(parts)
            with ht.no_sync(model) if quiet else contextlib.nullcontext():
                (F.cross_entropy(model(x), y) / accumulate).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return model


def two_optimizers():
    model = cnn()
    first, second = sgd(model[0]), torch.optim.AdamW(model[4].parameters(), lr=0.01)
    model, first, second = ht.distribute(model, first, second)
    for x, y in loader():
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        first.step()
        second.step()
    return model


def two_models():
    """Each distributed by itself; one backward for both."""
    first, second = mlp(), cnn()
    first, one = ht.distribute(first, sgd(first))
    second, other = ht.distribute(second, torch.optim.Adam(second.parameters(), lr=0.01))
    for x, y in loader():
        one.zero_grad()
        other.zero_grad()
        (F.cross_entropy(first(x), y) + F.cross_entropy(second(x), y)).backward()
        one.step()
        other.step()
    return nn.ModuleList([first, second])


def simple(make, optimizer=sgd, **options):
    def case():
        model = make()
        return fit(*ht.distribute(model, optimizer(model)), **options)

    return case


def scheduled():
    model = mlp()
    model, optimizer = ht.distribute(model, sgd(model))
    return fit(model, optimizer, scheduler=torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=20))


def compiled(before: bool, backend: str):
    def case():
        model = mlp()
        inner = model
        if before:
            # One compilation for all shapes, whose kernels the next world finds in the cache.
            model = torch.compile(model, backend=backend, dynamic=True)
        model, optimizer = ht.distribute(model, sgd(inner))
        if not before:
            model = torch.compile(model, backend=backend)
        fit(model, optimizer, accumulate=2)
        return inner

    return case


def channels_last():
    model = cnn().to(memory_format=torch.channels_last)
    model, optimizer = ht.distribute(model, sgd(model))
    fit(model, optimizer)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert model[0].weight.grad.stride() == model[0].weight.stride()
    return model


def tied_and_frozen():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 10)).double()
    model[3].weight = model[1].weight
    model[4].bias.requires_grad_(False)
    return fit(*ht.distribute(model, sgd(model)))


def norm_synchronized(count=1200):
    def case():
        model = cnn(norm=True)
        return fit(*ht.distribute(model, sgd(model), sync_batchnorm=True), batches=loader(count))

    return case


def overlapping():
    model = mlp()
    return fit(*ht.distribute(model, sgd(model), overlap=True), accumulate=2)


def uneven():
    """The last of 4 global batches has 55 samples: 28 and 27 for two ranks, 19, 18 and 18 for three."""
    model = mlp()
    model, optimizer = ht.distribute(model, sgd(model))
    batches = loader(count=235)
    checks = ht.shard(DataLoader(digits(101), batch_size=7))
    for _ in range(3):
        for inputs, labels in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            with torch.no_grad():
                ht.sum(*[F.cross_entropy(model(x), y, reduction="sum") for x, y in checks])
    return model


def one_optimizer():
    """One optimizer over two models."""
    parts = nn.ModuleList([mlp(), cnn()])
    parts, optimizer = ht.distribute(parts, sgd(parts))
    for x, y in loader():
        optimizer.zero_grad()
        F.cross_entropy(parts[0](x) + parts[1](x), y).backward()
        optimizer.step()
    return parts


def several_models():
    """One optimizer over two models, handed over as they are."""
    first, second = mlp(), cnn()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1, momentum=0.9)
    first, second, optimizer = ht.distribute(first, second, optimizer)
    for x, y in loader():
        optimizer.zero_grad()
        with ht.no_sync(second):
            (F.cross_entropy(second(x), y) / 2).backward()
        F.cross_entropy(first(x) + second(x), y).backward()
        optimizer.step()
    return nn.ModuleList([first, second])


def unfrozen(**options):
    """The first layer is frozen, then trained, then alone: from the first step on its gradients are the ranks' mean."""

    def case():
        model = mlp(hidden=WIDE)
        model[1].requires_grad_(False)
        model, optimizer = ht.distribute(model, sgd(model), **options)
        for step, (x, y) in enumerate(loader()):
            if step in (5, 9):
                model[1].requires_grad_(step == 5)
            if step == 13:
                model.requires_grad_(False)
                model[1].weight.requires_grad_(True)
            optimizer.zero_grad()
            for part in zip(x.chunk(2), y.chunk(2), strict=True):
                (F.cross_entropy(model(part[0]), part[1]) / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            optimizer.step()
        return model

    return case


def unfrozen_late():
    """What is unfrozen is all that a pass reaches."""
    model = mlp()
    model[1].weight.requires_grad_(False)
    model, optimizer = ht.distribute(model, sgd(model))
    for step, (x, y) in enumerate(loader(count=235)):
        if step == 2:
            model.requires_grad_(False)
            model[1].weight.requires_grad_(True)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
    return model


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


def gan():
    """Two models with an optimizer each; the noise is a part of the data, so that worlds can be compared."""
    generator = nn.Sequential(nn.Linear(4, 64), nn.Sigmoid()).double()
    discriminator = nn.Sequential(nn.Linear(64, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)).double()
    generator, g_optimizer = ht.distribute(generator, torch.optim.Adam(generator.parameters(), 0.01))
    discriminator, d_optimizer = ht.distribute(discriminator, torch.optim.Adam(discriminator.parameters(), 0.01))
    noise = torch.randn(235, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    samples = TensorDataset(digits(235)[:][0].flatten(1), noise)
    batches = ht.shard(DataLoader(samples, GLOBAL_BATCH // ht.size(), shuffle=True))
    for _ in range(3):
        for real, z in batches:
            one, zero = (torch.full((len(real), 1), x, dtype=torch.float64) for x in (1.0, 0.0))
            d_optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(discriminator(real), one).backward()
            F.binary_cross_entropy_with_logits(discriminator(generator(z).detach()), zero).backward()
            d_optimizer.step()
            g_optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(discriminator(generator(z)), one).backward()
            g_optimizer.step()
    return nn.ModuleList([generator, discriminator])


def lbfgs():
    """The loss that the search goes by is this rank's own, as scripts have it."""
    model = mlp()
    model, optimizer = ht.distribute(
        model, torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")
    )
    for _, (x, y) in zip(range(3), loader(), strict=False):

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    return model


def by_hand():
    model = mlp()
    model, optimizer = ht.distribute(model, sgd(model))
    for x, y in loader():
        gradients = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
        for p, g in zip(model.parameters(), gradients, strict=True):
            p.grad = g
        optimizer.step()
    return model


class Within(torch.optim.SGD):
    """A step within a step: hooks run before each."""

    def step(self, closure=None):
        return super().step(closure)


def by_hand_summed():
    model = mlp()
    torch.optim.SGD(model.parameters(), lr=0.1)  # from here on its own class has hooks, too
    model, optimizer = ht.distribute(model, Within(model.parameters(), lr=0.001), average=False)
    for x, y in loader():
        loss = F.cross_entropy(model(x), y, reduction="sum")
        for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            p.grad = g
        optimizer.step()
    return model


def other_data():
    """``p.grad.data = g``: the gradient stays the same tensor and lies elsewhere; it is the mean or this rank's own."""
    model = mlp()
    model, optimizer = ht.distribute(model, sgd(model))
    for step, (x, y) in enumerate(loader()):
        optimizer.zero_grad(set_to_none=step % 3 == 2)
        loss, parameters = F.cross_entropy(model(x), y), list(model.parameters())
        if step % 3 == 1:
            own = torch.autograd.grad(loss, parameters)
        else:
            loss.backward()
            own = [p.grad.clamp(-0.01, 0.01) for p in parameters]
        for p, g in zip(parameters, own, strict=True):
            p.grad.data = g
        optimizer.step()
    return model


def summed(accumulate=1):
    def case():
        model = mlp()
        model, optimizer = ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.001), average=False)
        for x, y in loader():
            optimizer.zero_grad(set_to_none=accumulate > 1)
            for k, (a, b) in enumerate(zip(x.chunk(accumulate), y.chunk(accumulate), strict=True)):
                with ht.no_sync(model) if k + 1 < accumulate else contextlib.nullcontext():
                    F.cross_entropy(model(a), b, reduction="sum").backward()
            optimizer.step()
        return model

    return case


def kept(view):
    """A multi-task method: the gradients of each loss are kept, and joined in a way that a sum of losses is not."""

    def case():
        model = mlp()
        model, optimizer = ht.distribute(model, sgd(model))
        for x, y in loader():
            own = []
            for weight in (1.0, -0.5, 0.25):
                optimizer.zero_grad()
                (weight * F.cross_entropy(model(x * weight), y)).backward()
                own.append([p.grad.view(-1) if view else p.grad for p in model.parameters()])
            for p, *gradients in zip(model.parameters(), *own, strict=True):
                p.grad = sum(g * (k + 1) for k, g in enumerate(gradients)).view_as(p)
            optimizer.step()
        return model

    return case


class Checkpointed(nn.Module):
    """A block that runs twice, each time in a backward pass of its own; large enough for a bucket of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = (nn.Linear(a, b).double() for a, b in ((64, 768), (768, 768), (768, 10)))
        self.idle = nn.Linear(2, 2).double()

    def forward(self, x):
        x = self.first(x.flatten(1))
        for _ in range(2):
            x = checkpoint(lambda x: self.block(x).tanh(), x, use_reentrant=True)
        return self.last(x)


def checkpointed():
    model = Checkpointed()
    return fit(*ht.distribute(model, sgd(model), overlap=True))


class Faulty(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("out of memory")


def caught(overlap):
    """An error in the middle of backward, on all ranks alike; the script goes on with the next batch."""

    def case():
        model = mlp()
        model, optimizer = ht.distribute(model, sgd(model), overlap=overlap)
        for step, (x, y) in enumerate(loader()):
            optimizer.zero_grad()
            hidden = model[2](model[1](model[0](x)))
            try:
                F.cross_entropy(model[4](Faulty.apply(hidden) if step == 3 else hidden), y).backward()
            except RuntimeError:
                continue
            optimizer.step()
        return model

    return case


def norm_kept(train):
    """Graphs that outlive a backward pass: two losses of one, then two graphs at once."""

    def case():
        model = cnn(norm=True)
        model[1].running_mean.fill_(0.1)
        model, optimizer = ht.distribute(model, sgd(model))
        for x, y in loader():
            model[1].train(train)
            optimizer.zero_grad()
            one, two, three = model(x), model(-x), model(x / 2)
            F.cross_entropy(one, y).backward(retain_graph=True)
            one.pow(2).mean().backward()
            for out in (two, three):
                F.cross_entropy(out, y).backward()
            optimizer.step()
        return model

    return case


# Weights after 20 steps are those of one rank with the same global batch.
PART = 9  # samples of a part: of 28 and 27, or 19, 18 and 18, ranks make unequal numbers


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


SAME = {
    "sgd": simple(mlp),
    "adam": simple(mlp, lambda model: torch.optim.Adam(model.parameters(), lr=0.01)),
    "clip": simple(cnn, clip=0.5),
    "zeros": simple(mlp, to_none=False, clip=0.5),
    "accumulate": simple(mlp, accumulate=2),
    "passes": simple(mlp, accumulate=2, no_sync=False),
    "zeros passes": simple(mlp, accumulate=2, no_sync=False, to_none=False),
    "two optimizers": two_optimizers,
    "two models": two_models,
    "scheduler": scheduled,
    "compile before": compiled(before=True, backend="inductor"),
    "compile after": compiled(before=False, backend="aot_eager"),
    "channels last": channels_last,
    "tied and frozen": tied_and_frozen,
    "norm synchronized": norm_synchronized(),
    "norm synchronized uneven": norm_synchronized(235),
    "overlap": overlapping,
    "uneven": uneven,
    "one optimizer": one_optimizer,
    "several models": several_models,
    "unfrozen": unfrozen(),
    "unfrozen overlap": unfrozen(overlap=True),
    "unfrozen late": unfrozen_late,
    "weighted sampler": sampled_by(weighted),
    "batch sampler": sampled_by(batched),
    "stream": sampled_by(streamed(0)),
    "stream of workers": sampled_by(streamed(2)),
    "gan": gan,
    "norm fixed": norm_kept(False),
    "lbfgs": lbfgs,
    "by hand": by_hand,
    "by hand summed": by_hand_summed,
    "data": other_data,
    "summed": summed(),
    "summed passes": summed(2),
    "kept": kept(view=False),
    "kept views": kept(view=True),
    "checkpointed": checkpointed,
    "caught": caught(overlap=False),
    "caught overlap": caught(overlap=True),
    "parts": in_parts(),
    "parts overlap": in_parts(overlap=True),
    "parts at once": in_parts(once=True, clip=0.2),
    "parts of two models": in_parts(models=2),
    "parts of a stream": in_parts(streamed(0)),
    "parts of a batch sampler": in_parts(batched),
}


def trained_apart():
    """The planted fault: without distribute the ranks differ, and from one rank."""
    torch.manual_seed(ht.rank())
    model = mlp()
    optimizer = sgd(model)
    for x, y in loader():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def gan_at_once():
    """In the order of the DCGAN example: what the generator made for the other's step is used for its own."""
    generator = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64)).double()
    discriminator = nn.Sequential(nn.Linear(64, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)).double()
    g, d = torch.optim.Adam(generator.parameters(), 0.01), torch.optim.Adam(discriminator.parameters(), 0.01)
    ht.distribute(generator, discriminator, g, d)
    for x, _ in loader():
        fake = generator(x[:, 0, 0, :4])
        d.zero_grad()
        (discriminator(fake.detach()).mean() - discriminator(x.flatten(1)).mean()).backward()
        d.step()
        g.zero_grad()
        (-discriminator(fake).mean()).backward()
        g.step()
    return nn.ModuleList([generator, discriminator])


def norm_local():
    model = cnn(norm=True)
    return fit(*ht.distribute(model, sgd(model)))


def norm_reset():
    """Statistics begin anew in new tensors."""
    model = cnn(norm=True)
    model, optimizer = ht.distribute(model, sgd(model))
    fit(model, optimizer)
    model[1].running_mean, model[1].running_var = (torch.full((8,), x, dtype=torch.float64) for x in (0.0, 1.0))
    return fit(model, optimizer)


def compressed(name, **options):
    def case():
        model = mlp(hidden=WIDE)
        model, optimizer = ht.distribute(model, sgd(model), compression=name, **options)
        for _ in range(3):
            fit(model, optimizer)
        return model

    return case


class Codebook(nn.Module):
    """Buffers as vector quantization, queues and counters have them; some change where torch does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(64, 8).double(), nn.InstanceNorm1d(8, track_running_stats=True).double()
        self.register_buffer("codes", torch.zeros(64, dtype=torch.float64))
        self.register_buffer("queue", torch.zeros(3, 64))
        self.register_buffer("place", torch.tensor(0))
        self.register_buffer("mask", torch.full((4, 4), torch.finfo(torch.float32).min))
        self.register_buffer("center", None)  # of the first batch

    def forward(self, x):
        x = x.flatten(1)
        if self.center is None:
            self.center = x.detach().mean(0)
        self.codes.data.lerp_(x.detach().mean(0), 0.1)
        self.queue[self.place % 3] = x[0].detach()
        self.place += int(x[0, 20] > 0.5) + 1  # by this rank's data
        return self.norm(self.linear(x).unsqueeze(2).expand(-1, -1, 4)).sum(2) + self.codes.mean()


def buffers():
    model = Codebook()
    model, optimizer = ht.distribute(model, sgd(model))
    for x, y in loader():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y % 8).backward()
        optimizer.step()
    assert (model.mask == torch.finfo(torch.float32).min).all() and model.codes.any() and model.queue.any()
    return model


def norm_wide():
    """Statistics large enough to be compressed, which they never are."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4500), nn.BatchNorm1d(4500), nn.ReLU(), nn.Linear(4500, 10))
    return fit(*ht.distribute(model.double(), sgd(model), compression="topk", ratio=0.01))


def in_stages(**options):
    """One layer after another is trained alone, while statistics and buffers of all go on changing."""

    def case():
        model = nn.Sequential(Codebook(), nn.BatchNorm1d(8).double(), nn.Linear(8, 8).double())
        model[:2].requires_grad_(False)
        model, optimizer = ht.distribute(model, sgd(model), **options)
        for step, (x, y) in enumerate(loader()):
            for k, part in enumerate(reversed(model)):
                part.requires_grad_(k == step // 7)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y % 8).backward()
            optimizer.step()
        return model

    return case


# Weights are the same bits on all ranks.
ALIKE = {
    **SAME,
    "norm local": norm_local,
    "norm kept": norm_kept(True),
    "gan at once": gan_at_once,
    "norm wide": norm_wide,
    "norm reset": norm_reset,
    "buffers": buffers,
    "in stages": in_stages(),
    "in stages overlap": in_stages(overlap=True),
    "not compressed": compressed("none"),
    "fp16": compressed("fp16"),
    "topk": compressed("topk", ratio=0.1),
    "powersgd": compressed("powersgd", rank=2),
    "parts topk": in_parts(compression="topk", ratio=0.1),
}


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
    correct, count = ht.sum(torch.tensor(3) + ht.rank(), 10)
    return [correct, count, ht.sum(0.1)]


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
    registry.part_sync()._told = False
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


def errors(folder: Path):
    """name -> the one line, which every rank must raise alike."""

    def told(work):
        try:
            work()
        except TrainError as error:
            return f"{type(error).__name__}: {error}"
        return None

    def twice():
        model = mlp()
        ht.distribute(model)
        ht.distribute(model)

    def step_alone():
        model, optimizer = ht.distribute(model := mlp(), sgd(model))
        with ht.no_sync(model):
            model(digits(8)[:][0]).sum().backward()
        optimizer.step()

    def added():
        model, optimizer = ht.distribute(model := mlp(), sgd(model))
        late = nn.Parameter(torch.ones(3))
        optimizer.add_param_group({"params": [late]})
        late.sum().backward()
        optimizer.step()

    def sparse():
        model = nn.Embedding(10, 4, sparse=True)
        ht.distribute(model)
        model(torch.arange(3)).sum().backward()

    def frozen():
        ht.distribute(mlp().requires_grad_(False))

    def rate():
        model = mlp()
        ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1 * (1 + ht.rank())))

    def plateau():
        """A schedule by this rank's own loss, as the validation of a script often has it."""
        model, optimizer = ht.distribute(model := mlp(), sgd(model))
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        for step, (x, y) in enumerate(loader()):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            schedule.step(-step * ht.rank())

    def late(batches):
        """Apart after the 10th pass, or in few of them; nobody is to look in the first training."""

        def case():
            for every in (0, 100):
                torch.manual_seed(0)
                model, optimizer = ht.distribute(model := mlp(), sgd(model), agreement_every_n_steps=every)
                own = batches()
                for epoch in range(2):
                    for step, (x, y) in enumerate(own):
                        optimizer.zero_grad()
                        F.cross_entropy(model(x), y).backward()
                        optimizer.step()
                        if not epoch and step == 2:
                            optimizer.param_groups[0]["lr"] /= 1 + ht.rank()

        return case

    def drift():
        model, optimizer = ht.distribute(model := mlp(), sgd(model), agreement_every_n_steps=4)
        for step, (x, y) in enumerate(loader()):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if step == 2 and ht.rank() == 1:
                model[4].bias.data[3] += 1e-9

    def gathered(put):
        """A layer sets weights by the data of its rank, as public code of vector quantization does."""

        def case():
            model = mlp()
            model.codes = nn.Parameter(torch.zeros(64, dtype=torch.float64), requires_grad=False)
            model, optimizer = ht.distribute(model, sgd(model))
            for x, y in loader():
                put(model, model.codes.lerp(x.flatten(1).mean(0), 0.1))
                optimizer.zero_grad()
                F.cross_entropy(model(x + model.codes.detach().view(1, 8, 8)), y).backward()
                optimizer.step()

        return case

    def graph():
        model, optimizer = ht.distribute(model := mlp(), sgd(model))
        model(digits(8)[:][0]).pow(2).sum().backward(create_graph=True)

    def replaced():
        model = ht.distribute(mlp())
        model[4] = nn.Linear(32, 7).double()
        optimizer = sgd(model[4])
        model(digits(8)[:][0]).sum().backward()
        optimizer.step()

    def within():
        model = ht.distribute(nn.Linear(1024, 1024, bias=False), overlap=True)
        optimizer = sgd(model)
        model.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        model(torch.ones(1, 1024)).sum().backward()

    def summed_again():
        model, optimizer = ht.distribute(model := mlp(), sgd(model), average=False)
        model(digits(8)[:][0]).sum().backward()
        for p in model.parameters():
            p.grad = p.grad / 8
        optimizer.step()

    def summed_clipped():
        model, optimizer = ht.distribute(model := mlp(), sgd(model), average=False)
        for _ in range(2):
            model(digits(8)[:][0]).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e9)

    def twice_summed():
        model, optimizer = ht.distribute(model := mlp(), sgd(model), average=False)
        for _ in range(2):
            model(digits(8)[:][0]).sum().backward()

    def alone_failed():
        """One rank's error in backward, which its script catches."""
        model, optimizer = ht.distribute(model := mlp(), sgd(model))
        for _ in range(2):
            hidden = model[:2](digits(8)[:][0])
            with contextlib.suppress(RuntimeError):
                model[4](Faulty.apply(hidden) if ht.rank() == 1 else hidden).sum().backward()
            optimizer.zero_grad()

    def damaged():
        ht.save(folder / "bad.ckpt", model=mlp(), epoch=1)
        if ht.rank() == 0:
            content = bytearray((folder / "bad.ckpt").read_bytes())
            content[-9] ^= 1
            (folder / "bad.ckpt").write_bytes(content)
        ht.load(folder / "bad.ckpt", model=mlp())

    def unfit():
        if ht.rank() == 0:
            ht.save(folder / "fit.ckpt", model=mlp())
        ht.load(folder / "fit.ckpt", model=cnn())

    def layers():
        ht.distribute(mlp() if ht.rank() else cnn())

    def split():
        parts = torch.utils.data.random_split(range(40), [30, 10], torch.Generator().manual_seed(ht.rank()))
        ht.shard(DataLoader(parts[0]))

    def drawn():
        ht.shard(DataLoader(TensorDataset(torch.full((40,), ht.rank()))))

    def unsorted():
        """As ``list(set(labels))`` gives them, which differs between processes."""
        samples = Words()
        samples.classes = ["cat", "dog", "hen"][:: 1 - 2 * (ht.rank() % 2)]
        samples.index = {name: k for k, name in enumerate(samples.classes)}
        ht.shard(DataLoader(torch.utils.data.Subset(samples, range(40))))

    def shuffled():
        for _ in walked(samples := Words()):
            random.shuffle(samples.files)

    def joined_in_parts():
        model = cnn(norm=True)
        model, optimizer = ht.distribute(model, sgd(model), sync_batchnorm=True)
        for inputs, labels in loader(235):
            for at in range(0, len(labels), PART):
                F.cross_entropy(model(inputs[at : at + PART]), labels[at : at + PART]).backward()
            optimizer.step()

    def step_of_parts():
        model, optimizer = ht.distribute(model := mlp(), sgd(model))
        for inputs, labels in loader(235):
            for at in range(0, len(labels), PART):
                F.cross_entropy(model(inputs[at : at + PART]), labels[at : at + PART]).backward()
                optimizer.step()

    return {
        name: told(work)
        for name, work in {
            "parts clipped": in_parts(clip=0.2),
            "parts joined": joined_in_parts,
            "parts stepped": step_of_parts,
            "twice": twice,
            "another's": lambda: ht.distribute(mlp(), sgd(mlp())),
            "frozen": frozen,
            "rate": rate,
            "layers": layers,
            "step alone": step_alone,
            "added": added,
            "sparse": sparse,
            "no_sync": lambda: ht.no_sync(mlp()).__enter__(),
            "option": lambda: ht.distribute(mlp(), compression="topk", ratio=2.0),
            "few": lambda: ht.shard(DataLoader(digits(ht.size() - 1))),
            "unequal": lambda: ht.shard(DataLoader(digits(40 + ht.rank()))),
            "split": split,
            "drawn": drawn,
            "unsorted": unsorted,
            "shuffled": shuffled,
            "late": late(lambda: loader(240)),
            "late stream": late(lambda: ht.shard(streamed(0)(GLOBAL_BATCH // ht.size()))),
            "plateau": plateau,
            "drift": drift,
            "gathered": gathered(lambda model, codes: model.codes.data.copy_(codes)),
            "gathered anew": gathered(lambda model, codes: setattr(model, "codes", nn.Parameter(codes))),
            "graph": graph,
            "twice summed": twice_summed,
            "summed clipped": summed_clipped,
            "summed again": summed_again,
            "replaced": replaced,
            "within": within,
            "alone failed": alone_failed,
            "mode": lambda: ht.distribute(mlp(), mode="local_sgd", local_steps=4),
            "damaged": damaged,
            "unfit": unfit,
            "missing": lambda: ht.load(folder / "none.ckpt"),
        }.items()
    }


def digest(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.state_dict().values())).hexdigest()


def main(folder: Path) -> None:
    faulthandler.dump_traceback_later(SECONDS, exit=True)  # a hang is a failure, and says where it was
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": str(folder.parent / "inductor"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    facts = {}
    for name, case in ALIKE.items():
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        torch.manual_seed(0)
        with counted("PyTorch scripts", name):
            model = case()
        facts[f"digest {name}"] = digest(model)
        weights = {k.replace("/", "|"): v.detach().numpy() for k, v in model.state_dict().items()}
        np.savez(folder / f"{name}.{ht.rank()}.npz", **weights)
    torch.manual_seed(0)
    told = {
        "digest apart": lambda: digest(trained_apart()),
        "resume": lambda: resume(folder),
        "masks": masks,
        "broadcast": broadcast,
        "sums": sums,
        "sums of tensors": sums_of_tensors,
        "looks": looks,
        "waits": lambda: waits(folder),
        "main": main_rank,
    }
    if ht.size() > 1:
        told |= {
            "scaler": scaler_skips,
            "scaler topk": lambda: scaler_skips(compression="topk", ratio=0.5),
            "dynamic": dynamic,
            "draws": draws,
            "thrown away": thrown_away,
            "residual by hand": residual_by_hand,
            "pickled": lambda: pickled(folder),
            "forgotten": forgotten,
            "transfers": transfers,
            "own data": own_data,
            "same work": same_work,
            "plain tensors": plain_tensors,
            "slow": slow,
            "parts": parts_told,
            "alone": alone,
            "sampled": sampled,
            "errors": lambda: errors(folder),
        }
    for name, fact in told.items():
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        with counted("PyTorch scripts", name):
            facts[name] = fact()
    (folder / f"facts.{ht.rank()}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
