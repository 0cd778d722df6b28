"""The runs of ``recorded.json``: their configurations, their data, and what is looked at."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np

FRAMEWORKS = ("pytorch", "tensorflow")
CUT, END = 5, 12  # steps of the run that is interrupted, and of the resumed one
DIGITS = {
    "model": {"name": "mlp", "hidden": [8]},
    "data": {"name": "digits"},
    "global_batch_size": 48,
    "precision": "64",
    "optim": {"lr": 0.05, "momentum": 0.9},
    "tensorboard": False,
}
# With 64 units the first layer is large enough to be compressed, so that each rank keeps a residual.
TOPK = {
    "model": {"name": "mlp", "hidden": [64]},
    "optim": {"lr": 0.05},
    "exchange": {"compression": "topk", "ratio": 0.05},
}
# {run of two ranks, cut within an epoch: how it differs from DIGITS}
RESUMED: dict[str, dict[str, Any]] = {
    "plain": {"optim": {"name": "adam", "lr": 0.002}},
    "topk": TOPK,
    "partial": {"exchange": {"mode": "partial", "partial_fraction": 0.3}},
    "local_sgd": {"exchange": {"mode": "local_sgd", "local_steps": 3}},
}
SHORT = {"precision": "64", "tensorboard": False, "global_batch_size": 32, "max_steps": 20, "optim": {"lr": 0.05}}
# {run of one rank: its configuration}
EVALUATED: dict[str, dict[str, Any]] = {
    "regression": SHORT
    | {
        "model": {"name": "mlp", "hidden": [8]},
        "data": {"name": "table", "path": "curve.csv", "labels": ["y"]},
        "task": {"loss": "mse", "metrics": ["r2"]},
        "checkpoint": {"monitor": "val_r2", "mode": "max"},
    },
    "classes": SHORT
    | {
        "model": {"name": "mlp", "hidden": [8]},
        "data": {"name": "table", "path": "iris.csv", "labels": ["kind"]},
    },
    "npz": SHORT | {"model": {"name": "mlp", "hidden": [8]}, "data": {"name": "npz", "path": "digits.npz"}},
    "norm": SHORT | {"model": {"name": "resnet", "width": 4, "blocks": [1, 1]}, "data": {"name": "digits"}},
}


def config_of(framework: str, name: str, steps: int = 0) -> dict[str, Any]:
    if name in EVALUATED:
        return EVALUATED[name] | {"framework": framework, "run_dir": f"{framework}/{name}"}
    run = {"framework": framework, "run_dir": f"{framework}/{name}", "max_steps": steps}
    return DIGITS | RESUMED[name] | run


def write_data(folder: Path) -> None:
    from sklearn.datasets import load_digits, load_iris

    iris, digits = load_iris(), load_digits()
    with open(folder / "iris.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["a", "b", "c", "d", "kind"])
        writer.writerows(
            [*row, iris.target_names[k]] for row, k in zip(iris.data.tolist(), iris.target.tolist(), strict=True)
        )
    x = np.random.default_rng(0).normal(size=(150, 3)).round(3)
    y = (x @ [1.0, -0.5, 0.25] + np.sin(x[:, 0])).round(4)
    with open(folder / "curve.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["x1", "x2", "x3", "y"])
        writer.writerows([*row, z] for row, z in zip(x.tolist(), y.tolist(), strict=True))
    images = digits.images.astype(np.uint8)
    parts = {"train": slice(0, 120), "val": slice(120, 180)}
    arrays = {f"{part}_x": images[s] for part, s in parts.items()}
    arrays |= {f"{part}_y": digits.target[s] for part, s in parts.items()}
    np.savez_compressed(folder / "digits.npz", **arrays)


def newest(run_dir: Path) -> Path:
    return max((run_dir / "checkpoints").glob("step-*"))


def measures(run_dir: Path) -> dict[str, list[float]]:
    """{tensor of the newest checkpoint: [norm, two weighted sums]}: enough to tell two models apart, and short."""
    from safetensors.numpy import load_file

    files = [newest(run_dir) / f"{part}.safetensors" for part in ("weights", "optimizer")]
    return {name: measure(x) for file in files for name, x in load_file(file).items()}


def measure(x: np.ndarray) -> list[float]:
    flat = np.asarray(x, np.float64).ravel()
    angles = np.arange(1.0, flat.size + 1)
    return [float(np.linalg.norm(flat)), float(flat @ np.sin(angles)), float(flat @ np.cos(angles))]
