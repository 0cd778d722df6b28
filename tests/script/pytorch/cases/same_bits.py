"""Trainings whose weights are the same bits on all ranks of a world."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

import hvd_train.torch as ht
from tests.script.pytorch.cases.batches import in_parts
from tests.script.pytorch.cases.models import WIDE, cnn, fit, loader, mlp, sgd
from tests.script.pytorch.cases.same import SAME
from tests.script.pytorch.cases.trainings import norm_kept


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


def several_critic_steps():
    """As WGANs are trained, and distributed apart: the generator's last forward passes have no backward of its own."""
    generator = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64)).double()
    critic = nn.Sequential(nn.Linear(64, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)).double()
    (generator, g), (critic, d) = (
        ht.distribute(m, torch.optim.RMSprop(m.parameters(), 0.01)) for m in (generator, critic)
    )
    for k, (x, _) in enumerate(loader()):
        d.zero_grad()
        (critic(generator(x[:, 0, 0, :4]).detach()).mean() - critic(x.flatten(1)).mean()).backward()
        d.step()
        if k % 5 == 0:
            g.zero_grad()
            (-critic(generator(x[:, 0, 0, :4])).mean()).backward()
            g.step()
    assert k % 5, "a critic's step comes last"
    return nn.ModuleList([generator, critic])


def norm_local():
    model = cnn(norm=True)
    return fit(*ht.distribute(model, sgd(model)))


class Centre(nn.Module):
    """Subtracts a running mean: in a new tensor each time, made by the first batch, or changed through ``data``."""

    def __init__(self, how, mean=None):
        super().__init__()
        self.how = how
        if how != "late":
            self.register_buffer("mean", mean)

    def forward(self, x):
        if self.how == "late" and not hasattr(self, "mean"):
            self.register_buffer("mean", x.detach().mean(0))
        if self.how == "new":
            self.mean = 0.7 * self.mean + 0.3 * x.detach().mean(0)
        else:
            self.mean.data.mul_(0.7).add_(x.detach().mean(0), alpha=0.3)
        return x - self.mean


def buffers_of_all_kinds():
    """Two layers that begin with one tensor, a late one, and one that is changed after the last step."""
    zeros = torch.zeros(64, dtype=torch.float64)
    layers = [nn.Flatten(), Centre("new", zeros), Centre("new", zeros), Centre("late"), Centre("data", zeros.clone())]
    model = nn.Sequential(*layers, nn.Linear(64, 10).double())
    model.register_buffer("book", torch.zeros(4, dtype=torch.float64))
    optimizer = sgd(model)
    ht.distribute(model, optimizer)
    for x, y in loader():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        model.book.mul_(0.7).add_(x.flatten(1).mean(0)[:4], alpha=0.3)
    return model


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


def pruned():
    """Masks that are drawn on each rank, in buffers that come to the model while it trains."""
    model, optimizer = ht.distribute(model := mlp(), sgd(model))
    for _ in range(2):
        prune.random_unstructured(model[1], "weight", amount=0.3)
        fit(model, optimizer)
    return model


def late_statistics():
    """A layer with a running mean that comes to the model after ht.distribute."""
    model, optimizer = ht.distribute(model := mlp(), sgd(model))
    model.insert(0, nn.BatchNorm2d(1, affine=False).double())
    return fit(model, optimizer)


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
SAME_BITS = {
    **SAME,
    "norm local": norm_local,
    "norm kept": norm_kept(True),
    "gan at once": gan_at_once,
    "several critic steps": several_critic_steps,
    "norm wide": norm_wide,
    "norm reset": norm_reset,
    "buffers": buffers,
    "buffers of all kinds": buffers_of_all_kinds,
    "pruned": pruned,
    "late statistics": late_statistics,
    "in stages": in_stages(),
    "in stages overlap": in_stages(overlap=True),
    "not compressed": compressed("none"),
    "fp16": compressed("fp16"),
    "bf16": compressed("bf16"),
    "int8": compressed("int8"),
    "int4": compressed("int4"),
    "topk": compressed("topk", ratio=0.1),
    "powersgd": compressed("powersgd", rank=2),
    "parts topk": in_parts(compression="topk", ratio=0.1),
}
