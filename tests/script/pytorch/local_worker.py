"""One rank of local training in scripts: ``python -m tests.script.pytorch.local_worker FOLDER``.

Writes FOLDER/facts.SIZE.RANK.json.
"""

from __future__ import annotations

import copy
import faulthandler
import io
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import hvd_train.torch as ht
from hvd_train.errors import TrainError
from tests.limits import SECONDS
from tests.script.outer_formula import LR, OUTER, ROUND, STEPS, STREAMED, STREAMING, first


class Quadratic(torch.nn.Module):
    def __init__(self, entries: int = 5):
        super().__init__()
        self.rank = ht.rank()
        self.w = torch.nn.Parameter(torch.from_numpy(first(entries) + self.rank))  # rank 0's counts

    def forward(self, step):
        return (self.w - self.target(step)).square().sum() / 2

    def target(self, step):
        return (self.rank + 1) * torch.sin(torch.arange(len(self.w), dtype=torch.float64) + step)


def steps(model, optimizer, count: int, first: int = 1) -> None:
    for step in range(first, first + count):
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()


def one_pass(model, optimizer, loader) -> None:
    for step, _ in enumerate(loader, 1):
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()


def begun(entries: int = 5, **options):
    model = Quadratic(entries)
    return ht.distribute(model, torch.optim.SGD(model.parameters(), lr=LR), **OUTER | options)


def quadratic(folder: Path) -> dict[str, Any]:
    model, optimizer = begun()
    steps(model, optimizer, STEPS)
    facts = {"local": model.w.tolist()}
    with ht.global_weights(model):
        facts["within"] = model.w.tolist()
        pickled = io.BytesIO()
        torch.save(model, pickled)
        with ht.global_weights(model):
            facts["nested"] = model.w.tolist()
    facts["after"], facts["state_dict"] = model.w.tolist(), model.state_dict()["w"].tolist()
    facts["pickled"] = torch.load(io.BytesIO(pickled.getvalue()), weights_only=False).state_dict()["w"].tolist()
    facts["copy"] = copy.deepcopy(model).state_dict()["w"].tolist()
    (velocity,) = optimizer.state_dict()["outer"].values()
    facts["velocity"] = velocity.tolist()
    ht.save(folder / f"state{ht.size()}.safetensors", model=model, optimizer=optimizer)
    ht.barrier()
    other, its_optimizer = begun()
    for path in sorted(folder.glob("state*.safetensors")):  # also of other numbers of ranks
        steps(other, its_optimizer, 1)  # a load in the middle of a round
        ht.load(path, model=other, optimizer=its_optimizer)
        steps(other, its_optimizer, ROUND)
        facts[f"gone on from {path.stem}"] = other.w.tolist()
    return facts


class Around(torch.optim.SGD):
    """A wrapper, whose step is one of the optimizer within it."""

    inner: torch.optim.Optimizer

    def step(self, closure=None):
        self.inner.step()


def others() -> list[str]:
    """What is said of steps of another optimizer of the model, and of a wrapper: the first let the ranks go apart."""
    told = []
    for kind in (torch.optim.Adam, Around):
        model = Quadratic()
        ht.distribute(model, optimizer := torch.optim.SGD(model.parameters(), lr=LR), **OUTER)
        other = kind(model.parameters(), lr=LR)
        other.inner = optimizer
        try:
            steps(model, other, 1)
            told.append("")
        except TrainError as error:
            told.append(str(error))
    return told


class Added(Quadratic):
    """A quadratic of the sum of two tensors."""

    def __init__(self):
        super().__init__()
        self.z = torch.nn.Parameter(torch.zeros_like(self.w))

    def forward(self, step):
        return (self.w + self.z - self.target(step)).square().sum() / 2


def streamed(folder: Path) -> dict[str, Any]:
    model = Added()
    ht.distribute(model, optimizer := torch.optim.SGD(model.parameters(), lr=LR), **STREAMING)
    steps(model, optimizer, STREAMED - 1)
    facts = {"streamed": [model.w.tolist(), model.z.tolist()]}
    state = optimizer.state_dict()["outer"]  # this waits for what is under way, and leaves it so
    steps(model, optimizer, 1, first=STREAMED)
    facts["arrived"] = [model.w.tolist(), model.z.tolist()]
    with ht.global_weights(model):
        facts["streamed within"] = [model.w.tolist(), model.z.tolist()]
    facts["streamed names"] = sorted(state)

    def job(load: bool) -> list[list[float]]:
        model = Added()
        optimizer = torch.optim.Adam(model.parameters(), lr=LR)
        parts = {"model": model, "optimizer": optimizer}
        ht.distribute(model, optimizer, **STREAMING)
        numbers = ht.shard(DataLoader(TensorDataset(torch.arange(5 * ht.size())), 1))

        if load:
            steps(model, optimizer, 2)  # something is under way
            ht.load(folder / "streamed.safetensors", **parts)
        else:
            one_pass(model, optimizer, numbers)
            ht.save(folder / "streamed.safetensors", **parts)
        one_pass(model, optimizer, numbers)
        return [model.w.tolist(), model.z.tolist()]

    whole = job(load=False)
    ht.barrier()
    facts["streamed again"] = [whole, job(load=True)]

    model = Added()
    ht.distribute(model, optimizer := torch.optim.SGD(model.parameters(), lr=LR), **STREAMING)
    numbers = ht.shard(DataLoader(TensorDataset(torch.arange(5 * ht.size())), 1))
    for _ in range(2):
        one_pass(model, optimizer, numbers)
    facts["streamed passes"] = [model.w.tolist(), model.z.tolist()]
    return facts


def resumed(folder: Path) -> dict[str, Any]:
    """A training that goes on from a file, read before or after ``ht.distribute``, and the same one in one go."""

    def job(load: str) -> list[float]:
        model = Quadratic()
        optimizer = torch.optim.Adam(model.parameters(), lr=LR)
        parts = {"model": model, "optimizer": optimizer}
        if load == "before":
            ht.load(folder / "adam.safetensors", **parts)
        ht.distribute(model, optimizer, **OUTER)
        if load == "after":
            steps(model, optimizer, 1)
            ht.load(folder / "adam.safetensors", **parts)
        steps(model, optimizer, ROUND)
        if not load:
            ht.save(folder / "adam.safetensors", **parts)
            steps(model, optimizer, ROUND)
        return model.w.tolist()

    whole = job("")
    ht.barrier()
    return {"same bits": [job(load) == whole for load in ("after", "before")]}


def plain(folder: Path) -> dict[str, Any]:
    """Files of optimizers without local training, read before or after ``ht.distribute``, and one with it."""

    def warnings_of(file: str, before: bool) -> list[Any]:
        model = Quadratic()
        optimizer = torch.optim.Adam(model.parameters(), lr=LR)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            if before:
                ht.load(folder / file, optimizer=optimizer)
            ht.distribute(model, optimizer, **OUTER)
            if not before:
                steps(model, optimizer, ROUND)
                for _ in range(2):
                    ht.load(folder / file, optimizer=optimizer)
        told = [str(w.message) for w in seen if "outer momentum" in str(w.message)]
        return [*told, sum(x.abs().sum().item() for x in optimizer.state_dict()["outer"].values()) > 0]

    ht.save(folder / "plain.safetensors", optimizer=torch.optim.Adam(Quadratic().parameters(), lr=LR))
    ht.barrier()
    found = {
        file: [warnings_of(f"{file}.safetensors", before) for before in (True, False)] for file in ("plain", "adam")
    }
    return {"told of files": found}


def scripts() -> dict[str, Any]:
    """Loops of several kinds, all with the same gradients."""
    facts = {}
    model, optimizer = begun()
    for step in range(1, STEPS + 1):  # parts of a batch, of which the step takes the sum
        optimizer.zero_grad()
        with ht.no_sync(model):
            (model(step) / 2).backward()
        (model(step) / 2).backward()
        optimizer.step()
    facts["parts"] = model.w.tolist()

    model, optimizer = begun()
    for step in range(1, STEPS + 1):

        def closure(step=step):
            optimizer.zero_grad()
            loss = model(step)
            loss.backward()
            return loss

        optimizer.step(closure)
    facts["closure"] = model.w.tolist()

    model = Quadratic()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    compiled, optimizer = ht.distribute(torch.compile(model, backend="eager"), optimizer, **OUTER)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        compiled(torch.tensor(step)).backward()
        optimizer.step()
    facts["compiled"] = model.w.tolist()
    facts["compiled state_dict"] = compiled.state_dict()["_orig_mod.w"].tolist()

    # Two passes of four steps a rank: a join after the third, and at the end of each.
    model, optimizer = begun()
    numbers = ht.shard(DataLoader(TensorDataset(torch.arange(4 * ht.size())), 1))
    for _ in range(2):
        one_pass(model, optimizer, numbers)
    facts["passes"] = model.w.tolist()
    return facts


def statistics() -> dict[str, Any]:
    """A join after two steps, and a third step behind it."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(1, momentum=1.0), torch.nn.Linear(1, 1))
    model, optimizer = ht.distribute(model, torch.optim.SGD(model.parameters(), lr=LR), **OUTER | {"outer_steps": 2})
    for step in range(3):
        optimizer.zero_grad()
        model(torch.arange(4.0).view(4, 1) + 10 * ht.rank() + step).sum().backward()
        optimizer.step()
    layer = model[0]
    means = [layer.running_mean.item()]
    with ht.global_weights(model):
        means.append(layer.running_mean.item())
    return {
        "mean": [*means, layer.running_mean.item()],
        # Means of this rank's third batch; of the second ones of all ranks.
        "expected mean": [3.5 + 10 * ht.rank(), 2.5 + 5 * (ht.size() - 1), 3.5 + 10 * ht.rank()],
        "statistics within": means[1],
    }


def half_loaded() -> dict[str, Any]:
    """A part of the weights is loaded in the middle of a round: the others are the global ones then."""
    model = torch.nn.Linear(2, 2)
    model, optimizer = ht.distribute(model, torch.optim.SGD(model.parameters(), lr=LR), **OUTER)
    bias = model.bias.detach().clone()
    model(torch.ones(1, 2) * (1 + ht.rank())).sum().backward()
    optimizer.step()
    assert not torch.equal(model.bias, bias)
    model.load_state_dict({"weight": torch.full((2, 2), 7.0)}, strict=False)
    return {"half loaded": bool(torch.equal(model.bias, bias) and (model.weight == 7).all())}


def refused() -> dict[str, str]:
    def message(**options) -> str:
        model = torch.nn.Linear(1, 1)
        optimizers = [torch.optim.SGD([p], lr=LR) for p in model.parameters()]
        one = torch.optim.SGD(model.parameters(), lr=LR)
        return caught(lambda: ht.distribute(model, *(optimizers if options.pop("two", 0) else [one]), **options))

    def caught(work) -> str:
        try:
            work()
        except TrainError as error:
            return str(error)
        return "nothing"

    def within(work) -> None:
        model, optimizer = begun()
        steps(model, optimizer, 1)
        with ht.global_weights(model):
            work(model, optimizer)

    def pickled() -> None:
        model, optimizer = begun()
        steps(model, optimizer, 1)
        torch.save(model, io.BytesIO())

    def unfrozen() -> None:
        model = torch.nn.Linear(2, 3)
        model.bias.requires_grad_(False)
        model, optimizer = ht.distribute(model, torch.optim.SGD(model.parameters(), lr=LR), **OUTER)
        model.bias.requires_grad_(True)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    def alone(change) -> None:
        """Rank 0 does something else than the others."""
        model, optimizer = begun()
        if not ht.rank():
            change(model, optimizer)
        steps(model, optimizer, 2 * ROUND)

    def reloads(model, optimizer) -> None:
        steps(model, optimizer, 1)
        model.load_state_dict(model.state_dict())

    messages = {
        "fragments": message(mode="streaming", fragments=3),
        "compressed streaming": message(mode="streaming", fragments=2, compression="topk"),
        "delayed": message(mode="delayed"),
        "unknown": message(mode="outr"),
        "option": message(mode="outer", outer_start=3),
        "foreign": message(outer_steps=3),
        "two optimizers": message(mode="outer", two=1),
        "sharded": message(mode="outer", sharded=True),
        "sync_batchnorm": message(mode="outer", sync_batchnorm=True),
        "average": message(mode="outer", average=False),
        "step within": caught(lambda: within(lambda model, optimizer: steps(model, optimizer, 1))),
        "load within": caught(lambda: within(lambda model, _: model.load_state_dict(model.state_dict()))),
        "pickled": caught(pickled),
        "unfrozen": caught(unfrozen),
    }
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        caught(pickled)
        model, optimizer = begun()
        steps(model, optimizer, 1)
        model.state_dict()
    messages["never synchronized"] = "; ".join(str(w.message) for w in seen if "synchroniz" in str(w.message))
    if ht.size() > 1:
        messages["rate"] = caught(lambda: alone(lambda _, optimizer: optimizer.param_groups[0].update(lr=0.2)))
        messages["reloaded"] = caught(lambda: alone(reloads))
    return messages


def main(folder: Path) -> None:
    facts: dict[str, Any] = {}
    for case in (
        lambda: quadratic(folder),
        lambda: streamed(folder),
        lambda: resumed(folder),
        lambda: plain(folder),
        scripts,
        statistics,
        half_loaded,
        lambda: {"refused": refused()},
        lambda: {"others": others()},
    ):
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        facts |= case()
    (folder / f"facts.{ht.size()}.{ht.rank()}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
