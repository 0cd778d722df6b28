"""Trainings in which frozen parameters are trained later."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

import hvd_train.torch as ht
from tests.script.pytorch.cases.models import WIDE, loader, mlp, sgd


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
