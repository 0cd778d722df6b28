"""One rank on one device: a bare PyTorch loop, DDP, Lightning, Accelerate, our script and our fit; the first and the
last compiled as well. Samples/s of the fastest of several blocks, in one process, one engine after the other.

    scripts/bench gpu [--models resnet50,gpt2,mlp] [--small] [-o FILE.json]

Engines compute the same: a batch comes from the host's memory in each step, as bytes or token ids. ``--small``: tiny
models, to see that it works where there is no GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from work import ROOT

sys.path.insert(0, str(ROOT))
WARM, BLOCK, BLOCKS = 10, 20, 4
HEADERS = ["model", "engine", "samples/s", "of bare", "GiB", "first step, s"]
# model: (config.model, samples, batch, optimizer, precision), and the same tiny.
MODELS: dict[str, tuple[dict, str, int, dict, str]] = {
    "resnet50": ({"name": "resnet50"}, "images", 256, {"name": "sgd", "lr": 0.01, "momentum": 0.9}, "bf16-mixed"),
    "gpt2": (
        {"name": "gpt", "width": 768, "depth": 12, "heads": 12},
        "tokens",
        16,
        {"name": "adamw", "lr": 3e-4},
        "bf16-mixed",
    ),
    "mlp": ({"name": "mlp", "hidden": [4096, 4096, 1024]}, "digits", 128, {"name": "sgd", "lr": 0.01}, "32"),
}
SMALL = {
    "resnet50": {"width": 8, "blocks": [1, 1]},
    "gpt2": {"width": 32, "depth": 1, "heads": 2},
    "mlp": {"hidden": [64]},
}


class Enough(BaseException):
    """Ends an engine. It is no Exception, which a trainer would report as an error of the hook."""


class Blocks:
    """Times the blocks of an engine, which calls it after each step."""

    def __init__(self, synchronize: Callable[[], None], small: bool) -> None:
        self._synchronize, self._steps = synchronize, 0
        self._warm, self._block = (2, 2) if small else (WARM, BLOCK)
        self._began, self.first, self.seconds = time.perf_counter(), 0.0, list[float]()

    def __call__(self) -> None:
        self._steps += 1
        if self._steps == 1:
            self._synchronize()
            self.first = time.perf_counter() - self._began
        if self._steps < self._warm or (self._steps - self._warm) % self._block:
            return
        self._synchronize()
        now = time.perf_counter()
        if self._steps > self._warm:
            self.seconds.append((now - self._began) / self._block)
        self._began = now
        if len(self.seconds) == BLOCKS:
            raise Enough


def samples(kind: str, small: bool = False) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return training and validation arrays of random numbers: only their sizes matter to the speed."""
    rng = np.random.default_rng(0)
    if kind == "tokens":
        tokens = rng.integers(0, classes(kind, small), (8 if small else 64, 17 if small else 1025))
        x, y = tokens[:, :-1], tokens[:, 1:]
    else:
        side, count = (224, 8 if small else 512) if kind == "images" else (28, 1024)
        side = 32 if small and kind == "images" else side
        x = rng.integers(0, 256, (count, side, side, 3 if kind == "images" else 1), np.uint8)
        y = rng.integers(0, classes(kind, small), count)
    return (x, y), (x[:4], y[:4])


def classes(kind: str, small: bool) -> int:
    return 10 if small or kind == "digits" else 50_257 if kind == "tokens" else 1000


class Work:
    """What all engines of a model are given."""

    def __init__(self, name: str, small: bool) -> None:
        import torch

        model, self.kind, self.batch, self.optim, self.precision = MODELS[name]
        self.batch = 4 if small else self.batch
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.config = {
            "framework": "pytorch",
            "model": model | (SMALL[name] if small else {}),
            "data": {
                "name": "gpu:samples",
                "options": {"kind": self.kind, "small": small},
                "num_classes": classes(self.kind, small),
            },
            "task": {"loss": "cross_entropy"},
            "batch_size": self.batch,
            "optim": self.optim,
            "precision": self.precision,
            "max_epochs": 10**6,
            "check_val_every_n_epoch": 10**6,
            "checkpoint": {"every_n_epochs": 0, "save_last": False, "save_top_k": 0},
        }
        (self.x, self.y), _ = samples(self.kind, small)

    def net(self) -> Any:
        """Return the model on the device, channels last if it gets images."""
        import importlib

        import torch

        options = dict(self.config["model"])
        module = importlib.import_module(f"pt_models.{options.pop('name')}")
        shape = (self.x.shape[-1], *self.x.shape[1:-1]) if self.x.ndim == 4 else self.x.shape[1:]
        net = module.build(shape, self.config["data"]["num_classes"], **options).to(self.device).train()
        return net.to(memory_format=torch.channels_last) if self.kind == "images" else net

    def optimizer(self, net: Any) -> Any:
        import torch

        kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
        keys = {key: value for key, value in self.optim.items() if key != "name"}
        return kinds[self.optim["name"]](net.parameters(), fused=True, **keys)

    def batches(self) -> Iterator[tuple[Any, Any]]:
        """Give batches from pinned memory, moved to the device without waiting."""
        import torch

        x, y = torch.from_numpy(self.x), torch.from_numpy(self.y)
        if self.device.type == "cuda":
            x, y = x.pin_memory(), y.pin_memory()
        while True:
            for start in range(0, len(x) - self.batch + 1, self.batch):
                rows = slice(start, start + self.batch)
                inputs = x[rows].to(self.device, non_blocking=True)
                if inputs.ndim == 4:
                    inputs = inputs.permute(0, 3, 1, 2).to(torch.float32) / 255
                yield inputs, y[rows].to(self.device, non_blocking=True)

    def mixed(self) -> Any:
        import torch

        return torch.autocast(self.device.type, torch.bfloat16) if self.precision == "bf16-mixed" else nullcontext()

    def loss(self, outputs: Any, labels: Any) -> Any:
        from torch.nn.functional import cross_entropy

        return cross_entropy(outputs.float().flatten(0, -2), labels.flatten())


def loop(
    work: Work, tick: Blocks, wrap: Callable[[Any, Any], tuple[Any, Any]] = lambda *pair: pair, compiled: bool = False
) -> None:
    """Train in a handwritten loop; ``wrap(model, optimizer)`` makes it parallel."""
    net = work.net()
    if compiled:
        net.compile()
    called, optimizer = wrap(net, work.optimizer(net))
    for inputs, labels in work.batches():
        optimizer.zero_grad()
        with work.mixed():
            outputs = called(inputs)
        work.loss(outputs, labels).backward()
        optimizer.step()
        tick()


def ddp(work: Work, tick: Blocks) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    with tempfile.TemporaryDirectory() as folder:
        kind = "nccl" if work.device.type == "cuda" else "gloo"
        dist.init_process_group(kind, init_method=f"file://{folder}/ranks", rank=0, world_size=1)
    try:
        loop(work, tick, lambda net, optimizer: (DistributedDataParallel(net, gradient_as_bucket_view=True), optimizer))
    finally:
        dist.destroy_process_group()


def accelerate(work: Work, tick: Blocks) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16" if work.precision == "bf16-mixed" else "no")
    net = work.net()
    called, optimizer = accelerator.prepare(net, work.optimizer(net))
    for inputs, labels in work.batches():
        optimizer.zero_grad()
        accelerator.backward(work.loss(called(inputs), labels))
        optimizer.step()
        tick()


def lightning(work: Work, tick: Blocks) -> None:
    import lightning as L
    import torch

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = work.net()

        def training_step(self, batch: Any, index: int) -> Any:
            return work.loss(self.net(batch[0]), batch[1])

        def on_train_batch_end(self, *_: Any) -> None:
            tick()

        def configure_optimizers(self) -> Any:
            return work.optimizer(self.net)

    class Batches(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator:
            return work.batches()

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        accelerator="gpu" if work.device.type == "cuda" else "cpu",
        devices=1,
        precision="bf16-mixed" if work.precision == "bf16-mixed" else "32-true",
        max_epochs=-1,
        enable_model_summary=False,
        **quiet,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(Batches(), batch_size=None))


def script(work: Work, tick: Blocks) -> None:
    import hvd_train.torch as ht

    loop(work, tick, ht.distribute)


def fit(work: Work, tick: Blocks, compiled: bool = False) -> None:
    import hvd_train

    class Paced(hvd_train.Hook):
        def on_step(self, trainer: Any, info: Any) -> None:
            tick()

    with tempfile.TemporaryDirectory() as folder:
        config = work.config | {"run_dir": f"{folder}/run", "tensorboard": False}
        config["model"] = config["model"] | {"compile": compiled}
        hvd_train.fit(config, hooks=[Paced()])


ENGINES: dict[str, Callable[[Work, Blocks], None]] = {
    "bare": loop,
    "DDP": ddp,
    "Lightning": lightning,
    "Accelerate": accelerate,
    "script": script,
    "fit": fit,
    "bare, compiled": lambda work, tick: loop(work, tick, compiled=True),
    "fit, compiled": lambda work, tick: fit(work, tick, compiled=True),
}


def measured(name: str, engine: str, small: bool) -> dict[str, Any]:
    import torch

    work, cuda = Work(name, small), torch.cuda.is_available()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    tick = Blocks(torch.cuda.synchronize if cuda else lambda: None, small)
    with suppress(Enough):
        ENGINES[engine](work, tick)
    bytes_ = torch.cuda.max_memory_allocated() if cuda else 0
    gc.collect()
    torch.compiler.reset()
    if cuda:
        torch.cuda.empty_cache()
    rate = work.batch / min(tick.seconds)
    return {
        "model": name,
        "engine": engine,
        "rate": rate,
        "bytes": bytes_,
        "first": tick.first,
        "seconds": tick.seconds,
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/bench gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--engines", default=";".join(ENGINES), help="with ; between them")
    parser.add_argument("--small", action="store_true", help="tiny models")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "runs" / "gpu.json")
    options = parser.parse_args(arguments)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    names = options.engines.split(";")
    missing = {"Lightning": "lightning", "Accelerate": "accelerate"}
    names = [one for one in names if one not in missing or find_spec(missing[one])]
    rows = []
    for model in options.models.split(","):
        for engine in names:
            rows.append(measured(model, engine, options.small))
            bare = next((row["rate"] for row in rows if row["model"] == model and row["engine"] == "bare"), 0.0)
            rows[-1]["of bare"] = rows[-1]["rate"] / bare if bare else 0.0
            print(f"{model} {engine}: {rows[-1]['rate']:,.0f} samples/s", flush=True)
    from hvd_train.report.text_tables import table

    text = [
        [
            r["model"],
            r["engine"],
            f"{r['rate']:,.0f}",
            f"{r['of bare']:.3f}",
            f"{r['bytes'] / 2**30:.1f}",
            f"{r['first']:.1f}",
        ]
        for r in rows
    ]
    print(f"\n{table(HEADERS, text)}")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(rows, indent=1) + "\n")
