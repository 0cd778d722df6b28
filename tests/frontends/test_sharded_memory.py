"""The memory of a step of a sharded optimizer: gradients and what ranks receive are gone when weights are gathered."""

from __future__ import annotations

import gc

import pytest

from hvd_train.compression import make
from hvd_train.config import Config, FrontEndConfig
from hvd_train.frontends.horovod import RankParts
from hvd_train.frontends.serial import Serial
from hvd_train.protocol import Groups
from hvd_train.update.exchange import Exchange
from hvd_train.update.sharded import Sharded, ShardedExchange
from tests.frontends.test_contract import CLASSES, ROWS, SHAPE, batch, module, sample_of


class Twin(Serial):
    """Rank 0 of two, of which the other one has the same tensors; all transfers are there at once."""

    size = local_size = 2
    entries: dict  # of a bucket, by the name of its transfer

    def reduce_scatter_async(self, x, sizes, name):
        import torch

        return RankParts(torch.cat([x[: sizes[0]]] * 2), 2, sizes[0])

    def allgather_async(self, x, name):
        import torch

        return torch.cat([x, x])[: self.entries[name]]

    def synchronize(self, handle):
        return handle.add(handle.transfer) if isinstance(handle, RankParts) else handle

    def allgather_bytes(self, data, name="bytes"):
        return [data, data]


def live_bytes():
    """Of all tensors that Python knows; each memory counts once."""
    import torch

    KINDS = torch.Tensor, torch.nn.Parameter  # those that torch.export leaves behind have no memory
    gc.collect()  # what other tests left in cycles
    memories = [x.untyped_storage() for x in gc.get_objects() if type(x) in KINDS]
    return sum({memory.data_ptr(): memory.nbytes() for memory in memories}.values())


@pytest.mark.parametrize("accumulated", [False, True])
def test_gradients_are_gone_when_weights_are_gathered(accumulated):
    pytorch = module("pytorch")
    before = live_bytes()
    settings = {"precision": 64, "device": "cpu", "model": {"name": "mlp", "hidden": [1024, 1024, 1024]}}
    config = Config.model_validate(settings | {"optim": {"lr": 0.1, "momentum": 0.9, "sharded": True}})
    frontend = pytorch.open_frontend(FrontEndConfig.of(config), Groups.of(Twin()), sample_of(SHAPE, CLASSES))
    parts = frontend.specs(), frontend.packing, make("none"), frontend.groups.data, frontend.ops
    exchange = Exchange(*parts, small=0)
    frontend.groups.data.entries = {
        f"weights{b}": sum(sizes) for b, sizes in enumerate(ShardedExchange(exchange).parts)
    }
    update = Sharded(frontend, exchange)
    gather, seen = update._gather, []

    def watched():
        seen.append(live_bytes() - before)
        gather()

    update._gather = watched
    placed = frontend.to_device(batch())
    if accumulated:
        frontend.add_gradients(placed, 1 / ROWS, 0)
    frontend.train_step(placed, 1 / ROWS, 1, 0.1)
    weights = sum(spec.nbytes for spec in frontend.specs())
    # The weights, half of the slots, half of the reduced gradient; a little for small tensors, which travel joined.
    assert seen[0] < 2.1 * weights, seen[0] / weights
