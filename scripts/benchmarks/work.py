"""The work of all engines of a comparison: models, data, first weights, batches and losses; the step counter.

Every engine does the same: equal first weights, the same batches in the same order, SGD with momentum, float32.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # an engine of another checkout imports that one's package

SGD = {"lr": 0.005, "momentum": 0.9}
RANKS = 2
BATCHES = 40  # steps whose batches an engine keeps in memory and cycles through
LOSSES = 3  # first losses kept, to check that all engines compute the same (ResNet diverges within ten)
FASHION = Path("/usr/share/datasets/fashion-mnist")
IMAGES = {"name": "idx", "path": str(FASHION)} if FASHION.exists() else {"name": "digits", "image_size": 28}
TEXT = {"name": "text", "path": str(Path(os.__file__).parent / "asyncio"), "sequence_length": 64}
PAIRS = {"name": "masked_text", "sequence_length": 163}

# model: (config.model, config.data, samples per rank).
MODELS: dict[str, tuple[dict, dict, int]] = {
    "cnn": ({"name": "cnn"}, IMAGES, 64),
    "mlp": ({"name": "mlp", "hidden": [4096, 4096, 1024]}, IMAGES, 64),
    "resnet": ({"name": "resnet"}, IMAGES | {"image_size": 32}, 16),
    "thin": ({"name": "thin"}, IMAGES, 32),
    "gpt": ({"name": "gpt"}, TEXT, 8),
    "bert": ({"name": "bert", "dropout": 0.0}, PAIRS, 8),
    "pyramidnet": ({"name": "pyramidnet"}, IMAGES | {"image_size": 32}, 16),
}
TASKS: dict[str, dict] = {"bert": {"loss": {"words": "cross_entropy", "next": "cross_entropy"}}}
HIDDEN = -100  # the label of a token without a label


held: list = []  # what other engines keep in memory besides their batches


class Count:
    """A file of 24 bytes that others map: steps done, end of the last one (ns, monotonic), this process' id."""

    def __init__(self, path: Path) -> None:
        self.file = np.memmap(path, np.int64, "w+", shape=(3,))
        self.file[2] = os.getpid()
        self.path, self.losses = path, []

    def __call__(self, loss: Callable[[], float] | None = None) -> None:
        if len(self.losses) < LOSSES and loss is not None:
            self.losses.append(loss())
            if len(self.losses) == LOSSES:
                Path(f"{self.path}.losses").write_text(json.dumps(self.losses))
        self.file[1] = time.monotonic_ns()
        self.file[0] += 1


def settings(framework: str, model: str, exchange: dict) -> dict:
    net, data, batch = MODELS[model]
    return {
        "framework": framework,
        "model": net,
        "data": data,
        "task": TASKS.get(model, {}),
        "batch_size": batch,
        "optim": {"name": "sgd", **SGD},
        "exchange": exchange,
        "max_epochs": 10**6,
        "check_val_every_n_epoch": 10**6,
        "checkpoint": {"every_n_epochs": 0, "save_last": False, "save_top_k": 0},
    }


def prepared(
    framework: str, work: str, rank: int, size: int, count: int = BATCHES, channels_last: bool = False
) -> tuple[Any, list]:
    """Return (model with the first weights, list of this rank's batches (inputs, labels)), in the framework's layout.

    Several inputs or labels are dicts.
    """
    import importlib

    from hvd_train.config import Config, FrontEndConfig
    from hvd_train.data.catalog import open_data
    from hvd_train.data.loader import Loader
    from hvd_train.frameworks import FRAMEWORKS
    from hvd_train.frontends.serial import Serial
    from hvd_train.protocol import Groups, one_or_all

    config = Config.model_validate(settings(framework, work, {}))
    data = open_data(config.data, config.task)
    held.append(data)  # as the engine's own loader would
    module = FRAMEWORKS[framework].load()
    module.configure(int(os.environ.get("OMP_NUM_THREADS", "1")))
    frontend = module.open_frontend(FrontEndConfig.of(config), Groups.of(Serial()), data.sample)
    loader = Loader(data.train, global_batch=config.global_batch(RANKS), rank=rank, size=size, seed=config.seed)
    batches = []
    for step in loader.epoch(0):
        inputs, labels, _ = frontend.to_device(step.micro_batches[0])
        if framework == "tensorflow":  # ours does it in its graph
            inputs = {name: frontend._ready(x, data.sample.inputs[name]) for name, x in inputs.items()}
        batches.append((one_or_all(inputs), one_or_all(labels)))
        if len(batches) == count:
            break
    if framework == "tensorflow":  # with Keras' own layers
        build = importlib.import_module(f"tf_models.{config.model.name}").build
        model = build(data.sample.input_shape, data.sample.num_classes, **dict(config.model.options))
        model.set_weights(frontend.model.get_weights())
        return model, batches
    if framework == "pytorch" and not channels_last:  # as in a handwritten loop
        frontend.model.to(memory_format=sys.modules["torch"].contiguous_format)
        batches = [(x if isinstance(x, dict) else x.contiguous(), y) for x, y in batches]
    return frontend.model, batches


def cycle(batches) -> Iterator:
    while True:
        yield from batches


def torch_loss(logits, labels) -> Any:
    """Return the mean over this rank's tokens, as in a handwritten loop; of several outputs the sum."""
    import torch.nn.functional as F

    if isinstance(labels, dict):
        return sum(torch_loss(logits[name], labels[name]) for name in labels)
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten().long(), ignore_index=HIDDEN)


def called(net, inputs) -> Any:
    return net(**inputs) if isinstance(inputs, dict) else net(inputs)


def keras_loss(keras, labels) -> Any:
    """Return Keras' losses for such labels, one or a dict, in current or legacy Keras."""
    entropy = partial(keras.losses.SparseCategoricalCrossentropy, from_logits=True)
    if isinstance(labels, dict):
        return {name: entropy(ignore_class=HIDDEN) if len(y.shape) > 1 else entropy() for name, y in labels.items()}
    return entropy()


def keras_value(losses, labels, outputs) -> Any:
    if isinstance(losses, dict):
        return sum(loss(labels[name], outputs[name]) for name, loss in losses.items())
    return losses(labels, outputs)
