"""Trainings of one or several models and optimizers, as scripts have them."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hvd_train.torch as ht
from tests.script.pytorch.cases.models import GLOBAL_BATCH, cnn, digits, fit, loader, mlp, sgd


def simple(make, optimizer=sgd, **options):
    def case():
        model = make()
        return fit(*ht.distribute(model, optimizer(model)), **options)

    return case


class Fixed(torch.optim.Optimizer):
    """Groups as optimizers of others have them: no rate (Adafactor), a set, a dtype, a function, a number of NumPy."""

    def __init__(self, parameters):
        options = {"lr": None, "kinds": {1, 2}, "dtype": torch.float32, "rule": abs, "step_size": np.float32(0.125)}
        super().__init__(parameters, options)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * float(group["step_size"]))


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


def scheduled():
    model = mlp()
    model, optimizer = ht.distribute(model, sgd(model))
    return fit(model, optimizer, scheduler=torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=20))


def compiled(before: bool, backend: str = "aot_eager"):
    def case():
        model = mlp()
        inner = model
        if before:
            model = torch.compile(model, backend=backend, dynamic=True)
        model, optimizer = ht.distribute(model, sgd(inner))
        if not before:
            model = torch.compile(model, backend=backend)
        fit(model, optimizer, accumulate=2)
        return inner

    return case


def compiled_step():
    """A whole step as one compiled function, of a model whose layers join their statistics."""
    model = cnn(norm=True)
    model, optimizer = ht.distribute(model, sgd(model), sync_batchnorm=True)

    @torch.compile(backend="eager")
    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return ht.sum(loss.detach())

    for x, y in loader():
        step(x, y)
    return model


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


def overlapping():
    model = mlp()
    return fit(*ht.distribute(model, sgd(model), overlap=True), accumulate=2)


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
    optimizer.step(lambda: float(closure().detach()))  # a number will do
    return model
