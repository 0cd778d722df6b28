"""``hk.distribute(sharded=True)``: trainings beside the same ones with whole slots on each rank."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import hvd_train.keras as hk
from hvd_train.errors import ConfigError
from tests.script.keras.cases.models import (
    BATCH,
    FOLDER,
    TENSORFLOW,
    compiled,
    cross_entropy,
    digits,
    fit,
    network,
    trained,
)
from tests.script.keras.cases.networks import descent, gan

OPTIM = keras.optimizers
SLOTS = ("momentums", "_momentums", "_velocities")  # attributes of some optimizers
HIDDEN = 37  # entries that no number of ranks divides


class Signs(OPTIM.SGD):
    """Of a user's own, and elementwise."""

    def update_step(self, gradient, variable, learning_rate):
        moved = keras.ops.sign(gradient) * keras.ops.cast(learning_rate, variable.dtype)
        self.assign_sub(variable, keras.ops.cast(moved, variable.dtype))


class Trusted(OPTIM.SGD):
    """Scales each tensor's step by its norm, as LARS does."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient * keras.ops.norm(gradient), variable, learning_rate)


class Centralized(OPTIM.SGD):
    """Subtracts the mean of a gradient's columns where it is asked to, which ``get_config`` does not tell."""

    def __init__(self, *rates, centralize=False, **options):
        super().__init__(*rates, **options)
        self.centralize = centralize

    def update_step(self, gradient, variable, learning_rate):
        if self.centralize and len(gradient.shape) > 1:
            gradient -= keras.ops.mean(gradient, axis=0, keepdims=True)
        super().update_step(gradient, variable, learning_rate)


def excluding(optimizer):
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: OPTIM.SGD(0.1),
    "momentum": lambda: OPTIM.SGD(0.1, momentum=0.9, nesterov=True, global_clipnorm=0.3, weight_decay=0.01),
    "adam": lambda: OPTIM.Adam(0.01, amsgrad=True, clipnorm=0.1),
    "adam fused": lambda: OPTIM.Adam(0.01),
    "adamw": lambda: excluding(OPTIM.AdamW(0.01, weight_decay=0.1)),
    "nadam": lambda: OPTIM.Nadam(0.01),
    "rmsprop": lambda: OPTIM.RMSprop(0.01, momentum=0.5, centered=True),
    "adagrad": lambda: OPTIM.Adagrad(0.01),
    "adadelta": lambda: OPTIM.Adadelta(0.5),
    "adamax": lambda: OPTIM.Adamax(0.01),
    "ftrl": lambda: OPTIM.Ftrl(0.01),
    "lion": lambda: OPTIM.Lion(0.001, weight_decay=0.1),
    "of the user": lambda: Signs(0.001),
    "averaged": lambda: OPTIM.Adam(0.01, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3),
    "accumulated": lambda: excluding(OPTIM.AdamW(0.01, weight_decay=0.1, gradient_accumulation_steps=2)),
    "scheduled": lambda: OPTIM.Adam(OPTIM.schedules.ExponentialDecay(0.01, 3, 0.9)),
    "scaled": lambda: OPTIM.LossScaleOptimizer(OPTIM.Adam(0.01), initial_scale=8.0),
}
FEW = ("adam fused", "accumulated", "scaled")  # in every run
REST = tuple(name for name in OPTIMIZERS if name not in FEW)


def limited():
    """A constraint looks at whole columns."""
    model = network(hidden=HIDDEN)
    model.layers[-1].kernel.constraint = keras.constraints.MaxNorm(0.5)
    return model


def compared(names):
    """Weights and whole slots, once as they are and once divided."""

    def case():
        results = {}
        for name in names:
            for sharded in (False, True):
                keras.utils.set_random_seed(3)
                model = compiled(limited(), OPTIMIZERS[name]())
                model.optimizer.build(model.trainable_variables)
                inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
                lists = [x for key, x in vars(inner).items() if isinstance(x, list) and key in SLOTS]
                whole = [weakref.ref(v) for x in lists for v in x]
                del lists
                hk.distribute(model, sharded=sharded)
                gc.collect()
                freed = sharded and hk.size() > 1
                assert all((v() is None) == freed for v in whole), f"{name}: whole slots stay in memory"
                fit(model, *digits())
                key = f"{name}{' divided' * sharded}"
                values = trained(model)
                store: dict[str, np.ndarray] = {}
                model.optimizer.save_own_variables(store)
                inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
                kept = sum(int(np.prod(v.shape)) for v in inner.variables)
                results |= {f"{key}/{k}": v for k, v in values.items()}
                results |= {f"{key}/slots/{k}": np.array(v) for k, v in store.items()}
                results |= {f"own/{key} kept": np.array(kept)}
        return results

    return case


def steps_per_execution():
    model = hk.distribute(compiled(network(hidden=HIDDEN), OPTIM.Adam(0.01), steps_per_execution=3), sharded=True)
    return trained(model, fit(model, *digits()))


def looped(graph: bool):
    """A loop of the script, in which a layer is of no use and has no gradient."""

    def case():
        x, y = digits()
        model, optimizer, loss_of = network(hidden=HIDDEN), OPTIM.AdamW(0.01), cross_entropy()
        hk.distribute(model, optimizer, sharded=True)

        def step(x, y):
            return descent(optimizer, model.trainable_weights, lambda: [loss_of(y, model(x)) + sum(model.losses)])

        if graph:
            import tensorflow as tf

            step = tf.function(step)
        for part in hk.shard(x, y, batch_size=BATCH):
            step(*part)
        return trained(model)

    return case


def gone_on():
    """Fit, save and fit on; then other models read what was saved, with whole slots and with parts, and fit on."""
    x, y = digits()
    path, weights = FOLDER / f"sharded{hk.size()}.keras", FOLDER / f"sharded{hk.size()}.weights.h5"
    model = hk.distribute(compiled(network(hidden=HIDDEN), OPTIM.Adam(0.01)), sharded=True)
    fit(model, x, y)
    model.save(path)
    model.save_weights(weights)
    hk.barrier()
    fit(model, x, y)
    results = {"0": trained(model)}
    for sharded in (False, True):
        read = keras.saving.load_model(path)
        hk.distribute(read, sharded=sharded)
        fit(read, x, y)
        results[f"read {sharded}"] = trained(read)
    other = compiled(network(hidden=HIDDEN), OPTIM.Adam(0.01))
    other.optimizer.build(other.trainable_variables)  # which alone hk.distribute leaves to Keras
    hk.distribute(other, sharded=True)
    other.load_weights(weights)
    fit(other, x, y)
    results["weights"] = trained(other)
    # Compiled anew with the same optimizer, whose slots go on, and whole again.
    compiled(other, other.optimizer)
    hk.distribute(other)
    fit(other, x, y, epochs=1)
    compiled(other, other.optimizer)
    hk.distribute(other, sharded=True)
    fit(other, x, y, epochs=1)
    fit(model, x, y)
    results["again"], results["again plain"] = trained(other), trained(model)
    for earlier in sorted(FOLDER.parent.glob(f"{FOLDER.name}/sharded*.keras")):
        read = keras.saving.load_model(earlier)
        hk.distribute(read, sharded=True)
        fit(read, x, y)
        results[f"from {earlier.stem}"] = trained(read)
    return {f"{name}/{k}": v for name, values in results.items() for k, v in values.items()}


def savers():
    """Callbacks save on rank 0, also in the middle of an epoch; a backup goes on."""
    x, y = digits()
    c, folder = keras.callbacks, FOLDER / f"savers{hk.size()}"
    model = hk.distribute(compiled(network(hidden=HIDDEN), OPTIM.Adam(0.01)), sharded=True)
    saved = [
        c.ModelCheckpoint(str(folder / "best.keras"), monitor="loss", save_best_only=True),
        c.ModelCheckpoint(str(folder / "often.weights.h5"), save_weights_only=True, save_freq=4),
        c.BackupAndRestore(folder / "backup", delete_checkpoint=False),
    ]
    fit(model, x, y, epochs=2, callbacks=saved)
    results = {"0": trained(model)}
    hk.barrier()
    read = keras.saving.load_model(folder / "best.keras")
    results["best"] = trained(read)
    results["best"] |= {f"slots/{i}": np.array(v) for i, v in enumerate(read.optimizer.variables)}
    other = hk.distribute(compiled(network(hidden=HIDDEN), OPTIM.Adam(0.01)), sharded=True)
    fit(other, x, y, epochs=3, callbacks=[c.BackupAndRestore(folder / "backup")])
    fit(model, x, y, epochs=1)
    results["restored"], results["restored plain"] = trained(other), trained(model)
    return {f"{name}/{k}": v for name, values in results.items() for k, v in values.items()} | {
        "own/files": sorted(path.name for path in folder.glob("*"))
    }


def two_optimizers():
    """An optimizer for each half of a GAN: they say at their first step which variables they have."""
    results = {}
    for sharded in (False, True):
        keras.utils.set_random_seed(3)
        values = gan(sharded=sharded)()
        results |= {f"gan{' divided' * sharded}/{k}": v for k, v in values.items()}
    return results


def refused():
    """name -> the message."""
    found = {}
    makers = {
        "adafactor": lambda: OPTIM.Adafactor(0.01),
        "lamb": lambda: OPTIM.Lamb(0.01),
        "muon": lambda: OPTIM.Muon(0.01),
        "trusted": lambda: Trusted(0.01),
        "centralized": lambda: Centralized(0.01, centralize=True),
    }
    hk.distribute(compiled(optimizer=Centralized(0.01)), sharded=True)
    for name, make in makers.items():
        try:
            hk.distribute(compiled(optimizer=make()), sharded=True)
            found[name] = ""
        except ConfigError as error:
            found[name] = str(error)
    assert all(
        re.match(".* cannot be divided: a step on parts of tensors .*; leave sharded=True out", x)
        for x in found.values()
    ), found
    return {"refused": np.array(sorted(found))}


CASES = {
    "sharded_few": compared(FEW),
    "sharded_more": compared(REST[::2]),
    "sharded_rest": compared(REST[1::2]),
    "sharded_loop": looped(False),
    "sharded_gone_on": gone_on,
    "sharded_savers": savers,
    "sharded_refused": refused,
    "sharded_gan": two_optimizers,
}
if TENSORFLOW:
    CASES |= {"sharded_steps_per_execution": steps_per_execution, "sharded_graph": looped(True)}
