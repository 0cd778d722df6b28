"""The functions of ``hvd_train.torch``, except for checkpoints."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, TypeVarTuple, overload

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, RandomSampler

from hvd_train.config.modes import ALLREDUCE
from hvd_train.core.agreement import agree, collectively
from hvd_train.data.order import mix
from hvd_train.errors import ConfigError
from hvd_train.frontends.devices import gpu_index
from hvd_train.frontends.pytorch import linear
from hvd_train.launch.environment import keep_memory
from hvd_train.script.pytorch import registry, verify_mode
from hvd_train.script.pytorch.checkpoint import broadcast, lay_slots, unwrapped
from hvd_train.script.pytorch.checks import (
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
from hvd_train.script.pytorch.local_training import LocalModel
from hvd_train.script.pytorch.reducer_plan import ReducerPlan, statistics_of
from hvd_train.script.pytorch.sharded import ShardedStep
from hvd_train.script.pytorch.step_hooks import after_step, before_step
from hvd_train.script.pytorch.sums import add_up
from hvd_train.script.shared import main_rank
from hvd_train.script.shared.dataloader import passes, rng, shares
from hvd_train.script.shared.record import recording
from hvd_train.script.shared.world import exchange_options

Model = TypeVar("Model", bound=torch.nn.Module)
Others = TypeVarTuple("Others")


def rank() -> int:
    """Return this process' rank, from 0."""
    return registry.communicator().rank


def size() -> int:
    """Return the number of ranks."""
    return registry.communicator().size


def is_main() -> bool:
    """Return whether this is rank 0, which prints and writes files."""
    return rank() == 0


def print(*values: Any, **options: Any) -> None:
    """Print on rank 0 only. All ranks compute the values, so ``ht.print(ht.sum(count))`` is correct."""
    main_rank.print_on(is_main(), *values, **options)


def tqdm(*arguments: Any, **options: Any) -> Any:
    """Wrap an iterable in tqdm's progress bar, shown on rank 0 only: ``for x, y in ht.tqdm(loader):`` on all ranks."""
    return main_rank.progress_on(is_main(), "ht.tqdm", *arguments, **options)


def device() -> torch.device:
    """Return this rank's device: the GPU of its local rank, or the CPU if there is no GPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index = gpu_index(torch.cuda.device_count(), registry.communicator().local_rank, None)
    # From here on "cuda" without a number is this GPU, in the script and in its libraries.
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def sum(*values: Any) -> Any:
    """Sum values over all ranks, in 64 bits and in rank order; return one sum for one value, a list for several.

    ``correct, count = ht.sum(correct, count)``, then ``correct / count``, is exact however samples are distributed.
    Numbers and one-element tensors give an int if they are whole on all ranks, else a float. A larger tensor or NumPy
    array, such as a confusion matrix, gives one of its shape on its device: int64 for integers and booleans, float32
    for 16-bit floats, else its own type. Call it on all ranks. Raises CommunicationError on all of them if shapes
    differ.
    """
    return add_up(values)


def times() -> dict[str, float]:
    """Return what the time was spent on since the last call, in seconds, as the mean over ranks.

    ``{"input": 1.2, "compute": 8.1, "exchange": 2.0, "wait": 0.3}``: batches of ``ht.shard``; waiting for transfers;
    waiting for the slowest rank; ``compute`` is everything else. ``start`` is the time until the first step. Nothing is
    exchanged: the ranks have done so up to a few seconds ago.
    """
    return registry.slow_rank_report().seconds()


def barrier() -> None:
    """Wait for all ranks: after ``if ht.is_main(): torch.save(...)`` and this, all may read the file."""
    registry.communicator().barrier()


@overload
def distribute(
    model: Model,
    *,
    compression: str = "none",
    overlap: bool | str = "auto",
    sync_batchnorm: bool = False,
    average: bool = True,
    sharded: bool = False,
    mode: str = ALLREDUCE,
    agreement_every_n_steps: int = 100,
    **options: Any,
) -> Model: ...
@overload
def distribute(
    model: Model,
    *others: *Others,
    compression: str = "none",
    overlap: bool | str = "auto",
    sync_batchnorm: bool = False,
    average: bool = True,
    sharded: bool = False,
    mode: str = ALLREDUCE,
    agreement_every_n_steps: int = 100,
    **options: Any,
) -> tuple[Model, *Others]: ...
def distribute(  # type: ignore[misc]  # mypy does not match a TypeVarTuple with *others
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
    """Train the model data-parallel on all ranks; return the arguments. Call it on all ranks, once for each model.

    ``others``: further models, whose gradients are exchanged together with the first one's, and then any number of
    optimizers: ``ht.distribute(encoder, decoder, optimizer)``. Frozen parameters may be unfrozen later, on all ranks
    alike.

    Rank 0's weights, buffers and optimizer state are broadcast. From now on, after ``backward()`` gradients are the
    mean over the ranks, as views of flat buckets. This is right for a loss that is a mean over its batch. Any other
    loss (a sum, a mean over tokens) needs ``average=False``, which sums gradients: divide the loss by
    ``ht.sum(count)``, the count of all ranks. Gradients that you set yourself (``p.grad = g``) are averaged in
    ``optimizer.step()``, and so is the loss in the line search of LBFGS.

    Running statistics are averaged with the gradients; with ``sync_batchnorm``, batch normalization uses the statistics
    of the global batch. Other buffers that change are copied from rank 0. The generators of torch, NumPy and ``random``
    are reseeded on all ranks but the first, so dropout and augmentation differ between ranks, and are reproducible if
    the script sets a seed. The learning rate and the batch size per rank do not change.

    ``sharded``: each rank keeps the optimizer state of its part of the weights, updates that part in
    ``optimizer.step()``, and gathers the others (ZeRO, stage 1). The optimizer must be elementwise, which is tested;
    call ``state_dict`` and ``ht.save`` on all ranks.

    ``mode="outer"`` with ``outer_steps``, ``outer_lr``, ``outer_momentum``: each rank steps by its local gradients, and
    an outer optimizer synchronizes the weights every ``outer_steps`` steps and at the end of each pass over a loader of
    ``shard``. In the middle of a pass evaluate within ``ht.global_weights``. ``mode="streaming"``, also with
    ``fragments``, ``stream_delay`` and ``mix``, synchronizes a part of the weights at a time in the background.

    ``compression`` and its options are those of the configuration: ``compression="topk", ratio=0.01``. All ranks must
    call ``backward()`` equally often. Every ``agreement_every_n_steps`` backward passes (0: never), and with the last
    batch of each pass over a loader of ``shard``, the ranks compare their weights and learning rates, and raise
    CommunicationError if they differ. Raises ConfigError on all ranks.
    """
    communicator = registry.communicator()
    models, optimizers = _divide(model, others)
    # A local check may fail on some ranks only; ``collectively`` raises on all of them.
    collectively(communicator, lambda: check_models(models, sync_batchnorm))
    whole = torch.nn.ModuleList(models) if len(models) > 1 else models[0]
    if any(p.is_cpu for p in whole.parameters()):
        linear.take()
    if record := recording():
        # Before types are checked and compared, because all floats become 64 bits.
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
    """Start distributed training by ``plan``. ``numbers``: results of ``check_elementwise``."""
    communicator, model = plan.communicator, plan.whole
    if plan.exchange.spec.gradients:
        plan.start(trainable(model))
        if communicator.size > 1:
            for optimizer, names in zip(optimizers, numbers, strict=False):
                if optimizer not in registry.sharded:
                    registry.sharded[optimizer] = ShardedStep(optimizer, communicator, names)
    else:
        _start_local_training(plan, optimizers[0])
    if record := recording():
        verify_mode.add(model, record)
    # Last, because until here all ranks draw the same random numbers, for data and initial weights.
    rng.seed_by_rank(communicator.rank)
    registry.optimizers.update(optimizers)
    keep_memory()


def _start_local_training(plan: ReducerPlan, optimizer: torch.optim.Optimizer) -> None:
    """Start local training, which also synchronizes at the end of each pass over a loader."""
    model, statistics, number = plan.whole, statistics_of(plan.whole, False), len(registry.distributed)
    local = LocalModel(model, statistics, optimizer, plan.exchange, plan.communicator, number=number, every=plan.every)
    registry.local_training[model] = registry.local_training[optimizer] = local
    state = registry.read_before.pop(optimizer, {})
    if state is None:
        local.warn_of_plain_state()
    elif state:
        optimizer.load_state_dict(state)  # now it also takes the outer optimizer's state
        lay_slots(optimizer)
    passes.at_end.append(local.synchronize)
    plan.remember()


def _divide(model: torch.nn.Module, others: Sequence[Any]) -> tuple[list[torch.nn.Module], Sequence[Any]]:
    """Split the arguments into models and optimizers."""
    further = list(itertools.takewhile(lambda x: isinstance(x, torch.nn.Module), others))
    return [unwrapped(x) for x in (model, *further)], others[len(further) :]


def _synchronize_start(whole: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], options: str) -> None:
    """Compare models, optimizers and options between ranks, and broadcast rank 0's weights and state."""
    communicator = registry.communicator()
    # Before the broadcast, which with different shapes would fail on every rank but 0.
    agree(communicator, facts(whole, optimizers) | {"options": options})
    broadcast(communicator, whole, optimizers)
    warn_of_plain_tensors(communicator, whole)
    warn_of_hidden_layers(communicator, whole)


def global_weights(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Put the weights to evaluate and save into the model within this context: ``with ht.global_weights(model):``.

    With ``ht.distribute(..., mode="outer")`` they are those of the last synchronization. Other models do not change.
    It does not communicate, so it may be called on some ranks only.
    """
    local = registry.local_training.get(unwrapped(model))
    if not local:
        return nullcontext()
    local.warn_if_never_synchronized()
    return local.global_weights()


@contextmanager
def no_sync(model: torch.nn.Module) -> Iterator[None]:
    """Accumulate gradients locally within this context; the next ``backward()`` after it reduces their sum.

    Each batch of ``ht.shard`` is weighted by its own numbers of samples.
    """
    reducers = [reducer for other, reducer in registry.distributed if other is unwrapped(model)]
    if not reducers:
        raise ConfigError("this model is not distributed", where="ht.no_sync", fix="call ht.distribute(model) first")
    before = {reducer: reducer.reducing for reducer in reducers if reducer}
    for reducer in before:
        reducer.weigh_parts()
        reducer.reducing = False
    try:
        yield
    finally:
        for reducer, reducing in before.items():
            reducer.reducing = reducing


def shard(loader: DataLoader) -> DataLoader:
    """Return a loader over this rank's share of the samples, in batches of the loader's ``batch_size``.

    Each sample comes once per epoch, on one rank; all ranks have the same number of batches. With ``shuffle`` each pass
    that begins after a step of a distributed optimizer has another order: a function of rank 0's seed (that of the
    generator of the loader or its ``RandomSampler``, or torch's and the number of loaders sharded before), and of the
    steps made, or the argument of ``loader.set_epoch(number)``. So loaders whose generators have the same seed are in
    the same order, and inspecting a batch changes nothing, on one rank or on all.

    At the end of a pass with steps, and at the start of the next one, the generators of torch, NumPy and ``random`` are
    seeded from (seed, epoch, rank), as in a run that resumes there. Workers' generators are seeded from (seed, epoch,
    rank, batch) for each batch. Other passes do not change torch's generator.

    The last batch may differ in length by one between ranks and is weighted by its samples.
    Call it on all ranks. Raises ConfigError or DataError on all of them.
    """
    communicator = registry.communicator()
    collectively(communicator, lambda: shares.check(loader))
    agree(communicator, shares.facts(loader))
    number, registry.loaders = registry.loaders, registry.loaders + 1
    shuffles = type(loader.sampler) is RandomSampler and loader.sampler.generator
    generator = shuffles or loader.generator
    seed = generator.initial_seed() if generator else torch.initial_seed()
    # Two loaders of equal length must have different orders, unless the script gave their generators the same seed.
    again = rng.uses(generator) if generator else number
    # Rank 0's, because the ranks' shares must be parts of one order.
    seed, again = json.loads(communicator.broadcast_bytes(json.dumps([seed, again]).encode()))
    key = mix(seed, again) if again else seed
    passes.unshared, passes.inputs = registry.unshared_sums(), registry.model_inputs()
    passes.fetching = lambda: registry.slow_rank_report().input()
    passes.without_steps[:] = [registry.pass_without_steps]

    # A stream has no length to compare before, so its batches are compared at its end.
    def ended(batches: int) -> None:
        agree(communicator, {"batches of the stream": str(batches)}, "ht.shard.end_of_stream")
        # Models that were distributed together have one reducer.
        for reducer in {id(reducer): reducer for _, reducer in registry.distributed if reducer}.values():
            reducer.compare()

    together = record.together if (record := recording()) else 1
    rank_and_size = communicator.rank, communicator.size
    more: Any = dict(number=number, together=together, again=again if generator else 0, shuffled=generator)
    return passes.shared(loader, key, *rank_and_size, ended=ended, **more)


# On import: before the script makes a model or draws a number.
if _recording := recording():
    verify_mode.prepare(_recording)
# For all optimizers, also those that are made later.
register_optimizer_step_pre_hook(before_step)
register_optimizer_step_post_hook(after_step)
