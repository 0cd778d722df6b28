"""The functions of ``hvd_train.keras``."""

from __future__ import annotations

import contextlib
import os
import warnings
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from hvd_train.frameworks import KERNELS
from hvd_train.frontends.devices import gpu_index
from hvd_train.launch.environment import keep_memory, share_memory, threads, world

# TensorFlow reads both while it loads; the user's settings win. Level 2 hides all but errors: with 64 bits, its graph
# optimizer prints dozens of warnings about types that it skips.
os.environ.update(KERNELS | {"TF_CPP_MIN_LOG_LEVEL": "2"} | os.environ)

import keras

from hvd_train.compression import make
from hvd_train.config.conflicts import COMPRESSION, LOSS_SCALE, check_together
from hvd_train.config.modes import ALLREDUCE
from hvd_train.core.agreement import collectively
from hvd_train.errors import ConfigError
from hvd_train.script.keras import loop, losses, verify_mode
from hvd_train.script.keras.backends import BACKENDS, opened, slow_rank_report
from hvd_train.script.keras.build import build_at_first, is_built
from hvd_train.script.keras.elementwise import check_elementwise
from hvd_train.script.keras.local_training import check_local
from hvd_train.script.keras.patches import MARK, Patches, optimizers_of, with_rates
from hvd_train.script.keras.start import Start, scaled
from hvd_train.script.shared import main_rank
from hvd_train.script.shared.record import recording
from hvd_train.script.shared.world import exchange_options, launched_world

Model = TypeVar("Model", bound=keras.Model)
WHERE = "hk.distribute"


def distribute(
    model: Model,
    *given_optimizers: keras.optimizers.Optimizer,
    shard: bool = True,
    lr_scaling: str = "none",
    seed: int = 0,
    compression: str = "none",
    sharded: bool = False,
    mode: str = ALLREDUCE,
    agreement_every_n_steps: int = 100,
    **options: Any,
) -> Model:
    """Train a compiled model on all ranks together; return it. Call it again after another ``compile``.

    For your own training loop pass the optimizers too, ``hk.distribute(model, optimizer)``. The model must be built,
    but need not be compiled, and ``optimizer.apply`` averages gradients over ranks. A model may have several
    optimizers. A model that is not built yet is built from the first batch of ``fit``.

    From now on call ``fit``, ``evaluate`` and ``predict`` on all ranks. Each takes its part of the data
    (``shard=False``: you have divided the data already), and all return the same. ``seed``: of the order of samples if
    ``fit`` shuffles. ``lr_scaling``: "linear" multiplies the learning rate by the number of ranks, once for each
    optimizer. ``compression``: none, fp16, bf16, int8, int4, topk, threshold or powersgd, with its options
    (``ratio=0.01``). ``sharded``: each rank keeps the optimizer state for its part of the weights and updates that part
    (ZeRO, stage 1). It needs elementwise optimizers, and ``model.save`` on all ranks.

    ``mode="outer"`` with ``outer_steps``, ``outer_lr``, ``outer_momentum``: each rank takes steps with its local
    gradients. After so many steps, and at the end of an epoch, an outer optimizer synchronizes the weights, as in
    ``hvd-train fit``. ``mode="streaming"``, with ``fragments``, ``stream_delay`` and ``mix`` too, synchronizes a part
    of the weights at a time while training continues.

    The ranks compare weights and learning rates every ``agreement_every_n_steps`` (0: never), at the end of an epoch
    and in ``evaluate`` and ``predict``. Raises CommunicationError if they differ, and ConfigError; both on all ranks.
    """
    communicator, backend = opened()
    # These checks may fail on some ranks only: ``collectively`` raises the error on all of them.
    collectively(communicator, lambda: _check(model, given_optimizers, lr_scaling, compression))
    if sharded:
        collectively(communicator, lambda: check_elementwise([*given_optimizers, *optimizers_of(model)], WHERE))
    exchange = collectively(communicator, lambda: exchange_options(WHERE, compression, options, mode=mode))
    local = not exchange.spec.gradients
    if local:
        chosen = {id(x): x for x in (*given_optimizers, *optimizers_of(model))}
        collectively(communicator, lambda: check_local(list(chosen.values()), mode, sharded, lr_scaling, WHERE))
    compressor = make(compression, communicator.size, communicator.rank, **exchange.options(compression))
    before = getattr(model, MARK, None)
    # ``compile`` makes a new loss tracker, which tells whether the model was compiled again.
    patches = Patches(model._loss_tracker, before.fits if before else 0, given_optimizers)
    if before:
        before.undo()
    patches.put(model, MARK, patches)
    optimizers = optimizers_of(model)
    for x in optimizers:
        patches.put(x, MARK, patches)
    # Also on a single rank, whose epochs must have the same orders.
    loop.follow(optimizers)
    if communicator.size == 1 and not recording() and not local:
        return model
    arguments = {"shard": shard, "lr_scaling": lr_scaling, "seed": seed, "compression": compression, "sharded": sharded}
    arguments |= {"mode": mode, "agreement_every_n_steps": agreement_every_n_steps, **options}
    start = Start(model, optimizers, communicator, backend, exchange, compressor, patches, arguments, WHERE)
    if is_built(model):
        start.begin()
    else:
        # To plan the buckets we need the weights: wait for the first batch.
        build_at_first(model, communicator, patches, start.begin)
    keep_memory()
    return model


def global_weights(model: Any) -> AbstractContextManager[None]:
    """Give the model its global weights in this context: ``with hk.global_weights(model):``.

    With ``hk.distribute(..., mode="outer")`` these are the weights of the last synchronization; otherwise nothing
    changes. Nothing is exchanged, so not all ranks need to call it. ``evaluate``, ``predict`` and ``save`` do so
    themselves.
    """
    local = getattr(getattr(model, MARK, None), "local", None)
    if not local:
        return contextlib.nullcontext()
    local.warn_if_never_synchronized()
    return local.global_weights()


def rank() -> int:
    """Return this process' number, from 0. Needs no ``distribute``."""
    return world().rank


def size() -> int:
    """Return the number of ranks; 1 for a script that was started alone."""
    return world().size


def is_main() -> bool:
    """Return whether this is rank 0, which prints and writes files for all."""
    return rank() == 0


def print(*values: Any, **options: Any) -> None:
    """Python's ``print`` on rank 0 only. All ranks compute the values: ``hk.print(hk.reduce(loss))`` is right."""
    main_rank.print_on(is_main(), *values, **options)


def tqdm(*arguments: Any, **options: Any) -> Any:
    """tqdm's progress bar over an iterable, shown only on rank 0: ``for x, y in hk.tqdm(batches):`` on all ranks."""
    return main_rank.progress_on(is_main(), "hk.tqdm", *arguments, **options)


def times() -> dict[str, float]:
    """Return what the time was spent on since the last call, in seconds, as the mean over ranks; {} on one rank.

    ``{"compute": 8.1, "exchange": 2.0, "wait": 0.3, "evaluate": 1.1}``: waiting for transfers; waiting for the slowest
    rank; evaluations within ``fit``; ``compute`` is everything else, with waiting for input. ``start`` is the time
    until the first step. Nothing is exchanged: the ranks have done so up to a few seconds ago.
    """
    return slow_rank_report().seconds()


def barrier() -> None:
    """Wait until all ranks have called this, for example before they read what rank 0 has just saved.

    After steps in your training loop it averages running statistics, as the end of a loop does.
    """
    communicator = opened()[0]
    communicator.barrier()
    loop.average_statistics()


def _check(model: Any, user_optimizers: Any, lr_scaling: str, compression: str) -> None:
    wrong = [x for x in user_optimizers if not isinstance(x, keras.optimizers.Optimizer)]
    if wrong:
        raise _error(f"a {type(wrong[0]).__name__} is not an optimizer", "call hk.distribute(model, optimizer)")
    if getattr(model, "optimizer", None) is None and not user_optimizers:
        fix = "call model.compile(...) first; for a loop of your own, hk.distribute(model, optimizer)"
        raise _error("the model is not compiled", fix)
    patches = getattr(model, MARK, None)
    if patches and patches.compiled is model._loss_tracker:
        raise _error("the model is distributed already", "call hk.distribute once after each compile")
    optimizers = [*user_optimizers, *optimizers_of(model)]
    if any(getattr(x, MARK, patches) is not patches for x in optimizers):
        raise _error("this optimizer trains another distributed model", "give each model its own optimizer")
    if lr_scaling not in ("none", "linear"):
        raise _error(f"lr_scaling={lr_scaling!r}", "it is none or linear")
    schedule, rates = keras.optimizers.schedules.LearningRateSchedule, with_rates(optimizers)
    if lr_scaling == "linear" and any(isinstance(getattr(x, "_learning_rate", None), schedule) for x in rates):
        raise _error("lr_scaling cannot multiply a LearningRateSchedule", "multiply it yourself by hk.size()")
    # The rate in an optimizer's checkpoint may have been multiplied before it was saved.
    if lr_scaling == "linear" and world().size > 1 and any(int(x.iterations) for x in set(rates) - set(scaled)):
        fix = "leave lr_scaling out, and multiply it by hk.size() if it was not"
        raise _error("the optimizer has made steps before, perhaps with a multiplied learning rate", fix)
    scaled_loss = any(isinstance(x, keras.optimizers.LossScaleOptimizer) for x in optimizers)
    compressed = f"compression={compression!r}" * (compression != "none")
    check_together({COMPRESSION: compressed, LOSS_SCALE: "LossScaleOptimizer" * scaled_loss}, WHERE)
    losses.check(model)
    alone = [x.name for x in model._flatten_layers() if getattr(x, "synchronized", False)]
    if alone:
        raise _error(f"{', '.join(alone)}: synchronized=True has no effect between ranks", "leave it out")


def _error(what: str, fix: str) -> ConfigError:
    return ConfigError(what, where=WHERE, fix=fix)


def _share_cores() -> None:
    """Set this rank's share of the cores and its memory; must run before TensorFlow's first operation."""
    here = launched_world()
    if here.size == 1 or keras.backend.backend() not in BACKENDS:
        return
    if keras.backend.backend() == "tensorflow":
        share_memory()
        import tensorflow as tf

        gpus = tf.config.list_physical_devices("GPU")
        try:
            tf.config.threading.set_intra_op_parallelism_threads(threads("auto", here))
            tf.config.threading.set_inter_op_parallelism_threads(threads("auto", here))
            if gpus:
                tf.config.set_visible_devices(gpus[gpu_index(len(gpus), here.local_rank, None)], "GPU")
        # TensorFlow raises if threads change after its first operation.
        except RuntimeError:
            warnings.warn(
                "import hvd_train.keras before TensorFlow's first operation: threads stay as they are", stacklevel=2
            )
    else:
        import torch

        torch.set_num_threads(threads("auto", here))
        if torch.cuda.is_available():
            torch.cuda.set_device(gpu_index(torch.cuda.device_count(), here.local_rank, None))


_share_cores()
if recording():
    verify_mode.prepare()
