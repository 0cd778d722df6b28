"""What a GPU changes, mostly without one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hvd_train.config import Config, FrontEndConfig
from hvd_train.frontends.pytorch import model as pytorch
from hvd_train.frontends.pytorch.buckets import dense
from hvd_train.frontends.pytorch.communicator import HorovodTorch
from hvd_train.frontends.pytorch.device import seeder
from hvd_train.frontends.pytorch.ops import TorchOps
from hvd_train.frontends.serial import Serial
from hvd_train.protocol import Field, Groups, Sample


class OnGpu:
    """A tensor of a GPU, as far as the communicator looks."""

    is_cuda = True

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def cpu(self) -> torch.Tensor:
        return self.x.clone()

    def copy_(self, x: torch.Tensor) -> OnGpu:
        self.x.copy_(x)
        return self


@pytest.mark.parametrize(("op", "on_host"), [("adasum", True), ("sum", False)])
def test_adasum_of_gpus_runs_in_the_memory_of_the_host(op, on_host):
    """Over NCCL Horovod's takes the mean of the ranks of a host (seen on an H200)."""
    communicator, sent = HorovodTorch(2), []

    def transfer(x, **keys):
        sent.append(x)
        return 7

    communicator.hvd = SimpleNamespace(
        Sum="sum",
        Average="average",
        Adasum="adasum",
        allreduce_async_=transfer,
        synchronize=lambda handle: torch.full((3,), float(handle)),
    )
    x = OnGpu(torch.ones(3))
    result = communicator.synchronize(communicator.allreduce_async(x, "x", op))
    assert isinstance(sent[0], torch.Tensor) is on_host
    assert (result is x and x.x.tolist() == [7.0] * 3) is on_host


def test_a_step_seeds_what_a_rank_draws_from_and_nothing_else(monkeypatch):
    """``torch.manual_seed`` looks for every kind of device, in each step."""
    seeds: list[int] = []
    monkeypatch.setattr(torch, "manual_seed", lambda seed: pytest.fail("looks for devices"))
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "default_generators", (None, SimpleNamespace(manual_seed=seeds.append)))
    for seed, device in ((7, torch.device("cuda", 1)), (8, torch.device("cpu"))):
        seeder(device)(seed)
        assert torch.initial_seed() == seed
    assert seeds == [7]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_sums_of_what_occurs_several_times_have_the_same_bits_each_time():
    """With ``index_add_`` three ranks that shared entries in topk went apart (seen on an H100)."""
    ops, draw = TorchOps(torch.device("cuda")), torch.Generator().manual_seed(0)
    indices, values = torch.randint(50, (100_000,), generator=draw), torch.randn(100_000, generator=draw)
    places, rows = indices.cuda(), values.cuda()
    sparse = torch.sparse_coo_tensor(places[None], rows[:, None].expand(-1, 3), (50, 3))
    for found in (lambda: ops.scatter(50, places.int(), rows), lambda: dense(sparse)):
        first = found()
        assert all(torch.equal(first, found()) for _ in range(20))
        wanted = torch.zeros(50, dtype=torch.float64).index_add_(0, indices, values.double())
        torch.testing.assert_close(first.cpu().double().reshape(50, -1)[:, 0], wanted, rtol=1e-3, atol=1e-2)


class Insists(torch.nn.Module):
    """Its forward pass takes one order of memory alone."""

    def __init__(self):
        super().__init__()
        self.conv, self.linear = torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(4 * 36, 3)

    def forward(self, x):
        return self.linear(self.conv(x).view(len(x), -1))


def insists(**shape) -> torch.nn.Module:
    return Insists()


@pytest.mark.parametrize(("model", "axes"), [("resnet", "channels last"), (f"{__name__}:insists", "channels first")])
def test_a_front_end_says_how_its_kernels_lie(model, axes):
    """A checkpoint keeps it, for residuals lie as gradients do."""
    small = {"width": 4, "blocks": [1]} if model == "resnet" else {}
    config = Config.model_validate({"model": {"name": model, **small}, "device": "cpu"})
    sample = Sample({"input": Field((8, 8, 3), "float32")}, {"label": Field((), "int64", classes=3)})
    frontend = pytorch.open_frontend(FrontEndConfig.of(config), Groups.of(Serial()), sample)
    assert frontend.axes == axes
