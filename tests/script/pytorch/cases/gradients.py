"""Trainings whose gradients a script sets, sums, keeps or loses itself."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import hvd_train.torch as ht
from tests.script.pytorch.cases.models import fit, loader, mlp, sgd


def by_hand():
    model = mlp()
    model, optimizer = ht.distribute(model, sgd(model))
    for x, y in loader():
        gradients = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
        for p, g in zip(model.parameters(), gradients, strict=True):
            p.grad = g
        optimizer.step()
    return model


def by_hand_in_closure():
    model = mlp()
    model, optimizer = ht.distribute(model, sgd(model))
    for x, y in loader():
        optimizer.zero_grad()

        def closure(x=x, y=y):
            loss = F.cross_entropy(model(x), y)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            for p, g in zip(model.parameters(), gradients, strict=True):
                p.grad = g
            return loss

        optimizer.step(closure)
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


def by_hand_and_left():
    """Those of the first layer are set in every second step, and used twice: a sum is not summed again."""
    model = mlp()
    model, optimizer = ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.001), average=False)
    for step, (x, y) in enumerate(loader()):
        loss = F.cross_entropy(model(x), y, reduction="sum")
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for k, (p, g) in enumerate(zip(model.parameters(), gradients, strict=True)):
            if k > 1 or step % 2 == 0:
                p.grad = g
        optimizer.step()
    return model


def by_hand_on_some_ranks():
    """A rank without labels sets none, which counts as zero; another one waited for it for ever."""
    model = mlp()
    model, optimizer = ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.001), average=False)
    for step, (x, y) in enumerate(loader()):
        optimizer.zero_grad()
        labelled = (y == step % 10) & (x.sum((1, 2, 3)) > 22)  # of 60 few, or none
        if labelled.any():
            loss = F.cross_entropy(model(x[labelled]), y[labelled], reduction="sum")
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
            gradients = torch.autograd.grad(loss, parameters)
        else:
            loss.backward()
            gradients = [p.grad.clamp(-0.01, 0.01) for p in parameters]
        for p, g in zip(parameters, gradients, strict=True):
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
            losses = []
            for weight in (1.0, -0.5, 0.25):
                optimizer.zero_grad()
                (weight * F.cross_entropy(model(x * weight), y)).backward()
                losses.append([p.grad.view(-1) if view else p.grad for p in model.parameters()])
            for p, *gradients in zip(model.parameters(), *losses, strict=True):
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
