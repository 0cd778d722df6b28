"""Run folders with made-up steps, of which all is known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from hvd_train.core.shares import SHOWN

PER_WINDOW = 8


def lockstep(input, compute, rest, exchange) -> np.ndarray:
    """(steps, ranks, 4): each step ends when the slowest rank is done, and the exchange (steps,) after it.

    ``input``, ``compute``, ``rest``: (steps, ranks).
    """
    own = input + compute + rest
    waited = own.max(axis=1, keepdims=True) - own + np.reshape(exchange, (-1, 1))
    return np.stack([input, compute, waited, rest], axis=2)


def write(folder: Path, seconds: np.ndarray, config: str = "", *, save=0.0, evaluate=0.0, usage=None, **placed) -> Path:
    """Write ``seconds`` (steps, ranks, 4: input, compute, waiting, rest) as a run does; ``save``: of all."""
    folder.mkdir(exist_ok=True)
    steps, ranks, _ = seconds.shape
    rows = [{"time": 1000.0, "event": "start", "began": 990.0, "step": 0}]
    place = {"hosts": ["one"] * ranks, "cores": [[k] for k in range(ranks)], "stages": 1, "gradient_bytes": 4 << 20}
    rows.append({"time": 1000.0, "event": "ranks", "step": 1, **place, **placed})
    microseconds = np.round(seconds * 1e6).astype(int)
    for end in range(PER_WINDOW, steps + 1, PER_WINDOW):
        window = microseconds[end - PER_WINDOW : end]
        so_far = microseconds[:end].sum(axis=0) / 1e6  # (ranks, 4)
        exchange = so_far[:, 2].min()
        spent = {name: [0.0] * ranks for name in SHOWN}
        spent |= {"input": so_far[:, 0].tolist(), "compute": so_far[:, 1].tolist(), "rest": so_far[:, 3].tolist()}
        spent |= {"exchange": [exchange] * ranks, "wait": (so_far[:, 2] - exchange).tolist()}
        spent |= {"save": [save * end / steps] * ranks, "evaluate": [evaluate * end / steps] * ranks}
        now = 1000.0 + so_far.sum(axis=1).mean() + (save + evaluate) * end / steps
        row = {"time": now, "event": "steps", "epoch": 1, "step": end + 1, "steps": PER_WINDOW, "counted": now - 1000}
        cells = window.swapaxes(0, 1).reshape(ranks, -1).tolist()
        row |= {"seconds": spent, "cell_steps": 1, "cells": cells, "sync": 0.0002, "of_windows": 1}
        rows.append(row | ({"usage": usage} if usage else {}))
    (folder / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text(config)
    return folder
