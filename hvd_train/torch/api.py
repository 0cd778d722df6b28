"""The functions of ``hvd_train.torch``, but for checkpoints."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from hvd_train.config.modes import ALLREDUCE
from hvd_train.core.agreement import agree, collectively
from hvd_train.data.order import mix
from hvd_train.errors import ConfigError
from hvd_train.frontends.devices import gpu_index
from hvd_train.launch.environment import keep_memory
from hvd_train.script import main_rank
from hvd_train.script.dataloader import passes, rng, shares
from hvd_train.script.record import recording
from hvd_train.script.world import exchange_options
from hvd_train.torch import registry, verify_mode
from hvd_train.torch.checkpoint import broadcast, lay_slots, unwrapped
from hvd_train.torch.checks import (
    WHERE,
    check,
    check_elementwise,
    check_embeddings,
    check_local,
    check_models,
    facts,
    trainable,
    warn_of_hidden_layers,
    warn_of_plain_tensors,
)
from hvd_train.torch.local_training import LocalModel
from hvd_train.torch.reducer_plan import ReducerPlan, statistics_of
from hvd_train.torch.sharded import ShardedStep
from hvd_train.torch.step_hooks import after_step, before_step
from hvd_train.torch.sums import add_up


def rank() -> int:
    """Return this process' number in the world, from 0."""
    return registry.communicator().rank


def size() -> int:
    """Return how many ranks train together."""
    return registry.communicator().size


def is_main() -> bool:
    """Return whether this is rank 0, which prints and writes files for all."""
    return rank() == 0


def print(*values: Any, **options: Any) -> None:
    """Python's ``print``, on rank 0 alone. All ranks compute the values: ``ht.print(ht.sum(count))`` is right."""
    main_rank.print_on(is_main(), *values, **options)


def tqdm(*arguments: Any, **options: Any) -> Any:
    """tqdm's progress bar over an iterable, shown on rank 0 alone: ``for x, y in ht.tqdm(loader):`` on all ranks."""
    return main_rank.progress_on(is_main(), "ht.tqdm", *arguments, **options)


def device() -> torch.device:
    """Return what this rank computes on: the GPU of its local rank, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index = gpu_index(torch.cuda.device_count(), registry.communicator().local_rank, None)
    # From here on "cuda" without a number is this GPU, in the script as in its libraries.
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def sum(*values: Any) -> Any:
    """Add up over all ranks, in 64 bits and in rank order: one sum for one value, a list for several.

    ``correct, count = ht.sum(correct, count)``, then ``correct / count``, is exact however samples lie on ranks. A
    number, or a tensor of one, gives an int where it is whole on all ranks, else a float. A tensor or NumPy array of
    several, as a confusion matrix, gives one of its shape, on its device: of int64 for whole numbers and truth values,
    float32 for floats of 16 bits, else of its type. On all ranks; raises CommunicationError on all of them where shapes
    differ.
    """
    return add_up(values)


def barrier() -> None:
    """Wait until all ranks are here: ``if ht.is_main(): torch.save(...)``, then this, then all may read the file."""
    registry.communicator().barrier()


def distribute(
    model: torch.nn.Module,
    *others: Any,
    compression: str = "none",
    overlap: bool | str = "auto",
    sync_batchnorm: bool = False,
    average: bool = True,
    sharded: bool = False,
    mode: str = ALLREDUCE,
    agreement_every_n_steps: int = 100,
    **options: Any,
) -> Any:
    """Make the model train as one on all ranks; return the arguments. Call it on all ranks, once for each model.

    ``others``: its optimizers, any number of them; before them further models, whose gradients travel with the first
    one's: ``ht.distribute(encoder, decoder, optimizer)``. Frozen parameters may be unfrozen later, on all ranks
    alike.

    Rank 0's weights, buffers and optimizer state go to all ranks. From now on ``backward()`` returns with gradients
    that are the mean over the ranks, as views of flat buckets: right for a loss that is a mean over its batch. Any
    other loss (a sum, a mean over tokens) wants ``average=False``, which adds gradients up: divide its sum by
    ``ht.sum(count)``, the count of all ranks. Gradients that you set yourself (``p.grad = g``)
    are averaged in ``optimizer.step()``, and so is the loss by which LBFGS searches.

    Running statistics are averaged with the gradients, or those of batch normalization taken over the global batch with
    ``sync_batchnorm``; of all other buffers that change, every rank takes rank 0's. The generators of torch, NumPy and
    ``random`` are set anew on all ranks but the first: dropout and augmentation differ between ranks, and repeat from
    run to run where the script seeds. The learning rate stays as it is, and each rank takes its batches.

    ``sharded``: each rank keeps the optimizers' slots for its part of the weights, moves that part in
    ``optimizer.step()``, and gets the others' (ZeRO, stage 1). For elementwise optimizers, which is tried; call
    ``state_dict`` and ``ht.save`` on all ranks then.

    ``mode="outer"`` with ``outer_steps``, ``outer_lr``, ``outer_momentum``: each rank steps by its local gradients, and
    an outer optimizer joins the weights after so many steps and at the end of each pass over a loader of ``shard``.
    In the middle of a pass evaluate within ``ht.global_weights``. ``mode="streaming"`` with ``fragments``,
    ``stream_delay`` and ``mix`` besides joins a part of the weights at a time, while the ranks train on.

    ``compression`` and its options are those of the configuration: ``compression="topk", ratio=0.01``. Every rank must
    call ``backward()`` equally often. Every so many backward passes (``agreement_every_n_steps``; 0: never), and with
    the last batch of each pass over a loader of ``shard``, the ranks compare their weights and learning rates, and end
    with a CommunicationError where they differ. Raises ConfigError on all ranks.
    """
    communicator = registry.communicator()
    models, optimizers = _divide(model, others)
    # What one rank checks alone may fail on some ranks only: ``collectively`` raises on all of them.
    collectively(communicator, lambda: check_models(models, sync_batchnorm))
    whole = torch.nn.ModuleList(models) if len(models) > 1 else models[0]
    if record := recording():
        # Before types are checked and compared: all floats become 64 bits.
        verify_mode.prepare_models(models, record)
    collectively(communicator, lambda: check(whole, optimizers))
    numbers = collectively(communicator, lambda: check_elementwise(optimizers)) if sharded else []
    exchange = collectively(communicator, lambda: exchange_options(WHERE, compression, options, overlap, mode))
    if not exchange.spec.gradients:
        collectively(communicator, lambda: check_local(models, optimizers, mode, sync_batchnorm, average, sharded))
    elif communicator.size > 1:
        collectively(communicator, lambda: check_embeddings(whole))
    every = agreement_every_n_steps
    _synchronize_start(
        whole, optimizers, f"{compression} {overlap} {sync_batchnorm} {average} {sharded} {mode} {every} {options}"
    )
    plan = ReducerPlan(communicator, models, whole, compression, exchange, average, sync_batchnorm, every)
    _start(plan, optimizers, numbers)
    return (model, *others) if others else model


def _start(plan: ReducerPlan, optimizers: Sequence[torch.optim.Optimizer], numbers: Sequence[Any]) -> None:
    """Let the ranks train as ``plan`` says from now on. ``numbers``: of optimizers to be sharded."""
    communicator, model = plan.communicator, plan.whole
    if plan.exchange.spec.gradients:
        plan.start(trainable(model))
        if communicator.size > 1:
            _shard(optimizers, numbers)
    else:
        _train_apart(plan, optimizers[0])
    if record := recording():
        verify_mode.add(model, record)
    # Last: until here all ranks have drawn the same numbers, for data and first weights.
    rng.set_apart(communicator.rank)
    registry.optimizers.update(optimizers)
    keep_memory()


def _train_apart(plan: ReducerPlan, optimizer: torch.optim.Optimizer) -> None:
    """Train each rank by its own gradients from now on, and join the weights where a pass over a loader ends."""
    model, statistics, number = plan.whole, statistics_of(plan.whole, False), len(registry.distributed)
    apart = LocalModel(model, statistics, optimizer, plan.exchange, plan.communicator, number=number, every=plan.every)
    registry.apart[model] = registry.apart[optimizer] = apart
    if (state := registry.read_before.pop(optimizer, None)) is not None:
        optimizer.load_state_dict(state)  # with what this optimizer alone takes now
        lay_slots(optimizer)
    passes.at_end.append(apart.join)
    plan.remember()


def _divide(model: torch.nn.Module, others: Sequence[Any]) -> tuple[list[torch.nn.Module], Sequence[Any]]:
    """Return the models, and what stands behind them: the optimizers."""
    further = list(itertools.takewhile(lambda x: isinstance(x, torch.nn.Module), others))
    return [unwrapped(x) for x in (model, *further)], others[len(further) :]


def _synchronize_start(whole: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], options: str) -> None:
    """Compare models, optimizers and options over the ranks, and give all of them rank 0's weights and state."""
    communicator = registry.communicator()
    # Before the first transfer: with other shapes the broadcast would fail on every rank but 0, and 0 would go on.
    agree(communicator, facts(whole, optimizers) | {"options": options})
    broadcast(communicator, whole, optimizers)
    warn_of_plain_tensors(communicator, whole)
    warn_of_hidden_layers(communicator, whole)


def _shard(optimizers: Sequence[torch.optim.Optimizer], numbers: Sequence[Any]) -> None:
    """Let each of these optimizers keep the slots for a part of the weights, if it does not yet."""
    for optimizer, names in zip(optimizers, numbers, strict=False):
        if optimizer not in registry.sharded:
            registry.sharded[optimizer] = ShardedStep(optimizer, registry.communicator(), names)


def global_weights(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Give the model the weights that are evaluated and saved, within this context: ``with ht.global_weights(model):``.

    With ``ht.distribute(..., mode="outer")`` they are those of the last join. With other models nothing changes.
    Nothing travels, so some ranks may call it and others not.
    """
    apart = registry.apart.get(unwrapped(model))
    if not apart:
        return nullcontext()
    apart.warn_if_apart_so_far()
    return apart.global_weights()


@contextmanager
def no_sync(model: torch.nn.Module) -> Iterator[None]:
    """Let ``backward()`` only accumulate within this context; the next one after it reduces them all."""
    reducers = [reducer for other, reducer in registry.distributed if other is unwrapped(model)]
    if not reducers:
        raise ConfigError("this model is not distributed", where="ht.no_sync", fix="call ht.distribute(model) first")
    before = {reducer: reducer.reducing for reducer in reducers if reducer}
    for reducer in before:
        reducer.reducing = False
    try:
        yield
    finally:
        for reducer, reducing in before.items():
            reducer.reducing = reducing


def shard(loader: DataLoader) -> DataLoader:
    """Return the loader over this rank's share of the samples, ``batch_size`` of them at a time.

    Each sample comes once an epoch, on one rank; all ranks have the same number of batches. With ``shuffle`` each pass
    that begins after a step of a distributed optimizer has another order: a function of rank 0's seed (the
    loader's generator's, or torch's), of how many loaders were sharded before, and of the steps made, or of what
    ``loader.set_epoch(number)`` says. So a look at a batch shifts nothing, on one rank or on all.

    When a pass in which steps were made comes to its end, and when the next one begins, the generators of torch, NumPy
    and ``random`` go on from (seed, epoch, rank), as they do in a run that resumes there; workers' begin each batch
    from (seed, epoch, rank, batch). Other passes leave torch's generator alone.

    The last batch, which may differ in length by one between ranks, counts by its samples.
    On all ranks. Raises ConfigError or DataError on all of them.
    """
    communicator = registry.communicator()
    collectively(communicator, lambda: shares.check(loader))
    agree(communicator, shares.facts(loader))
    seed = loader.generator.initial_seed() if loader.generator else torch.initial_seed()
    # Rank 0's: the ranks' shares must be parts of one order.
    seed = json.loads(communicator.broadcast_bytes(json.dumps(seed).encode()))
    number, registry.loaders = registry.loaders, registry.loaders + 1
    key = mix(seed, number) if number else seed  # two loaders of one length must not give the same order
    passes.unshared = registry.unshared_sums()
    passes.without_steps[:] = [registry.pass_without_steps]

    # A stream has no length to compare before; ranks that read different streams show at its end.
    def ended(batches: int) -> None:
        agree(communicator, {"batches of the stream": str(batches)}, "ht.shard.end_of_stream")
        # Models that were distributed together have one reducer.
        for reducer in {id(reducer): reducer for _, reducer in registry.distributed if reducer}.values():
            reducer.compare()

    together = record.together if (record := recording()) else 1
    place = communicator.rank, communicator.size
    return passes.shared(loader, key, *place, ended=ended, number=number, together=together)


# On import: before the script makes a model or draws a number.
if _recording := recording():
    verify_mode.prepare(_recording)
# For all optimizers, also those that are made later.
register_optimizer_step_pre_hook(before_step)
register_optimizer_step_post_hook(after_step)
