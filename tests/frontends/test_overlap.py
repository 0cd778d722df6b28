"""PyTorch's ``overlap: auto`` and a model that runs a part of its backward twice: it stays right, and does not stop."""

from __future__ import annotations

import pytest
import torch

from hvd_train.compression import make
from hvd_train.errors import ConfigError
from hvd_train.frontends.pytorch import model as pt
from hvd_train.frontends.serial import Serial
from hvd_train.protocol import Packing
from hvd_train.update.exchange import Exchange
from hvd_train.update.replicated import Replicated
from tests.frontends.test_contract import CLASSES, ROWS, SHAPE, batch, built, close, opened, sample_of


class Hosts(Serial):
    """Two ranks that do the same, each on a host of its own."""

    size = 2

    def allreduce_async(self, x, name, op="sum"):
        return x.mul_(2)

    def allgather_bytes(self, data):
        return [data, data]


def trained(overlap, model="tests.own_models:checkpointed", packing=pt.PyTorchFrontEnd.packing):
    settings = {"model": {"name": model}, "optim": {"lr": 0.1}, "exchange": {"overlap": overlap}}
    frontend = built("pytorch", sample_of(SHAPE, CLASSES), Hosts(), connect=False, **settings)
    Replicated(frontend, Exchange(frontend.specs(), packing, make("none"), frontend.groups.data, frontend.ops))
    early = []
    sent = frontend._sent
    start = sent._start
    sent._start = lambda b: (early.append(frontend._last), start(b))[1]
    for k in range(3):
        frontend.train_step(frontend.to_device(batch(k)), 1 / (2 * ROWS), k, 0.1)
    return frontend.state(), any(early)


def test_auto_falls_back_where_gradients_come_twice():
    (auto, early), (plain, _) = trained("auto"), trained(False)
    assert not early
    close(auto, plain)
    close(trained(True)[0], plain)  # all in one bucket, whose last gradient comes once
    with pytest.raises(
        ConfigError, match="a part of its backward twice; exchange.overlap; set exchange.overlap: false"
    ):
        trained(True, packing=Packing(0, 0))


@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_that_share_memory(overlap):
    """Each alone in its bucket, which lends its gradient's memory where nobody else has a part of it."""
    model = "tests.own_models:aliased"
    close(trained(overlap, model, Packing(0, 0))[0], trained(False, model)[0])


def test_a_gradient_alone_lends_its_memory():
    """No copy where autograd gave it to nobody else: that is a pass over all gradients."""
    layer = torch.nn.Linear(3, 2)
    flat = pt.Flat(["weight"], [layer.weight], False)
    layer(torch.ones(4, 3)).sum().backward()
    assert flat.gather().data_ptr() == layer.weight.grad.data_ptr()


def test_auto_overlaps_elsewhere():
    model = "tests.own_models:pytorch_dropout"
    (auto, early), (plain, never) = trained("auto", model), trained(False, model)
    assert early and not never
    close(auto, plain)


def test_every_layer_trains_whoever_had_it_evaluate():
    """``train()`` is called only where it is needed: after an evaluation, and after a hook left a layer in eval."""
    frontend = opened("pytorch")
    placed, layers = frontend.to_device(batch(0)), list(frontend.model.modules())
    for before in (lambda: None, lambda: frontend.evaluate_batch(placed), layers[-1].eval):
        before()
        frontend.train_step(placed, 1 / ROWS, 0, 0.1)
        assert all(layer.training for layer in layers)


def test_parameters_without_a_gradient_count_as_zeros():
    """Also after a step in which they had one."""
    layer = torch.nn.Linear(3, 2)
    flat = pt.Flat(["weight", "bias"], [layer.weight, layer.bias], False)
    layer(torch.ones(4, 3)).sum().backward()
    assert flat.gather().tolist() == [4.0] * 8
    layer.weight.grad = None
    assert flat.gather().tolist() == [0.0] * 6 + [4.0] * 2
    layer.bias.grad = None
    assert flat.gather().tolist() == [0.0] * 8
