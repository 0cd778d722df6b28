"""The summary of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hvd_train.core.stage_state import model_sha256
from hvd_train.core.training import Training


def summary(training: Training) -> dict[str, Any]:
    """Return the content of ``summary.json``, equal on all ranks."""
    p, config, names = training.progress, training.config, training.config.task.names
    return {
        "framework": config.framework,
        "model": config.model.name,
        "world_size": training.communicator.size,
        "epochs": p.epoch,
        **({"paused_at": p.epoch} if training.paused else {}),
        "steps": p.step,
        "train_samples": p.seen,
        "steps_per_epoch": training.limit,
        **({"skipped_steps": p.skipped} if config.checks_gradients else {}),
        "val_samples": p.val.get("val_samples", 0),
        **numbers({f"train_{name}": p.train.get(f"train_{name}") for name in names}),
        **numbers({f"val_{name}": p.val.get(f"val_{name}") for name in names}),
        "samples_per_second": training.samples_per_second(),
        "weights_sha256": model_sha256(training.frontend),
    }


def numbers(values: Mapping[str, float | None]) -> dict[str, float | None]:
    """Replace NaN by None, because JSON has no NaN."""
    return {name: x if x is not None and math.isfinite(x) else None for name, x in values.items()}
