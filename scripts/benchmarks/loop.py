"""Our loop against a bare loop on one rank: blocks of steps in turns, in one process, for each framework."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable
from statistics import median

import numpy as np
from one_rank import BATCH, DATA, FRAMEWORKS, SGD, alone, cnn_trainer

BLOCK, ROUNDS, WARM = 100, 31, 1
TITLE = f"images/s of one rank, CNN, batch {BATCH}, {DATA['name']}; medians of {ROUNDS} blocks in turn"


class Turns:
    """Two loops that take turns after every block of steps; each is timed in its own blocks."""

    def __init__(self, names: list[str]) -> None:
        self.turn, self.names, self.condition = 0, names, threading.Condition()
        self.seconds: dict[str, list[float]] = {name: [] for name in names}
        self.left, self.began = {name: 0 for name in names}, 0.0

    def enter(self, name: str) -> None:
        self._wait(name)

    def step(self, name: str) -> bool:
        """Count a step of the loop ``name``; return False when it has run its rounds."""
        self.left[name] += 1
        if self.left[name] < BLOCK:
            return True
        self.left[name] = 0
        with self.condition:
            self.seconds[name].append(time.perf_counter() - self.began)
            self.turn += 1
            self.condition.notify_all()
        if len(self.seconds[name]) == ROUNDS + WARM:
            return False
        self._wait(name)
        return True

    def _wait(self, name: str) -> None:
        with self.condition:
            self.condition.wait_for(lambda: self.names[self.turn % len(self.names)] == name)
            self.began = time.perf_counter()


class Enough(BaseException):
    """Ends the product's loop. It is no Exception, which the product would report as an error of the hook."""


def ours(framework: str, turns: Turns) -> Callable[[], None]:
    """Return the product's loop; a hook switches turns."""
    from hvd_train.core.hooks import Hook

    class Paced(Hook):
        def on_step(self, trainer, info) -> None:
            if not turns.step("ours"):
                raise Enough

    # One step per call, as in the bare loop.
    trainer = cnn_trainer(framework, {"steps_per_execution": 1, "max_epochs": 1000}, Paced())

    def loop() -> None:
        turns.enter("ours")
        with contextlib.suppress(Enough):
            trainer.fit()

    return loop


def arrays() -> tuple[np.ndarray, np.ndarray]:
    """Return images (n, height, width, channels) float32 from 0 to 1, and labels (n,)."""
    from hvd_train.config import DataConfig
    from hvd_train.data.catalog import open_data

    data = open_data(DataConfig(**DATA))
    inputs, labels = data.train.fetch(np.arange(len(data.train)))
    divisor = np.float32(data.sample.inputs["input"].divisor)  # sources yield images as they are stored
    return inputs["input"].astype(np.float32) / divisor, labels["label"]


def bare_pytorch(turns: Turns) -> Callable[[], None]:
    """Return a handwritten loop: the data in one tensor, a permutation per epoch, autograd, torch's fused SGD."""
    import torch
    import torch.nn.functional as F

    from pt_models.cnn import build

    inputs, labels = (torch.from_numpy(x) for x in arrays())
    inputs = inputs.permute(0, 3, 1, 2)
    model = build(tuple(inputs.shape[1:]), 10)
    optimizer = torch.optim.SGD(model.parameters(), fused=True, **SGD)

    def loop() -> None:
        turns.enter("bare")
        while True:
            order = torch.randperm(len(labels))
            for start in range(0, len(labels), BATCH):
                rows = order[start : start + BATCH]
                optimizer.zero_grad()
                F.cross_entropy(model(inputs[rows]), labels[rows]).backward()
                optimizer.step()
                if not turns.step("bare"):
                    return

    return loop


def bare_tensorflow(turns: Turns) -> Callable[[], None]:
    """Return a handwritten loop: the data in memory, a permutation per epoch, one tf.function, Keras' SGD."""
    import keras
    import tensorflow as tf

    from tf_models.cnn import build

    inputs, labels = arrays()
    model = build(inputs.shape[1:], 10)
    optimizer = keras.optimizers.SGD(SGD["lr"], SGD["momentum"], weight_decay=SGD["weight_decay"])
    optimizer.build(model.trainable_variables)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function(reduce_retracing=True)
    def step(x, y) -> None:
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)

    def loop() -> None:
        turns.enter("bare")
        while True:
            order = np.random.permutation(len(labels))
            for start in range(0, len(labels), BATCH):
                rows = order[start : start + BATCH]
                step(inputs[rows], labels[rows])
                if not turns.step("bare"):
                    return

    return loop


def compare(framework: str) -> dict:
    """Run both loops in turns, in this process."""
    turns = Turns(["bare", "ours"])
    bare = bare_pytorch if framework == "pytorch" else bare_tensorflow
    workers = [threading.Thread(target=one) for one in (ours(framework, turns), bare(turns))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    bare_s, ours_s = (turns.seconds[name][WARM:] for name in ("bare", "ours"))
    ratios = [b / o for b, o in zip(bare_s, ours_s, strict=True)]
    rates = {name: BLOCK * BATCH / median(s) for name, s in (("bare", bare_s), ("ours", ours_s))}
    return {"framework": framework, **rates, "ratio": median(ratios), "lowest": min(ratios), "highest": max(ratios)}


def measure() -> list[dict]:
    return [alone(__file__, framework) for framework in FRAMEWORKS]


if __name__ == "__main__":
    print(json.dumps(compare(sys.argv[1])))
