"""Images/s of many small PNG files and of the same data packed; seconds to pack on 1 and 2 ranks."""

from __future__ import annotations

import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
from one_rank import PYTHON

IMAGES, BLOCKS, WARM = 10_000, 7, 1
TITLE = f"reading images of 32 x 32 in random order, medians of {BLOCKS} blocks in turn"


def measure() -> list[dict]:
    from PIL import Image

    from hvd_train.config import DataConfig
    from hvd_train.data.catalog import open_data
    from hvd_train.launch.start import environment

    rates: dict[str, list[float]] = {"imagefolder": [], "packed": []}
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        photos, chance = Path(folder) / "photos", np.random.default_rng(0)
        for k in range(IMAGES):
            (photos / f"{k % 10}").mkdir(parents=True, exist_ok=True)
            smooth = chance.integers(0, 256, (8, 8, 3), np.uint8)
            Image.fromarray(smooth).resize((32, 32)).save(photos / f"{k % 10}" / f"{k:05}.png")
        for ranks in (1, 2):
            line = [str(PYTHON.parent / "hvd-train"), "data", "pack", str(photos), f"{folder}/packed-{ranks}"]
            launcher = [
                str(PYTHON.parent / "mpirun"),
                "--bind-to",
                "none",
                "--map-by",
                "slot:oversubscribe",
                "-np",
                "2",
            ]
            began = time.perf_counter()
            subprocess.run(launcher * (ranks == 2) + line, env=environment(), stdout=subprocess.DEVNULL, check=True)
            seconds[ranks] = time.perf_counter() - began
        paths = {"imagefolder": str(photos), "packed": f"{folder}/packed-1"}
        opened = {name: open_data(DataConfig(name=name, path=path)).train for name, path in paths.items()}
        for _ in range(BLOCKS + WARM):
            order = chance.permutation(len(opened["packed"]))[: 64 * 50].reshape(-1, 64)
            for name, speeds in rates.items():
                began = time.perf_counter()
                for batch in order:
                    opened[name].fetch(batch)
                speeds.append(order.size / (time.perf_counter() - began))
    files, packed = (median(speeds[WARM:]) for speeds in rates.values())
    row = {"images": IMAGES, "images/s from files": files, "packed": packed, "ratio": packed / files}
    return [row | {"seconds to pack": seconds[1], "2 ranks": seconds[2]}]
