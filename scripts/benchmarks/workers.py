"""Images/s of photographs (JPEG, flipped and cropped).

An imagefolder with 1 and 2 workers, and a torch data set that we and torch's DataLoader read, with 2 processes each.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from one_rank import PYTHON, ROOT

BLOCKS = 11
TITLE = f"imagefolder of photographs, medians of {BLOCKS} epochs of 160 images in turn"


def photographs(folder: str) -> Any:
    """Return the training part of an imagefolder, with augmented images."""
    from hvd_train.config import DataConfig
    from hvd_train.data.catalog import open_data

    varied = ["random_horizontal_flip", {"name": "random_crop", "padding": 8}]
    keys = {"name": "imagefolder", "path": folder, "image_size": 224, "transforms": varied}
    return open_data(DataConfig.model_validate(keys)).train


class Photographs:
    """The same, as a torch data set."""

    classes = ("china", "flower")

    def __init__(self, folder: str) -> None:
        self.files = sorted(Path(folder).glob("*/*.jpg"))
        self.targets = [self.classes.index(file.parent.name) for file in self.files]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, k: int) -> Any:
        import numpy as np
        import torch
        from PIL import Image

        image = Image.open(self.files[k]).convert("RGB").resize((240, 240))
        left, top = random.randint(0, 16), random.randint(0, 16)
        image = image.crop((left, top, left + 224, top + 224))
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255, self.targets[k]


def epochs_of_items(folder: str) -> dict[str, Callable[[int], int]]:
    """Return functions that read an epoch of the torch data set, and return the number of images."""
    import torch

    from hvd_train.config import load_config
    from hvd_train.data.catalog import open_data
    from hvd_train.data.loader import Loader

    torch.set_num_threads(1)  # of the process that takes the batches
    data = Photographs(folder)
    config = load_config(base={"data": {"name": "mine:data", "workers": 2}})
    ours = Loader(open_data(config.data, config.task, (data, data)).train, global_batch=16, workers=2)
    torchs = torch.utils.data.DataLoader(data, 16, shuffle=True, num_workers=2, persistent_workers=True)  # type: ignore[arg-type]
    return {
        "our Dataset": lambda number: sum(step.count for step in ours.epoch(number)),
        "torch's DataLoader": lambda number: sum(len(images) for images, _ in torchs),
    }


def read_half(folder: str, rank: int) -> None:
    """Read half of an epoch for each line on standard input."""
    from hvd_train.data.loader import Loader

    loader = Loader(photographs(folder), global_batch=16, rank=rank, size=2)
    print("ready", flush=True)
    for line in sys.stdin:
        print(sum(step.micro_batches[0].count for step in loader.epoch(int(line))), flush=True)


def measure() -> list[dict]:
    """Compare with two independent processes, which show what a second core yields at this moment."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    from hvd_train.data.loader import Loader

    rates: dict[str, list[float]] = {"1 worker": [], "2 workers": [], "2 processes": []}
    of_items: dict[str, list[float]] = {"our Dataset": [], "torch's DataLoader": []}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ends:
        for name, photograph in zip(("china", "flower"), load_sample_images().images, strict=True):
            (Path(folder) / name).mkdir()
            for k in range(100):
                part = photograph[k % 7 : k % 7 + 420, k : k + 480]
                Image.fromarray(part).save(Path(folder) / name / f"{k:03}.jpg", quality=90)
        train, items = photographs(folder), epochs_of_items(folder)
        halves = []
        for rank in (0, 1):
            line = [str(PYTHON), __file__, folder, str(rank)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": os.environ | {"PYTHONPATH": str(ROOT)}}
            half = ends.enter_context(subprocess.Popen(line, text=True, **pipes))
            ends.callback(half.terminate)
            halves.append(half)
        for half in halves:
            half.stdout.readline()

        def epoch(name: str, number: int) -> int:
            if name != "2 processes":
                loader = Loader(train, global_batch=8, workers=int(name[0]))
                return sum(step.count for step in loader.epoch(number))
            for half in halves:
                half.stdin.write(f"{number}\n")
                half.stdin.flush()
            return sum(int(half.stdout.readline()) for half in halves)

        for block in range(BLOCKS):
            for name, speeds in rates.items():
                began = time.perf_counter()
                speeds.append(epoch(name, block) / (time.perf_counter() - began))
            for name, speeds in of_items.items():
                began = time.perf_counter()
                speeds.append(items[name](block) / (time.perf_counter() - began))
    one, *two = rates.values()
    ratios = [median(b / a for a, b in zip(one, other, strict=True)) for other in two]
    ratios.append(median(a / b for a, b in zip(*of_items.values(), strict=True)))
    rows = {f"images/s, {name}": median(speeds) for name, speeds in (rates | of_items).items()}
    return [rows | dict(zip(("workers' ratio", "processes' ratio", "Dataset's ratio"), ratios, strict=True))]


if __name__ == "__main__":
    read_half(sys.argv[1], int(sys.argv[2]))
