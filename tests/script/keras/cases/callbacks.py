"""Callbacks."""

from __future__ import annotations

import keras
import numpy as np

import hvd_train.keras as hk
from tests.script.keras.cases.models import (
    BATCH,
    COUNT,
    FOLDER,
    GLOBAL,
    SGD,
    TENSORFLOW,
    compiled,
    digits,
    fit,
    trained,
)


class StopOnOne(keras.callbacks.Callback):
    """A user's own: one rank alone wants to stop, in the third step."""

    def on_train_batch_end(self, batch, logs=None):
        if hk.rank() == hk.size() - 1 and batch == 2:
            self.model.stop_training = True


class Scores(keras.callbacks.Callback):
    """Evaluates within an epoch; Keras adds what it scores to the sums of the epoch."""

    def __init__(self):
        super().__init__()
        self.scores = []

    def on_train_batch_end(self, batch, logs=None):
        if batch == 4:
            self.scores.append(self.model.evaluate(*digits(101), batch_size=BATCH, verbose=0))


def callbacks():
    c, folder = keras.callbacks, FOLDER / f"own{hk.size()}.{hk.rank()}"
    x, y = digits()
    model = hk.distribute(compiled())
    chosen = [
        c.EarlyStopping("val_loss", patience=1, min_delta=0.02),
        c.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.2, cooldown=0),
        c.CSVLogger(str(folder / "log.csv")),
        c.ModelCheckpoint(str(folder / "best.keras"), save_best_only=True),
    ]
    if hk.rank() == 0:
        folder.mkdir()
    scores = Scores()
    history = fit(model, x, y, epochs=12, validation_data=digits(157), callbacks=[*chosen, scores])
    saved = keras.saving.load_model(FOLDER / f"own{hk.size()}.0" / "best.keras") if hk.rank() == 0 else model
    more = {"epochs": len(history["loss"]), "scores": scores.scores}
    return trained(model, history, **more, files=sorted(p.name for p in folder.glob("*"))) | {
        "own/class": type(saved.optimizer).__module__
    }


def stops():
    """(steps after a rank's own wish to stop, steps after a NaN on one rank): equal on all ranks, and no hang."""
    steps = []
    for extra in (StopOnOne(), keras.callbacks.TerminateOnNaN()):
        x, y = digits()
        if not isinstance(extra, StopOnOne):
            x[GLOBAL - 1] = np.nan  # the last rank's, step 0
        model = hk.distribute(compiled())
        fit(model, x, y, epochs=3, callbacks=[extra])
        steps.append(int(model.optimizer.iterations))
    steps = {"own/steps" if hk.size() == 1 else "steps": np.array(steps)}
    return steps | drawn_validation() | (wrapped() if not TENSORFLOW else {})


def drawn_validation():
    """Nobody can divide it, so every rank scores it, and each draws other samples."""
    x, y = digits()

    def drawing():
        while True:
            rows = np.random.randint(0, COUNT, 9)
            yield x[rows], y[rows]

    keras.utils.set_random_seed(3)
    model = hk.distribute(compiled(optimizer=SGD(0.5)))
    best = keras.callbacks.EarlyStopping("val_loss", patience=9, restore_best_weights=True)
    options = {"validation_data": drawing(), "validation_steps": 2, "callbacks": [best]}
    results = trained(model, fit(model, x, y, epochs=6, **options))
    return {f"drawn {k}": v for k, v in results.items()}


def wrapped():
    """A PyTorch module within a Keras model: what it gathers is no variable of Keras."""
    import torch

    norm = torch.nn.BatchNorm1d(64).double()
    norm.running_mean += hk.rank()
    model = keras.Sequential([keras.Input((64,)), keras.layers.TorchModuleWrapper(norm), keras.layers.Dense(10)])
    hk.distribute(compiled(model))
    fit(model, *digits(), epochs=1)
    return {"wrapped": norm.running_mean.numpy(), "wrapped predicted": model.predict(digits(9)[0], verbose=0)}
