"""What a script is warned of, and what rank 0 alone prints."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import time
import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import hvd_train.torch as ht
from hvd_train.core import control_sync
from hvd_train.script.pytorch import registry, step_hooks
from hvd_train.script.shared.dataloader import passes
from tests.script.pytorch.cases.batches import in_parts
from tests.script.pytorch.cases.models import digits, fit, loader, mlp, sgd


def forgotten():
    """What is told where only one of two models is distributed, and where a copy of it trains on."""
    model, optimizer = ht.distribute(model := mlp(), sgd(model))
    messages = []
    for other in (model, mlp(), copy.deepcopy(model)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(other, optimizer if other is model else torch.optim.Adagrad(other.parameters()))
        messages.append([str(x.message) for x in caught if "ht.distribute" in str(x.message)])
        step_hooks.warn_of_local_optimizer.cache_clear()
    return messages


def same_work():
    """What is told where ranks take the same batches, and where they do not."""
    messages = []
    for batches in (DataLoader(digits(240), 60), loader(240)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = mlp()
            fit(*ht.distribute(model, sgd(model)), batches=batches)
        messages.append([str(x.message) for x in caught if "same gradients" in str(x.message)])
    return messages


def plain_tensors():
    """Attributes that are no buffers: drawn on each rank apart, the same, made anew in each forward."""
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(2, 2)), nn.utils.spectral_norm(nn.Linear(2, 2)))
    model[1].table, model.scale = torch.full((3,), 1.0 + ht.rank()), torch.ones(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ht.distribute(model)
    return [str(x.message) for x in caught if "register_buffer" in str(x.message)]


def late_buffers():
    """Buffers that come after ht.distribute: filled by each rank, and the same on all."""
    model, optimizer = ht.distribute(model := mlp(), sgd(model))
    model.register_buffer("drawn", torch.rand(2))
    model.register_buffer("equal", torch.ones(2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(model, optimizer)
    return [str(x.message) for x in caught if "buffers that were registered" in str(x.message)]


def slow():
    """What rank 0 tells where rank 1 takes 20 ms longer than the others, from step 20 on."""
    registry.slow_rank_report.cache_clear()
    usual, control_sync.MOST_SECONDS = control_sync.MOST_SECONDS, 0.04
    model, optimizer = ht.distribute(model := mlp(), sgd(model))
    with contextlib.redirect_stderr(printed := io.StringIO()):
        for step in range(80):
            time.sleep(0.02 if ht.rank() == 1 and step >= 20 else 0)
            fit(model, optimizer, batches=[digits(8)[:]])
    control_sync.MOST_SECONDS = usual
    return printed.getvalue()


def divided():
    """What is said of sums before backward(): of a loss that is averaged, of one that is added up, and after it."""
    messages = []
    for average, early in ((True, True), (False, True), (True, False)):
        model, optimizer = ht.distribute(model := mlp(), sgd(model), average=average)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for x, y in loader(235):
                optimizer.zero_grad()
                count = ht.sum(len(y)) if early else len(y)
                (F.cross_entropy(model(x), y, reduction="sum") / count).backward()
                ht.sum(len(y))
                optimizer.step()
        messages.append([str(w.message) for w in caught if "before backward()" in str(w.message)])
        passes.warn_of_divided_loss.cache_clear()
    return messages


def alone():
    """What is said of a validation: not joined, joined, read for a look, read whole by each rank; and at the end."""

    def score(batches):
        with torch.no_grad():
            return sum(F.cross_entropy(model(x), y, reduction="sum").item() for x, y in batches)

    model, optimizer = ht.distribute(model := mlp(), sgd(model))
    checks, messages = ht.shard(DataLoader(digits(101), batch_size=7)), []
    loops = [
        lambda: score(checks),
        lambda: ht.sum(score(checks)),
        lambda: score(itertools.islice(checks, 2)),
        lambda: score(DataLoader(digits(101), batch_size=7)),
    ]
    for loop in loops:
        registry.unshared_sums()._main = ht.rank() == 0
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(model, optimizer, batches=loader(240))
            loop()
            fit(model, optimizer, batches=loader(240))
        messages.append([str(one.message) for one in caught if "ht.sum" in str(one.message)])
    score(checks)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        registry.unshared_sums()._main = ht.rank() == 0
        registry.unshared_sums().begins()
        registry.unshared_sums().begins()
    return [*messages, [str(one.message) for one in caught]]


def uneven_parts():
    """What is said of parts that travel by themselves, where a run of them has said nothing so far."""
    registry.part_sync()._warned = False
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        in_parts()()
        in_parts()()
    return [str(one.message) for one in caught if "shares of a batch" in str(one.message)]


def main_rank():
    """What is printed, the end of the bar, and the batches that a loop within a bar gets."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        ht.print(ht.size(), "ranks,", "all", flush=True)
    bar = ht.tqdm(ht.shard(DataLoader(digits(20 * ht.size()), batch_size=2)), file=(shown := io.StringIO()))
    batches = len(list(bar))
    bar.set_postfix(loss=0.5)
    assert ht.is_main() == (ht.rank() == 0)
    return [printed.getvalue(), shown.getvalue(), batches]
