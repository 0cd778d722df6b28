"""The configuration of a short training that only measures."""

from __future__ import annotations

from pathlib import Path

from hvd_train.config import Config, load_config

FOREVER = 10**9  # steps


def trial(config: Config, threads: int, run_dir: Path) -> Config:
    """Return the configuration of a calibration: a training that only its clock ends, and that saves nothing."""
    data = config.model_dump(mode="json")
    data |= {"max_steps": FOREVER, "max_epochs": None, "early_stopping": None, "swa": None, "hooks": []}
    data |= {"tensorboard": False, "loggers": [], "check_val_every_n_epoch": FOREVER, "limit_val_batches": 1}
    data |= {"run_dir": str(run_dir), "threads": threads}
    data["checkpoint"] |= {"every_n_epochs": 0, "every_n_steps": 0, "snapshot_every_n_steps": 0}
    data["checkpoint"] |= {"save_top_k": 0, "save_last": False}
    data["optim"] |= {"plateau": None}
    data["exchange"] |= {"compression_error_every_n_steps": 0}
    if config.exchange.compression == "auto":
        data["exchange"] |= {"compression": "none"}
    return load_config(base=data)
