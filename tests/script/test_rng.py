"""Random numbers of ranks and workers over a sharded loader."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import data

import hvd_train.torch as ht
from hvd_train.script.shared.dataloader import passes, shares


def test_an_epoch_ends_with_draws_of_its_own():
    """At the end of a pass with steps: other draws than before, the same after a resume there, others on each rank."""

    def drawn():
        return [torch.rand(()).item(), np.random.rand(), random.random()]

    model = nn.Linear(1, 1)
    model, optimizer = ht.distribute(model, torch.optim.SGD(model.parameters()))
    draws = []
    with torch.random.fork_rng():
        for rank in (0, 1):
            torch.manual_seed(1)
            loader = passes.shared(data.DataLoader(range(8), batch_size=2, shuffle=True), 3, rank, 2)
            for _ in range(2):
                for _ in loader:
                    drawn()
                    optimizer.step()
                saved = loader.share.state_dict()
                draws.append(drawn())
                loader.share.load_state_dict(saved)
                assert draws[-1] == drawn()
    values = [value for row in draws for value in row]
    assert len(set(values)) == len(values) == 12


class Drawn(data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()], dtype=torch.float64)


def test_workers_draw_by_rank_and_repeat():
    """Persistent workers, too."""

    def drawn(rank):
        user_loader = data.DataLoader(Drawn(), batch_size=2, num_workers=1, persistent_workers=True)
        loader = passes.shared(user_loader, 3, rank, 2)
        return torch.cat([next(iter(loader)), *loader]).flatten().tolist()

    first, second = drawn(0), drawn(1)
    assert not set(first) & set(second)
    assert drawn(0) == first


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_draw_as_in_a_resumed_run(persistent):
    """Those that persist have drawn before, those of a resumed run have not."""

    def made():
        user_loader = data.DataLoader(Drawn(), batch_size=2, num_workers=2, persistent_workers=persistent)
        return passes.shared(user_loader, 3, 1, 2)

    def drawn(loader):
        return torch.cat(list(loader)).flatten().tolist()

    with torch.random.fork_rng():
        loader, resumed = made(), made()
        first, again = drawn(loader), drawn(loader)
        shares.stepped()
        resumed.share.load_state_dict(loader.share.state_dict())
        second = drawn(loader)
        assert first == again and not set(first) & set(second) and len(set(second)) == len(second)
        assert drawn(resumed) == second


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_pass_draws_as_in_a_resumed_run(shuffle, early):
    """Whatever a validation or anything else drew before the save, or after it."""

    def made():
        return passes.shared(data.DataLoader(Drawn(), batch_size=2, shuffle=shuffle), 3, 1, 2)

    def drawn(loader):
        draws = []
        for k, batch in enumerate(loader):
            draws.append([batch.tolist(), Drawn()[0].tolist()])
            optimizer.step()
            if early and k == 1:
                break
        return draws

    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Linear(1, 1)
        model, optimizer = ht.distribute(model, torch.optim.SGD(model.parameters()))
        loader, resumed = made(), made()
        first = drawn(loader)
        Drawn()[0]
        saved = loader.share.state_dict()
        Drawn()[0]
        second = drawn(loader)
        torch.manual_seed(2)
        resumed.share.load_state_dict(saved)
        assert drawn(resumed) == second != first
        torch.manual_seed(5)  # by the script
        before = torch.rand(()).item()
        torch.manual_seed(5)
        iter(loader)
        assert torch.rand(()).item() == before
