"""Engines on PyTorch: a handwritten loop, DDP, Horovod, Lightning, Accelerate, and three lines of ours."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from work import SGD, Count, called, cycle, prepared, torch_loss


def bare_pytorch(
    model: str,
    count: Count,
    wrap: Callable,
    optimize: Callable | None = None,
    size: int = 2,
    channels_last: bool = False,
) -> None:
    """Run a handwritten loop; ``wrap(model)`` or ``optimize(optimizer, model)`` makes it parallel."""
    import torch

    rank = int(os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
    net, batches = prepared("pytorch", model, rank, size, channels_last=channels_last)
    net.train()
    wrapped = wrap(net)
    optimizer = torch.optim.SGD(net.parameters(), fused=True, **SGD)
    if optimize is not None:
        optimizer = optimize(optimizer, net)
    for inputs, labels in cycle(batches):
        optimizer.zero_grad()
        loss = torch_loss(called(wrapped, inputs), labels)
        loss.backward()
        optimizer.step()
        count(lambda loss=loss: mean_over_ranks(float(loss.detach())))


def mean_over_ranks(value: float) -> float:
    """Average a loss over the ranks of this engine's world."""
    import torch
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        x = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(x)
        return float(x) / dist.get_world_size()
    if "horovod.torch" in sys.modules and sys.modules["horovod.torch"].is_initialized():
        return float(sys.modules["horovod.torch"].allreduce(torch.tensor(value, dtype=torch.float64), name="loss"))
    return value


def ddp(hook: str = "") -> Callable:
    def wrap(net) -> Any:
        import torch.distributed as dist
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
        from torch.nn.parallel import DistributedDataParallel

        dist.init_process_group("gloo")
        # Over Gloo, the chained transfers of the PowerSGD hook are in different orders on the ranks if there are
        # several buckets, and it fails. So it gets all gradients in one bucket.
        megabytes = 1 << 12 if hook == "powersgd" else None
        wrapped = DistributedDataParallel(net, gradient_as_bucket_view=True, bucket_cap_mb=megabytes)
        if hook == "fp16":
            wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif hook == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
            wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return wrapped

    return wrap


def bare_horovod(model: str, count: Count) -> None:
    """Train as in Horovod's documentation."""
    import horovod.torch as hvd

    hvd.init()

    def optimize(optimizer, net) -> Any:
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        return hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())

    bare_pytorch(model, count, lambda net: net, optimize)


def script_pytorch(model: str, count: Count) -> None:
    """Train by a user's loop with three lines of ours."""
    import hvd_train.torch as ht

    bare_pytorch(model, count, lambda net: net, lambda optimizer, net: ht.distribute(net, optimizer)[1])


def gathered(model: str, count: Count) -> None:
    """Train as DataParallel does, with processes: rank 0 gathers outputs, and sends their gradients back."""
    import torch
    import torch.distributed as dist
    from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    net, batches = prepared("pytorch", model, rank, size)
    weights = list(net.train().parameters())
    optimizer = torch.optim.SGD(weights, fused=True, **SGD)

    def joined(x) -> Any:
        parts = [torch.empty_like(x) for _ in range(size)] if rank == 0 else None
        dist.gather(x.contiguous(), parts)
        return torch.cat(parts) if parts else None

    def divided(whole, like) -> Any:
        part_of_rank = torch.empty_like(like)
        dist.scatter(part_of_rank, [part.contiguous() for part in whole.chunk(size)] if rank == 0 else None)
        return part_of_rank

    for inputs, labels in cycle(batches):
        optimizer.zero_grad()
        named = called(net, inputs)
        outputs = named if isinstance(named, dict) else {"": named}
        whole = {name: joined(x.detach()) for name, x in outputs.items()}
        asked = {name: joined(y) for name, y in (labels if isinstance(labels, dict) else {"": labels}).items()}
        loss = torch.zeros(())
        if rank == 0:
            loss = torch_loss({name: x.requires_grad_() for name, x in whole.items()}, asked)
            loss.backward()
        local = [divided(whole[name].grad if rank == 0 else None, x) for name, x in outputs.items()]
        torch.autograd.backward(list(outputs.values()), local)
        gradients = [w.grad for w in weights]
        flat = _flatten_dense_tensors(gradients)
        dist.all_reduce(flat)
        for gradient, x in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
            gradient.copy_(x)
        optimizer.step()
        count(lambda loss=loss: mean_over_ranks(size * float(loss.detach())))


def lightning(model: str, count: Count) -> None:
    import lightning as L
    import torch
    from lightning.pytorch.strategies import DDPStrategy

    net, batches = prepared("pytorch", model, int(os.environ["RANK"]), 2)

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net.train()  # Lightning does not set the mode

        def training_step(self, batch, index) -> Any:
            self.loss = torch_loss(self.net(batch[0]), batch[1])
            return self.loss

        def on_train_batch_end(self, *args) -> None:
            count(lambda: mean_over_ranks(float(self.loss.detach())))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net.parameters(), fused=True, **SGD)

    class Batches(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator:
            return cycle(batches)

    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True),
        max_steps=-1,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(Batches(), batch_size=None))


def accelerate(model: str, count: Count) -> None:
    import torch
    from accelerate import Accelerator, DistributedDataParallelKwargs

    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)])
    net, batches = prepared("pytorch", model, accelerator.process_index, 2)
    net.train()
    wrapped, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), fused=True, **SGD))
    for inputs, labels in cycle(batches):
        optimizer.zero_grad()
        loss = torch_loss(wrapped(inputs), labels)
        accelerator.backward(loss)
        optimizer.step()
        count(lambda loss=loss: mean_over_ranks(float(loss.detach())))


def bare_pytorch_copy(model: str, count: Count, channels_last: bool) -> None:
    os.environ["RANK"] = os.environ.get("COPY", "0")
    bare_pytorch(model, count, lambda net: net, size=2, channels_last=channels_last)


PYTORCH: dict[str, Callable] = {
    "copies": lambda model, count: bare_pytorch_copy(model, count, False),
    "copies (channels last)": lambda model, count: bare_pytorch_copy(model, count, True),
    "one process": lambda model, count: bare_pytorch(model, count, lambda net: net, size=1),
    "ours (own loop)": script_pytorch,
    "DDP": lambda model, count: bare_pytorch(model, count, ddp()),
    "DDP (channels last)": lambda model, count: bare_pytorch(model, count, ddp(), channels_last=True),
    "DDP fp16": lambda model, count: bare_pytorch(model, count, ddp("fp16")),
    "DDP PowerSGD": lambda model, count: bare_pytorch(model, count, ddp("powersgd")),
    "gathered": gathered,
    "Lightning": lightning,
    "Accelerate": accelerate,
    "Horovod": bare_horovod,
}
