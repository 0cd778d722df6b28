"""Mistakes in scripts, which end in one line on all ranks."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hvd_train.torch as ht
from hvd_train.errors import TrainError
from hvd_train.script.shared import weight_check
from tests.script.pytorch.cases.batches import PART, in_parts, streamed
from tests.script.pytorch.cases.drawing import Words, walked
from tests.script.pytorch.cases.gradients import Faulty
from tests.script.pytorch.cases.models import GLOBAL_BATCH, cnn, digits, loader, mlp, sgd


def errors(folder: Path):
    """name -> the one line, which every rank must raise alike."""

    def message_of(work):
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

    def converted():
        model = mlp().float()
        ht.distribute(model)
        model.double()(torch.ones(3, 64, dtype=torch.float64)).sum().backward()

    def counted():
        ht.distribute(nn.Sequential(nn.Embedding(10, 4, scale_grad_by_freq=True)))

    def shortened():
        ht.distribute(nn.Sequential(nn.EmbeddingBag(10, 4, max_norm=1.0)))

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
                loader_of_rank = batches()
                for epoch in range(2):
                    for step, (x, y) in enumerate(loader_of_rank):
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

    def moved(where, data=False):
        """Weights that the script moves itself, by gradients of this rank that no optimizer has seen."""

        def case():
            weight_check._followed.clear()
            weight_check._sums = 0
            model = ht.distribute(mlp())
            try:
                for x, y in loader(240) if where == "pass" else [digits(8 + ht.rank())[:]]:
                    gradients = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
                    with torch.no_grad():
                        for p, g in zip(model.parameters(), gradients, strict=True):
                            (p.data if data else p).sub_(0.1 * g)
                ht.sum(1)
            finally:
                weight_check._followed.clear()

        return case

    def in_hook():
        """Gradients of this rank that a hook of the step sets, after those of all ranks were averaged."""
        weight_check._followed.clear()
        weight_check._sums = 0
        model = mlp()
        model, optimizer = ht.distribute(model, sgd(model))
        x, y = digits(8 + ht.rank())[:]

        def set_gradients(*_):
            gradients = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
            for p, g in zip(model.parameters(), gradients, strict=True):
                p.grad = g

        optimizer.register_step_pre_hook(set_gradients)
        try:
            optimizer.step()
            ht.sum(1)
        finally:
            weight_check._followed.clear()

    def graph():
        model, optimizer = ht.distribute(model := mlp(), sgd(model))
        model(digits(8)[:][0]).pow(2).sum().backward(create_graph=True)

    def replaced():
        model = ht.distribute(mlp())
        model[4] = nn.Linear(32, 7).double()
        optimizer = sgd(model[4])
        model(digits(8)[:][0]).sum().backward()
        optimizer.step()

    def taken():
        model = nn.Linear(3, 1)
        model.weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
        ht.distribute(model)(torch.ones(1, 3)).sum().backward()

    def within():
        model = ht.distribute(nn.Linear(1024, 1024, bias=False), overlap=True)
        optimizer = sgd(model)
        model.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        model(torch.ones(1, 1024)).sum().backward()

    def unequal_closure():
        """Its loss is over a whole pass, the last batch of which is uneven."""
        model = mlp()
        model, optimizer = ht.distribute(model, torch.optim.LBFGS(model.parameters()))
        batches = ht.shard(torch.utils.data.DataLoader(digits(235), 30))

        def closure():
            optimizer.zero_grad()
            total = 0.0
            for x, y in batches:
                loss = F.cross_entropy(model(x), y) / len(batches)
                loss.backward()
                total += float(loss.detach())
            return total

        optimizer.step(closure)

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
        name: message_of(work)
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
            "converted": converted,
            "counted": counted,
            "shortened": shortened,
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
            "moved in a pass": moved("pass"),
            "moved before a sum": moved("sum", data=True),
            "in a hook": in_hook,
            "unequal closure": unequal_closure,
            "graph": graph,
            "twice summed": twice_summed,
            "summed clipped": summed_clipped,
            "summed again": summed_again,
            "replaced": replaced,
            "within": within,
            "taken": taken,
            "alone failed": alone_failed,
            "mode": lambda: ht.distribute(mlp(), mode="local_sgd", local_steps=4),
            "damaged": damaged,
            "unfit": unfit,
            "missing": lambda: ht.load(folder / "none.ckpt"),
        }.items()
    }
