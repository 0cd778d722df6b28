"""Trainings whose weights are the same on any number of ranks, up to rounding."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import hvd_train.torch as ht
from tests.torch.cases.models import GLOBAL_BATCH, WIDE, cnn, digits, fit, loader, mlp, sgd


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
