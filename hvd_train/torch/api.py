"""The functions of ``hvd_train.torch``."""

from __future__ import annotations

import functools
import itertools
import json
import os
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from hvd_train import files
from hvd_train.compression import make
from hvd_train.core.agreement import agree, collectively
from hvd_train.core.mean import WIDE, sums
from hvd_train.data.order import mix
from hvd_train.errors import CheckpointError, ConfigError
from hvd_train.frontends.devices import gpu_index, overlaps
from hvd_train.frontends.pytorch import batchnorm as pt_batchnorm
from hvd_train.frontends.pytorch.hidden import HIDDEN_FIX, hidden, not_part
from hvd_train.frontends.pytorch.ops import TorchOps
from hvd_train.launch.environment import keep_memory
from hvd_train.protocol import Communicator
from hvd_train.script import main_rank
from hvd_train.script.dataloader import passes, rng, shares
from hvd_train.script.record import recording
from hvd_train.script.slow_rank import SlowRankReport
from hvd_train.script.world import exchange_options, open_session
from hvd_train.torch import backward, state_bytes, uneven_parts, verify_mode
from hvd_train.torch.bit_sum import bits
from hvd_train.torch.buffers import Buffers
from hvd_train.torch.reducer import Reducer
from hvd_train.torch.unfreeze import Frozen

WHERE = "ht.distribute"
DTYPES = (torch.float16, torch.float32, torch.float64)  # Horovod has no bfloat16

_distributed: list[tuple[torch.nn.Module, Reducer | None]] = []
_known: dict[int, tuple[torch.nn.Parameter, Reducer | None]] = {}  # id -> the parameter, who reduces its gradient
_sharded = 0  # loaders
_ours: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # that were handed to distribute


@functools.cache
def _world() -> Communicator:
    """The world, in which a rank computes on its share of the cores."""
    session = open_session("pytorch")
    torch.set_num_threads(min(torch.get_num_threads(), session.threads))
    return session.communicator


@functools.cache
def _slow() -> SlowRankReport:
    return SlowRankReport(_world(), lambda: _world().waited)


@functools.cache
def _unshared() -> main_rank.UnsharedSums:
    return main_rank.UnsharedSums(rank() == 0 and size() > 1, "join them: loss, count = ht.sum(loss, count)")


@functools.cache
def _parts() -> uneven_parts.Parts:
    return uneven_parts.Parts(_world())


def rank() -> int:
    """This process' number in the world, from 0."""
    return _world().rank


def size() -> int:
    """How many ranks train together."""
    return _world().size


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
    """What this rank computes on: the GPU of its local rank, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index = gpu_index(torch.cuda.device_count(), _world().local_rank, None)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def sum(*values: Any) -> Any:
    """The sums over all ranks, in 64 bits and in rank order: one for one value, a list for several.

    ``correct, count = ht.sum(correct, count)``, then ``correct / count``, is exact however samples lie on ranks. A
    number, or a tensor of one, gives a float. A tensor or NumPy array of several, as a confusion matrix, gives one of
    its shape, on its device: of int64 for whole numbers and truth values, float32 for floats of 16 bits, else of its
    type. On all ranks; raises CommunicationError on all of them where shapes differ.
    """
    own = [_array(value) for value in values]
    if backward.current_pass() < 0:
        backward.after_failure()
    if size() > 1:
        _parts().arrive(uneven_parts.SUM)
    _unshared().shared()
    totals = [_like(value, x) for value, x in zip(values, sums(own, _world(), "ht.sum"), strict=True)]
    return totals[0] if len(values) == 1 else totals


def barrier() -> None:
    """Waits until all ranks are here: ``if ht.is_main(): torch.save(...)``, then this, then all may read the file."""
    _world().barrier()


def distribute(
    model: torch.nn.Module,
    *others: Any,
    compression: str = "none",
    overlap: bool | str = "auto",
    sync_batchnorm: bool = False,
    average: bool = True,
    agreement_every_n_steps: int = 100,
    **options: Any,
) -> Any:
    """Makes the model train as one on all ranks; returns what it was given. On all ranks, once for each model.

    ``others``: its optimizers, any number of them; before them further models, whose gradients travel with the first
    one's: ``ht.distribute(encoder, decoder, optimizer)``. Frozen parameters may be unfrozen later, on all ranks
    alike.

    Rank 0's weights, buffers and optimizer state go to all ranks. From now on ``backward()`` returns with gradients
    that are the mean over the ranks, as views of flat buckets: right for a loss that is a mean over its batch. A loss
    that is summed over its batch wants ``average=False``, which sums. Gradients that you set yourself (``p.grad = g``)
    are averaged in ``optimizer.step()``, and so is the loss by which LBFGS searches.

    Running statistics are averaged with the gradients, or those of batch normalization taken over the global batch with
    ``sync_batchnorm``; of all other buffers that change, every rank takes rank 0's. The generators of torch, NumPy and
    ``random`` are set anew on all ranks but the first: dropout and augmentation differ between ranks, and repeat from
    run to run where the script seeds. The learning rate stays as it is, and batches are each rank's own.

    ``compression`` and its options are those of the configuration: ``compression="topk", ratio=0.01``. Every rank must
    call ``backward()`` equally often. Every so many backward passes (``agreement_every_n_steps``; 0: never), and with
    the last batch of each pass over a loader of ``shard``, the ranks compare their weights and learning rates, and end
    with a CommunicationError where they differ. Raises ConfigError on all ranks.
    """
    communicator = _world()
    further = list(itertools.takewhile(lambda x: isinstance(x, torch.nn.Module), others))
    optimizers = others[len(further) :]
    models = [_bare(x) for x in (model, *further)]
    collectively(communicator, lambda: _check_models(models, sync_batchnorm))
    bare = torch.nn.ModuleList(models) if further else models[0]
    if record := recording():
        verify_mode.settle(models, record)
    collectively(communicator, lambda: _check(bare, optimizers))
    exchange = collectively(communicator, lambda: exchange_options(WHERE, compression, options, overlap))
    parameters = _trainable(bare)
    words = f"{compression} {overlap} {sync_batchnorm} {average} {agreement_every_n_steps} {options}"
    agree(communicator, _facts(bare, optimizers) | {"options": words})
    _broadcast(communicator, bare, optimizers)
    _tell_plain(communicator, bare)
    _tell_hidden(communicator, bare)

    def reducer_of(parameters: dict[str, torch.nn.Parameter], first: bool) -> Reducer:
        return Reducer(
            parameters,
            _statistics(bare, sync_batchnorm) if first else [],
            communicator,
            make(compression, communicator.size, **exchange.options(compression)),
            lossy=compression != "none",
            overlap=overlaps(exchange.overlap, communicator, place.type == "cuda", torch.get_num_threads()),
            average=average,
            buffers=Buffers(bare, communicator) if first else None,
            model=bare if first else None,
            every=agreement_every_n_steps,
            number=len(_distributed),
            slow=_slow(),
        )

    def know(parameters: dict[str, torch.nn.Parameter], reducer: Reducer | None) -> None:
        _distributed.extend((x, reducer) for x in models)
        _known.update({id(p): (p, reducer) for p in parameters.values()})

    def unfreeze(parameters: dict[str, torch.nn.Parameter]) -> Reducer:
        collectively(communicator, lambda: _check_parameters(parameters))
        agree(communicator, {name: "trained from now on" for name in parameters}, "unfrozen")
        know(parameters, reducer := reducer_of(parameters, False))
        _parts().add(reducer)
        return reducer

    place, reducer = next(iter(parameters.values())).device, None
    if communicator.size > 1:
        if sync_batchnorm:
            _synchronize_batchnorm(bare, communicator, TorchOps(place), average)
        _parts().add(reducer := reducer_of(parameters, True))
        frozen = {name: p for name, p in bare.named_parameters() if not p.requires_grad and p.is_floating_point()}
        reducer.frozen = Frozen(frozen, reducer, unfreeze)
    # Alone, what is frozen is known by now: steps of what is unfrozen later count as they do in a world.
    know(parameters if reducer else dict(bare.named_parameters()), reducer)
    if record:
        verify_mode.add(bare, record)
    rng.set_apart(communicator.rank)
    _ours.update(optimizers)
    keep_memory()
    return (model, *others) if others else model


@contextmanager
def no_sync(model: torch.nn.Module) -> Iterator[None]:
    """Within it ``backward()`` only accumulates; the first one behind it reduces the gradients of all of them."""
    found = [reducer for other, reducer in _distributed if other is _bare(model)]
    if not found:
        raise ConfigError("this model is not distributed", where="ht.no_sync", fix="call ht.distribute(model) first")
    before = {reducer: reducer.reducing for reducer in found if reducer}
    for reducer in before:
        reducer.reducing = False
    try:
        yield
    finally:
        for reducer, reducing in before.items():
            reducer.reducing = reducing


def shard(loader: DataLoader) -> DataLoader:
    """The loader over this rank's share of the samples (shares.Share), ``batch_size`` of them at a time.

    Each sample comes once an epoch, on one rank; all ranks have the same number of batches. With ``shuffle`` each pass
    that begins after a step of a distributed optimizer has an order of its own: a function of rank 0's seed (the
    loader's generator's, or torch's), of how many loaders were sharded before, and of the steps made, or of what
    ``loader.set_epoch(number)`` says. So a look at a batch shifts nothing, on one rank or on all.

    When a pass in which steps were made comes to its end, and when the next one begins, the generators of torch, NumPy
    and ``random`` go on from (seed, epoch, rank), as they do in a run that resumes there; workers' begin each batch
    from (seed, epoch, rank, batch). Other passes leave torch's generator alone.

    The last batch, which may differ in length by one between ranks, counts by its samples (passes.weight).
    On all ranks. Raises ConfigError or DataError on all of them.
    """
    global _sharded
    communicator = _world()
    collectively(communicator, lambda: shares.check(loader))
    agree(communicator, shares.facts(loader))
    seed = loader.generator.initial_seed() if loader.generator else torch.initial_seed()
    seed = json.loads(communicator.broadcast_bytes(json.dumps(seed).encode()))
    own = mix(seed, _sharded) if _sharded else seed  # two loaders of one length must not give the same order
    number, _sharded = _sharded, _sharded + 1
    passes.unshared = _unshared()

    def ended(batches: int) -> None:
        agree(communicator, {"batches of the stream": str(batches)}, "ht.shard.end_of_stream")
        for reducer in {id(reducer): reducer for _, reducer in _distributed if reducer}.values():
            reducer.compare()

    here: Any = dict(ended=ended, number=number, together=record.together if (record := recording()) else 1)
    return passes.shared(loader, own, communicator.rank, communicator.size, **here)


def save(path: str | os.PathLike, **parts: Any) -> None:
    """``ht.save("last.ckpt", model=model, optimizer=optimizer, loader=loader, epoch=3)``: rank 0 writes one file.

    A part is anything with a ``state_dict``, a loader of ``ht.shard``, or numbers, strings and tensors. The file is a
    safetensors file; it appears under its name when it is complete. Other ranks may call this or not.
    """
    if rank() or recording():
        return
    data = state_bytes.pack({name: _state_of(part) for name, part in parts.items()})
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        files.put(Path(path), data)
    except OSError as error:
        raise CheckpointError(f"the checkpoint cannot be written: {error.strerror}", where=str(path)) from error


def load(path: str | os.PathLike, *, missing_ok: bool = False, **parts: Any) -> dict[str, Any]:
    """Gives ``parts`` back the state that ``save`` wrote, and returns the file's numbers and strings by name.

    Rank 0 reads, all ranks load; on all ranks, before or after ``distribute``. Nothing is unpickled. ``missing_ok``:
    {} if there is no file. Raises CheckpointError on all ranks.
    """
    communicator = _world()

    def read() -> bytes:
        if communicator.rank:
            return b""
        try:
            data = Path(path).read_bytes()
            state_bytes.unpack(data)
        except FileNotFoundError as error:
            if missing_ok:
                return b""
            raise CheckpointError("there is no checkpoint", where=str(path)) from error
        except OSError as error:
            raise CheckpointError(f"it cannot be read: {error.strerror}", where=str(path)) from error
        except ValueError as error:
            raise CheckpointError(str(error), where=str(path)) from error
        return data

    data = communicator.broadcast_bytes(collectively(communicator, read))
    if not data:
        return {}
    found = state_bytes.unpack(data)
    for name, part in parts.items():
        if name not in found:
            fix = f"it holds {', '.join(found)}"
            raise CheckpointError(f"there is no {name} in it", where=str(path), fix=fix, common=True)
        try:
            _owner(part).load_state_dict(found[name])
        except (RuntimeError, ValueError, KeyError, AttributeError) as error:
            what = f"it does not fit this {name}: " + " ".join(str(error).split())
            raise CheckpointError(what, where=str(path), common=True) from error
        if isinstance(part, torch.optim.Optimizer):
            _lay_slots(part)
        if isinstance(part, torch.nn.Module):
            for reducer in {reducer for _, reducer in _distributed if reducer}:
                reducer.loaded(part)
    return {name: value for name, value in found.items() if name not in parts}


def _several(value: Any) -> bool:
    """Return whether it is a tensor or an array, and not of one number."""
    return isinstance(value, (torch.Tensor, np.ndarray)) and tuple(value.shape) != (1,) * value.ndim


def _array(value: Any) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if _several(value):
            value = (value if value.layout == torch.strided else value.to_dense()).cpu()
            value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    try:
        return value if _several(value) and value.dtype.kind in WIDE else np.array(float(value))
    except (TypeError, ValueError) as error:
        fix = "give numbers, tensors or arrays of numbers"
        raise ConfigError(f"it cannot add up a {type(value).__name__}", where="ht.sum", fix=fix) from error


def _like(value: Any, total: np.ndarray) -> Any:
    """The sum as the value came: a number, a tensor or an array."""
    if not _several(value):
        return float(total)
    narrow = value.dtype in (torch.float32, np.float32, torch.complex64, np.complex64)
    half = value.dtype in (torch.float16, torch.bfloat16, np.float16)
    if narrow or half:
        total = total.astype(np.complex64 if total.dtype.kind == "c" else np.float32)
    return torch.from_numpy(total).to(value.device) if isinstance(value, torch.Tensor) else total


def _bare(model: torch.nn.Module) -> torch.nn.Module:
    """Without torch.compile's wrapper, whose parameters have other names."""
    return getattr(model, "_orig_mod", model)


def _owner(part: Any) -> Any:
    """What of a part has the ``state_dict``, or the part itself."""
    if isinstance(part, passes.Sharded):
        return part.share
    return _bare(part) if isinstance(part, torch.nn.Module) else part


def _state_of(part: Any) -> Any:
    owner = _owner(part)
    return owner.state_dict() if hasattr(owner, "state_dict") else owner


def _lay_slots(optimizer: torch.optim.Optimizer) -> None:
    """Slots as their parameters lie in memory, as the optimizer itself makes them."""
    for parameter, slots in optimizer.state.items():
        for name, x in slots.items():
            if isinstance(x, torch.Tensor) and x.shape == parameter.shape and x.stride() != parameter.stride():
                slots[name] = torch.empty_like(parameter, dtype=x.dtype, requires_grad=False).copy_(x)


def _trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _refuse(what: str, fix: str, where: str = WHERE) -> None:
    raise ConfigError(what, where=where, fix=fix)


def _check_models(models: Sequence[Any], sync_batchnorm: bool) -> None:
    for model in models:
        _check_model(model, sync_batchnorm)


def _check_model(model: torch.nn.Module, sync_batchnorm: bool) -> None:
    """What a rank can see by itself of each model."""
    if not isinstance(model, torch.nn.Module):
        _refuse(f"it takes a torch.nn.Module, not a {type(model).__name__}", "call ht.distribute(model, optimizer)")
    if isinstance(model, (DistributedDataParallel, DataParallel)):
        _refuse(f"the model is wrapped in {type(model).__name__}", "hand over the model itself")
    if not sync_batchnorm and any(isinstance(layer, torch.nn.SyncBatchNorm) for layer in model.modules()):
        _refuse("torch's SyncBatchNorm joins nothing without torch.distributed", "give sync_batchnorm=True")
    if any(model is other for other, _ in _distributed):
        _refuse("this model is distributed already", "call ht.distribute once for each model")
    if any(isinstance(p, torch.nn.parameter.UninitializedParameter) for p in model.parameters()):
        _refuse("the model has lazy layers without shapes", "run one batch through it first")


def _check_parameters(trained: Mapping[str, torch.nn.Parameter]) -> None:
    for name, p in trained.items():
        if id(p) in _known:
            _refuse("this parameter is distributed with another model", "distribute one module that holds both", name)
        if p.dtype not in DTYPES:
            _refuse(f"{p.dtype} cannot travel", "keep weights in float32, and compute under torch.autocast", name)


def _check(model: torch.nn.Module, optimizers: Sequence[Any]) -> None:
    """What a rank can see by itself of all models and optimizers."""
    trainable = _trainable(model)
    outside = hidden(model)
    if not trainable and outside:
        _refuse(not_part(outside), HIDDEN_FIX)
    if not trainable:
        _refuse("the model has no trainable parameter", "set requires_grad of a part before ht.distribute")
    _check_parameters(trainable)
    if len({p.device for p in trainable.values()}) > 1:
        _refuse("the model lies on several devices", "one rank drives one device: move the model to ht.device()")
    own = {id(p) for p in model.parameters()}
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if not isinstance(optimizer, torch.optim.Optimizer):
            _refuse(f"a {kind} is no optimizer", "call ht.distribute(model, optimizer, ...)")
        if hasattr(optimizer, "_allreduce_grad_async"):
            _refuse("the optimizer is Horovod's DistributedOptimizer", "hand over the optimizer in it")
        if not all(id(p) in own or id(p) in _known for group in optimizer.param_groups for p in group["params"]):
            mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
            names = [name for name, parameters in outside.items() if mine.intersection(map(id, parameters))]
            if names:
                _refuse(not_part(names), HIDDEN_FIX)
            _refuse(f"{kind} holds parameters that are not the model's", "make it of this model's parameters()")


def _facts(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, str]:
    """What the ranks must have in common."""
    facts = {"torch": torch.__version__, "models before": str(len(_distributed))}
    for name, x in [*model.named_parameters(), *model.named_buffers()]:
        trained = "" if x.requires_grad else ", not trained"
        # Flat buckets are in the order of memory.
        facts[name] = f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}, strides {x.stride()}{trained}"
    for k, optimizer in enumerate(optimizers):
        facts[f"optimizer {k}"] = type(optimizer).__name__
        for g, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                shown = f"{len(value)} tensors" if key == "params" else str(value)
                facts[f"optimizer {k}, group {g}, {key}"] = shown
    return facts


@torch.no_grad()
def _broadcast(communicator: Communicator, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Rank 0's weights, buffers and optimizer state to all ranks, bit for bit."""
    if communicator.size == 1:
        return
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    states = [optimizer.state_dict() for optimizer in optimizers]
    packed = collectively(communicator, lambda: b"" if communicator.rank else state_bytes.pack([tensors, states]))
    data = communicator.broadcast_bytes(packed)
    if communicator.rank:
        weights, states = state_bytes.unpack(data)
        for name, x in weights.items():
            tensors[name].copy_(x)
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)
            _lay_slots(optimizer)


def _tell_plain(communicator: Communicator, model: torch.nn.Module) -> None:
    """Tensors that are neither parameters nor buffers stay each rank's own, and may be meant to."""
    if communicator.size == 1:
        return
    own = {}
    for path, layer in model.named_modules():
        for name, x in vars(layer).items():
            # Of what is made anew in each forward, as by weight_norm, the sources are parameters.
            made = {f"{name}_orig", f"{name}_g"} & set(layer._parameters)
            if isinstance(x, torch.Tensor) and not (made or x.grad_fn or x.is_meta or x.is_quantized):
                own[f"{path}.{name}".lstrip(".")] = int(bits(x))
    everyone = [json.loads(part) for part in communicator.allgather_bytes(json.dumps(own).encode(), "tensors")]
    apart = [name for name in own if len({told.get(name, own[name]) for told in everyone}) > 1]
    if apart and not communicator.rank:
        what = f"{', '.join(apart)}: tensors of the model that are no buffers, and differ between ranks"
        fix = "register_buffer gives all ranks rank 0's; or set a seed before the model is made"
        warnings.warn(f"{what}; {WHERE}; {fix}", stacklevel=3)


def _tell_hidden(communicator: Communicator, model: torch.nn.Module) -> None:
    """A teacher may be kept in a list on purpose; layers that are to be trained are so by mistake."""
    names = hidden(model)
    if names and not communicator.rank:
        fix = f"{HIDDEN_FIX}; or set requires_grad_(False) of what is not to be trained"
        warnings.warn(f"{not_part(names)}, and nobody trains them; {WHERE}; {fix}", stacklevel=3)


def _statistics(model: torch.nn.Module, sync_batchnorm: bool) -> list[tuple[torch.nn.Module, str]]:
    """The places of running means and variances: what each rank gathers over its own batches."""
    joined = _BatchNorm if sync_batchnorm else ()
    layers = [layer for layer in model.modules() if isinstance(layer, _NormBase) and not isinstance(layer, joined)]
    names = ("running_mean", "running_var")
    return [(layer, name) for layer in layers for name in names if getattr(layer, name) is not None]


def _synchronize_batchnorm(model: torch.nn.Module, communicator: Communicator, ops: TorchOps, average: bool) -> None:
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    counts = [layer.num_batches_tracked for layer in layers]
    context = pt_batchnorm.prepare(model, communicator, ops, True)
    if average:
        context.weight = passes.weight

    def before() -> None:
        _parts().arrive(uneven_parts.FORWARD)
        _unshared().shared()  # as in update_bn

    context.before = before
    for layer, count in zip(layers, counts, strict=True):
        layer.num_batches_tracked = count  # it belongs to the user's state_dict


def _stepped(optimizer: torch.optim.Optimizer) -> dict[Reducer, list[torch.nn.Parameter]]:
    """The optimizer's parameters, by who reduces their gradients."""
    found: dict[Reducer, list[torch.nn.Parameter]] = {}
    late: list[torch.nn.Parameter] = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            _, reducer = _known.get(id(p), (p, None))
            if reducer is not None:
                found.setdefault(reducer, []).append(p)
            elif p.grad is not None and id(p) not in _known:
                late.append(p)
    # An optimizer may be this rank's own, but not over what is trained together.
    if late and size() > 1:
        if found or optimizer in _ours or _of_models(late):
            what = f"a parameter of shape {tuple(late[0].shape)} came to the model after ht.distribute"
            fix = "call ht.distribute when all parameters are there; one of this rank alone wants its own optimizer"
            raise ConfigError(what, where=f"{type(optimizer).__name__}.step()", fix=fix, common=True)
        if _distributed or _sharded:
            _tell_alone(type(optimizer).__name__)
    return found


@functools.cache
def _tell_alone(kind: str) -> None:
    """A model that was forgotten, or a copy of one, looks like an optimizer of this rank's own."""
    if not rank():
        what = f"{kind}.step(): no parameter of this optimizer came to ht.distribute"
        warnings.warn(f"{what}, so each rank trains them by its own gradients", stacklevel=2)


def _of_models(parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Whether one of them is in a model that is distributed."""
    wanted = {id(p) for p in parameters}
    return any(id(p) in wanted for model, _ in _distributed for p in model.parameters())


def _before_step(optimizer: torch.optim.Optimizer, arguments: tuple, keywords: dict[str, Any]) -> Any:
    """A step with gradients that this rank alone has would set the ranks apart, and nobody would notice."""
    if (record := recording()) and optimizer in _ours:
        verify_mode.before_step(optimizer, record)
    found = _stepped(optimizer)
    if not found:
        return None
    if backward.current_pass() < 0:
        backward.after_failure()
    _parts().arrive(uneven_parts.STEP)
    for reducer, parameters in found.items():
        reducer.stepping = True  # should it call backward() itself
        if reducer.begun:  # also where the gradients are under way, and not to be seen
            what, fix = "the gradients of this backward() are not reduced yet", "call it when backward() has returned"
            raise ConfigError(what, where=f"{type(optimizer).__name__}.step()", fix=fix, common=True)
        if reducer.unreduced and any(p.grad is not None for p in parameters):
            what = "the gradients of the last backward() were not reduced"
            fix = "call the last backward() before a step outside of ht.no_sync"
            if reducer.failed:
                what, fix = "an error ended the last backward()", "clear the gradients and go on with the next batch"
            raise ConfigError(what, where=f"{type(optimizer).__name__}.step()", fix=fix, common=True)
        reducer.reduce_manual(parameters)
    if not isinstance(optimizer, torch.optim.LBFGS):
        return None
    # Its search goes by the loss: by each rank's own, the ranks would go different ways.
    closure, reducer = keywords.get("closure", arguments[-1]), next(iter(found))

    def joined() -> torch.Tensor:
        loss = closure().detach()
        return loss.new_tensor(reducer.global_loss(float(loss), sum))

    return (arguments[0], joined), {}


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if any(id(p) in _known for group in optimizer.param_groups for p in group["params"]):
        shares.stepped()
    for reducer, parameters in _stepped(optimizer).items():
        reducer.stepping = False
        reducer.used(optimizer, [p for p in parameters if p.grad is not None])
    if (record := recording()) and optimizer in _ours:
        verify_mode.after_step(optimizer, record, _world())


if _record := recording():
    verify_mode.prepare(_record)
# Of all optimizers, also those that are made later.
register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
