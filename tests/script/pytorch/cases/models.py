"""Models, data and loops that cases share."""

from __future__ import annotations

import contextlib
import hashlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hvd_train.torch as ht
from hvd_train.data.formats import read_digits

GLOBAL_BATCH = 60
IMAGES, LABELS = read_digits()


def digits(count: int = 1200, dtype: torch.dtype = torch.float64) -> TensorDataset:
    images = torch.tensor(IMAGES[:count] / 16, dtype=dtype).unsqueeze(1)
    return TensorDataset(images, torch.tensor(LABELS[:count]))


def loader(count: int = 1200, **options) -> DataLoader:
    settings = {"batch_size": GLOBAL_BATCH // ht.size(), "shuffle": True, **options}
    return ht.shard(DataLoader(digits(count), **settings))


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


def digest(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.state_dict().values())).hexdigest()
