"""One rank of local training in scripts: ``python -m tests.script.keras.local_worker FOLDER``.

Writes FOLDER/facts.SIZE.RANK.json. A model of one layer without a bias has the quadratic of tests/script/outer_formula.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np

import hvd_train.keras as hk
from hvd_train.errors import TrainError
from tests.limits import SECONDS
from tests.script.outer_formula import LR, OUTER, STEPS, STREAMED, STREAMING, first, target

ENTRIES = 5
TENSORFLOW = keras.backend.backend() == "tensorflow"


def data(repeats: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return STEPS global batches of a sample for each rank, each ``repeats`` times."""
    rows = [target(ENTRIES, rank, step) for step in range(1, STEPS + 1) for _ in range(repeats) for rank in ranks()]
    return np.ones((len(rows), 1)), np.array(rows)


def ranks() -> range:
    return range(hk.size())


def zeros() -> tuple[np.ndarray, np.ndarray]:
    return np.ones((hk.size(), 1)), np.zeros((hk.size(), ENTRIES))


def rate() -> float:
    """The mean of squares has 2 / ENTRIES times the gradient of half their sum."""
    return LR * ENTRIES / 2


def begun(optimizer=None, compiling: dict | None = None, **options) -> Any:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(ENTRIES, use_bias=False)])
    model.set_weights([first(ENTRIES)[None] + hk.rank()])  # rank 0's counts
    model.compile(optimizer or keras.optimizers.SGD(rate()), "mse", **compiling or {})
    return hk.distribute(model, **OUTER | options)


def weights(model) -> list[float]:
    return model.get_weights()[0].reshape(-1).tolist()


def fitted(model, *, repeats: int = 1, **options) -> Any:
    return model.fit(*data(repeats=repeats), batch_size=1, shuffle=False, verbose=0, **options)


def fits() -> dict[str, Any]:
    model = begun()
    history = fitted(model, epochs=2, validation_data=zeros())
    facts = {"val_loss": history.history["val_loss"], "fit": weights(model)}
    model.fit(*data(), batch_size=1, shuffle=False, verbose=0)  # a third epoch, with the momentum of the others
    facts["again"] = weights(model)
    ways = {
        "accumulated": (keras.optimizers.SGD(rate(), gradient_accumulation_steps=2), {}, 2),
        "eager": (None, {"run_eagerly": True}, 1),
    }
    if TENSORFLOW:
        ways["several in one execution"] = (None, {"steps_per_execution": 3}, 1)
    for name, (optimizer, compiling, repeats) in ways.items():
        model = begun(optimizer=optimizer, compiling=compiling)
        fitted(model, epochs=2, repeats=repeats)
        facts[name] = weights(model)
    model = begun()
    best = keras.callbacks.EarlyStopping("val_loss", mode="max", patience=9, restore_best_weights=True)
    fitted(model, epochs=3, validation_data=zeros(), callbacks=[best])
    facts["best"] = weights(model)
    return facts


class Stops(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1 and hk.rank() == hk.size() - 1:
            self.model.stop_training = True


def stopped() -> dict[str, Any]:
    """The last rank wants to stop after its second step: all know at the join, and make one step more."""
    model = begun()
    history = fitted(model, epochs=2, callbacks=[Stops()])
    return {"stopped": weights(model), "epochs": len(history.history["loss"])}


class Killed(Exception):
    pass


class Kill(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise Killed


def backups(folder: Path) -> dict[str, Any]:
    """Three epochs in one go, and cut after two of them, with slots and the outer momentum; and without their file."""
    ends, caught = [], []
    for case in ("whole", "cut", "lost"):
        model, backup = begun(optimizer=keras.optimizers.Adam(LR)), folder / f"{case}{hk.size()}"
        saver = keras.callbacks.BackupAndRestore(backup, delete_checkpoint=case == "whole")
        try:
            fitted(model, epochs=3, callbacks=[saver, *([] if case == "whole" else [Kill()])])
        except Killed:
            if case == "lost" and not hk.rank():
                (backup / "local_training.safetensors").unlink()
            model = begun(optimizer=keras.optimizers.Adam(LR))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                fitted(model, epochs=3, callbacks=[saver])
        ends.append(weights(model))
        hk.barrier()
    told = any("is missing: the outer momentum begins with zeros" in str(x.message) for x in caught)
    moved = ends[0] != weights(begun())
    loaded = keras.optimizers.Adam(LR)
    loaded.iterations.assign(7)  # as from the file of a model
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        begun(optimizer=loaded)
        begun(optimizer=keras.optimizers.Adam(LR))
    lines = [str(x.message) for x in caught if "has already made 7 steps: the outer momentum begins" in str(x.message)]
    told &= len(lines) == 1
    return {"backup": ends[0] == ends[1], "moved": moved, "told": told == (hk.rank() == 0)}


def by_batches(folder: Path) -> dict[str, Any]:
    """Four steps, of which three have joined."""
    model, (x, y) = begun(), data()
    for step in range(4):
        at = slice(step * hk.size() + hk.rank(), step * hk.size() + hk.rank() + 1)
        model.train_on_batch(x[at], y[at])
    facts = {"local": weights(model)}
    with hk.global_weights(model):
        facts["within"] = weights(model)
    facts["loss"] = float(model.evaluate(*zeros(), batch_size=1, verbose=0))
    facts["predicted"] = model.predict(np.ones((hk.size(), 1)), batch_size=1, verbose=0)[0].tolist()
    path = folder / f"model{hk.size()}.keras"
    model.save(path)
    model.save_weights(path.with_suffix(".weights.h5"))
    facts["after"] = weights(model)
    hk.barrier()
    facts["saved"] = weights(keras.models.load_model(path))
    model.load_weights(path.with_suffix(".weights.h5"))  # in the middle of a round, on all ranks
    facts["loaded"] = weights(model)
    facts["nothing learned since"] = float(model.evaluate(*zeros(), batch_size=1, verbose=0))
    return facts


def streamed() -> dict[str, Any]:
    """A layer with a bias is a sum of two tensors."""

    def made() -> Any:
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(ENTRIES)])
        model.set_weights([first(ENTRIES)[None], np.zeros(ENTRIES)])
        model.compile(keras.optimizers.SGD(rate()), "mse")
        return hk.distribute(model, **STREAMING)

    def both(model) -> list[list[float]]:
        return [x.reshape(-1).tolist() for x in model.get_weights()]

    model, (x, y) = made(), data()
    for step in range(STREAMED):
        at = slice(step * hk.size() + hk.rank(), step * hk.size() + hk.rank() + 1)
        model.train_on_batch(x[at], y[at])
    facts = {"streamed": both(model)}
    with hk.global_weights(model):
        facts["streamed within"] = both(model)
    model = made()
    fitted(model, epochs=2, validation_data=zeros())
    return facts | {"streamed fit": both(model)}


def loops() -> dict[str, Any]:
    """Two passes over ``hk.shard``, as two epochs of ``fit``."""
    if not TENSORFLOW:
        return {}
    import tensorflow as tf

    facts = {}
    for name in ("loop", "loop in a graph"):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(ENTRIES, use_bias=False)])
        model.set_weights([first(ENTRIES)[None]])
        optimizer = keras.optimizers.SGD(rate())
        hk.distribute(model, optimizer, **OUTER)

        def step(x, y, model=model, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)

        step = tf.function(step) if "graph" in name else step
        for _ in range(2):
            for x, y in hk.shard(*data(), batch_size=1, shuffle=False):
                step(x, y)
        facts[name] = weights(model)
    return facts


def statistics() -> dict[str, Any]:
    """A join after two steps, and a third step behind it."""
    layer = keras.layers.BatchNormalization(momentum=0.0)
    model = keras.Sequential([keras.Input((1,)), layer, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    hk.distribute(model, **OUTER | {"outer_steps": 2})
    for step in range(3):
        model.train_on_batch(np.arange(4.0).reshape(4, 1) + 10 * hk.rank() + step, np.zeros((4, 1)))
    means = [float(layer.moving_mean[0])]
    with hk.global_weights(model):
        means.append(float(layer.moving_mean[0]))
    return {
        "mean": [*means, float(layer.moving_mean[0])],
        "expected mean": [3.5 + 10 * hk.rank(), 2.5 + 5 * (hk.size() - 1), 3.5 + 10 * hk.rank()],
    }


def caught(work) -> str:
    try:
        work()
    except TrainError as error:
        return str(error)
    return "nothing"


def refused() -> dict[str, str]:
    def two() -> None:
        model = begun_plain()
        model.other = keras.optimizers.SGD(0.1)
        hk.distribute(model, mode="outer")

    def begun_plain(optimizer=None) -> Any:
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(optimizer or keras.optimizers.SGD(0.1), "mse")
        return model

    def message(optimizer=None, **options) -> str:
        return caught(lambda: hk.distribute(begun_plain(optimizer), **{"mode": "outer"} | options))

    def within() -> None:
        model = begun()
        model.train_on_batch(*(a[:1] for a in data()))
        with hk.global_weights(model):
            model.set_weights(model.get_weights())

    return {
        "two optimizers": caught(two),
        "loss scale": message(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))),
        "ema": message(keras.optimizers.SGD(0.1, use_ema=True)),
        "sharded": message(sharded=True),
        "lr_scaling": message(lr_scaling="linear"),
        "load within": caught(within),
    }


def main(folder: Path) -> None:
    keras.config.set_floatx("float64")
    facts: dict[str, Any] = {}
    for case in (
        fits,
        lambda: backups(folder),
        stopped,
        lambda: by_batches(folder),
        streamed,
        loops,
        statistics,
        lambda: {"refused": refused()},
    ):
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        facts |= case()
    (folder / f"facts.{hk.size()}.{hk.rank()}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
