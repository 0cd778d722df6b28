"""Images/s of an imagefolder of photographs (JPEG, flipped and cropped), with 1 and 2 workers."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
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
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ends:
        for name, photograph in zip(("china", "flower"), load_sample_images().images, strict=True):
            (Path(folder) / name).mkdir()
            for k in range(100):
                part = photograph[k % 7 : k % 7 + 420, k : k + 480]
                Image.fromarray(part).save(Path(folder) / name / f"{k:03}.jpg", quality=90)
        train = photographs(folder)
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
    one, *two = rates.values()
    ratios = [median(b / a for a, b in zip(one, other, strict=True)) for other in two]
    rows = {f"images/s, {name}": median(speeds) for name, speeds in rates.items()}
    return [rows | dict(zip(("workers' ratio", "processes' ratio"), ratios, strict=True))]


if __name__ == "__main__":
    read_half(sys.argv[1], int(sys.argv[2]))
