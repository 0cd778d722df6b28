"""The reducer of gradients and its parts, in one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import hvd_train.torch as ht
from hvd_train.compression import make
from hvd_train.compression.uncompressed import Uncompressed
from hvd_train.errors import ConfigError
from hvd_train.frontends.serial import Serial
from hvd_train.script.pytorch.bit_sum import bits
from hvd_train.script.pytorch.reducer import Reducer
from hvd_train.script.pytorch.residuals import Residuals
from hvd_train.script.pytorch.sums import as_array, like_input
from tests.script.loaders import SEVEN_TO_SIX, uneven
from tests.script.pytorch.cases.gradients import Faulty


class Listed(nn.Module):
    """Layers that PyTorch does not see, and one that it does."""

    def __init__(self, head: bool) -> None:
        super().__init__()
        self.layers, self.named = [nn.Linear(4, 2)], {"a": [nn.Linear(2, 2)]}
        self.shown = [nn.Linear(2, 1)] if head else []
        self.head, self.teacher = self.shown[0] if head else None, [nn.Linear(4, 2).requires_grad_(False)]


def test_layers_in_a_python_list_are_named():
    """The advice was to set requires_grad, or to make the optimizer of the model's parameters()."""
    what = "the layers in layers, named are not part of the model: a Python list or dict hides them"
    with pytest.raises(ConfigError, match=rf"^{what}; ht.distribute; make the list a torch.nn.ModuleList"):
        ht.distribute(Listed(head=False))
    model = Listed(head=True)
    with pytest.raises(ConfigError, match="^the layers in layers are not part of the model: .*ModuleList"):
        ht.distribute(model, torch.optim.SGD([*model.parameters(), *model.layers[0].parameters()], 0.1))
    with pytest.warns(UserWarning, match=rf"^{what}, and nobody trains them; ht.distribute; "):
        ht.distribute(model, torch.optim.SGD(model.parameters(), 0.1))


class Twins(Serial):
    """Two ranks that do the same: a sum is twice its part."""

    size = 2

    def allreduce_async(self, x, name, op="sum"):
        return x.mul_(2)


def test_a_mean_stays_itself():
    """Reduced gradients are averaged again by a second pass, and only the increment counts."""
    model = nn.Linear(3, 2).double()
    Reducer(dict(model.named_parameters()), [], Twins(), Uncompressed())
    x = torch.ones(1, 3, dtype=torch.float64)
    for k in (1, 2, 3):
        model(x).sum().backward(retain_graph=True)
        assert (model.weight.grad == k).all() and (model.bias.grad == k).all()
    flat = model.weight.grad.untyped_storage().data_ptr()
    model.zero_grad(set_to_none=False)
    model(x).sum().backward()
    assert (model.weight.grad == 1).all() and model.weight.grad.untyped_storage().data_ptr() == flat


def test_a_sum_stays_itself():
    """Also one that was clipped before a pass that does not reach it."""
    model, x = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)]), torch.ones(1, 3)
    Reducer(dict(model.named_parameters()), [], Twins(), Uncompressed(), average=False)
    model[0](x).sum().backward()
    model[0].bias.grad.mul_(0.5)
    model[1](x).sum().backward()
    assert (model[0].bias.grad == 1).all() and (model[0].weight.grad == 2).all() and (model[1].bias.grad == 2).all()
    model.zero_grad(set_to_none=False)
    model[0](x).sum().backward()
    assert (model[0].bias.grad == 2).all() and (model[1].bias.grad == 0).all()


@pytest.mark.parametrize("to_none", [True, False])
def test_a_sum_that_was_touched_is_not_added_to(to_none):
    model, x = nn.Linear(3, 2), torch.ones(1, 3)
    reducer = Reducer(dict(model.named_parameters()), [], Twins(), Uncompressed(), average=False)
    for _ in range(3):
        for reducing in (False, True):  # the first only accumulates
            reducer.reducing = reducing
            model(x).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        assert torch.allclose(model.bias.grad, torch.tensor(4.0))
        model.zero_grad(to_none)
    model(x).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    reducer.reducing = False
    model(x).sum().backward()
    reducer.reducing = True
    with pytest.raises(ConfigError, match="count the first one's sum once more"):
        model(x).sum().backward()


def test_a_sum_set_by_hand_is_not_summed_again_by_a_step_within_the_step():
    """An optimizer that adds weight decay to gradients and calls super().step() summed them twice: N times too much."""
    model = nn.Linear(2, 1, bias=False)
    reducer = Reducer(dict(model.named_parameters()), [], Twins(), Uncompressed(), average=False)
    parameters = list(model.parameters())
    for _ in range(2):
        model.weight.grad = torch.tensor([[0.25, 0.5]])
        reducer.reduce_manual(parameters)
        model.weight.grad += 1
        reducer.reduce_manual(parameters)
        assert model.weight.grad.tolist() == [[1.5, 2.0]]
        reducer.used(torch.optim.SGD(parameters, 1.0), parameters)
    reducer.reduce_manual(parameters)  # left as it is for another step
    assert model.weight.grad.tolist() == [[1.5, 2.0]]
    model.weight.grad = torch.tensor([[0.25, 0.5]])
    reducer.reduce_manual(parameters)
    model.weight.grad = model.weight.grad + 1
    with pytest.raises(ConfigError, match="replaced after the step had summed it"):
        reducer.reduce_manual(parameters)


def test_gradients_of_this_rank_alone_are_marked():
    model = nn.Linear(3, 2)
    reducer = Reducer(dict(model.named_parameters()), [], Twins(), Uncompressed())
    reducer.reducing = False
    model(torch.ones(1, 3)).sum().backward()
    assert reducer.unreduced
    reducer.reducing = True
    model(torch.ones(1, 3)).sum().backward()
    assert not reducer.unreduced and (model.bias.grad == 2).all()


def test_a_rank_counts_by_its_samples():
    """Its gradient of the last batch, and its change of a running statistic."""
    model, norm = nn.Linear(1, 1, bias=False).double(), nn.BatchNorm1d(1).double()
    Reducer(dict(model.named_parameters()), [(norm, "running_mean")], Twins(), Uncompressed())
    gradients, changes = [], []
    for x in uneven():
        model.zero_grad()
        before = norm.running_mean.item()
        norm.running_mean += 1.0
        model(torch.ones(len(x), 1, dtype=torch.float64)).mean().backward()
        gradients.append(model.weight.grad.item())
        changes.append(norm.running_mean.item() - before)
    assert gradients == pytest.approx([1.0, 1.0, SEVEN_TO_SIX]) and changes == pytest.approx(gradients)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_each_accumulated_batch_counts_by_its_samples(first):
    """With the uneven batch first, second, and last of three in no_sync."""
    model = nn.Linear(1, 1, bias=False).double()
    reducer = Reducer(dict(model.named_parameters()), [], Twins(), Uncompressed())
    weights, loader, found = [1.0, 1.0, SEVEN_TO_SIX] * 3, uneven(), []
    iterator = (x for _ in range(3) for x in loader)
    reducer.weigh_parts()
    for number, x in enumerate(iterator):
        reducer.reducing = number % 3 == first
        model(torch.full((len(x), 1), 10.0**number, dtype=torch.float64)).mean().backward()
        if reducer.reducing:
            found.append(model.weight.grad.item())
            model.zero_grad()
    ends = [k for k in range(9) if k % 3 == first]
    parts = [range(0 if k < 3 else k - 2, k + 1) for k in ends]
    assert found == pytest.approx([sum(weights[k] * 10.0**k for k in part) for part in parts], rel=1e-12)


@pytest.mark.parametrize("number", [2**63, -(2**70), np.uint64(2**63)])
def test_an_integer_beyond_64_bits_is_refused(number):
    """It became a float without a word."""
    with pytest.raises(ConfigError, match=r"^the integer -?\d+ does not fit into 64 bits; ht.sum; give floats"):
        as_array(number)
    assert as_array(2**63 - 1) == 2**63 - 1 and as_array(float(2**63)) == 2.0**63


@pytest.mark.parametrize("kind", [complex, np.complex64, np.array, lambda z: torch.tensor([z])])
def test_a_complex_number_is_one_too(kind):
    summed = as_array(kind(1 + 2j))
    assert summed == 1 + 2j and like_input(kind(1 + 2j), summed) == 1 + 2j


def test_wrapped_models():
    model = nn.Linear(2, 2)
    compiled = torch.compile(model, backend="eager")
    assert ht.distribute(compiled) is compiled
    with pytest.raises(ConfigError, match="already"):
        ht.distribute(model)
    with pytest.raises(ConfigError, match="wrapped in DataParallel; ht.distribute; pass the model itself"):
        ht.distribute(nn.DataParallel(model))
    with pytest.raises(ConfigError, match="sync_batchnorm=True"):
        ht.distribute(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)))


def test_residuals_of_thrown_away_gradients():
    """Of one bucket of three members, and of two passes before the end of the first is known."""
    old, one, two = ((torch.full((6,), value),) for value in (0.0, 1.0, 2.0))
    kept = Residuals([(0, 1, 2)], [1, 2, 3], [old])
    kept.passed([one])
    kept.commit({0: True, 1: False})
    assert kept.open() == [2] and kept.state[0][0].tolist() == [1, 0, 0, 1, 1, 1]
    kept.passed([two])
    kept.commit({0: False, 1: False, 2: False})
    assert kept.state[0][0].tolist() == [1, 0, 0, 0, 0, 0] and kept.open() == []
    kept.passed([(torch.full((6,), 3.0),)])
    kept.commit({0: True, 1: True, 2: True})
    kept.passed([(torch.full((6,), 4.0),)])
    kept.commit(dict.fromkeys(range(3), False))
    assert kept.state[0][0].tolist() == [3.0] * 6


def test_residuals_follow_the_loss_scale():
    """GradScaler went from 4 to 1, and what was left out so far came with four times its size."""
    ends, x = [], torch.arange(1.0, 4097.0)[None]
    for scales in ([1.0] * 12, [4.0] * 6 + [1.0] * 6):
        model = nn.Linear(4096, 1, bias=False)
        nn.init.zeros_(model.weight)
        reducer = Reducer(dict(model.named_parameters()), [], Twins(), make("topk", 2, 0, ratio=0.125), lossy=True)
        optimizer, scaler = torch.optim.SGD(model.parameters(), 1.0), torch.amp.GradScaler("cpu", init_scale=scales[0])
        for scale in [*scales[1:], scales[-1]]:
            optimizer.zero_grad()
            scaler.scale(model(x).sum()).backward()
            scaler.step(optimizer)
            reducer.used(optimizer, list(model.parameters()))
            scaler.update(scale)
        ends.append(model.weight.detach())
    assert ends[0].any() and torch.equal(*ends)


def test_every_bit_of_a_weight_counts():
    for dtype, size in ((torch.float32, 5), (torch.float64, 3), (torch.float16, 7), (torch.bool, 9)):
        x = torch.arange(size + 1).to(dtype)[1:]  # not where memory is aligned
        for place in range(x.nbytes):
            other = x.clone()
            other.view(torch.uint8)[place] ^= 1
            assert int(bits(other)) != int(bits(x)) == int(bits(x.clone()))


def test_an_error_in_backward_leaves_nothing_behind():
    """Also under overlap, when a part has gone already; the ranks, which failed alike, go on with the next batch."""
    for overlap in (False, True):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 600_000, bias=False))
        Reducer(dict(model.named_parameters()), [], Twins(), Uncompressed(), overlap=overlap)
        hidden = Faulty.apply(model[0](torch.ones(1, 3)))
        with pytest.raises(RuntimeError, match="out of memory"):
            model[1](hidden).sum().backward()
        model.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        assert (model[1].weight.grad == model[0](torch.ones(1, 3))).all()


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_lie_as_their_parameters(to_none):
    """Also in a model that is laid out anew: fused optimizers take both for the same order of memory."""
    models = [nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    Reducer(dict(models[0].named_parameters()), [], Twins(), Uncompressed())
    optimizers = [torch.optim.Adam(model.parameters(), 0.1, fused=True) for model in models]
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            if step == 2:
                model.to(memory_format=torch.channels_last)
                optimizer.state.clear()  # its slots lie as they did
            optimizer.zero_grad(set_to_none=to_none)
            model(torch.arange(192.0).view(1, 3, 8, 8)).sum().backward()
            optimizer.step()
        for p, other in zip(*[model.parameters() for model in models], strict=True):
            assert p.grad.stride() == p.stride() and torch.allclose(p, other), step


def test_gradients_that_are_kept_stay_as_they_are():
    model = nn.Linear(3, 2)
    Reducer(dict(model.named_parameters()), [], Twins(), Uncompressed())
    for keep in (lambda g: g, lambda g: g.view(-1)[:2], lambda g: g.detach()):
        model(torch.ones(1, 3)).sum().backward()
        place = model.weight.grad.data_ptr()
        kept = keep(model.weight.grad)
        model.zero_grad()
        model(torch.full((1, 3), 5.0)).sum().backward()
        assert (kept == 1).all() and (model.weight.grad == 5).all()
        del kept
        model.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    place = model.weight.grad.data_ptr()
    model.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad.data_ptr() == place  # nobody keeps it: the same memory
