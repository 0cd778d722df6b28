"""The keys of ``checkpoint`` and ``early_stopping``, which both monitor a metric."""

from __future__ import annotations

from pydantic import Field

from hvd_train.config.keys.section import Count, Mode, Positive, Section


class CheckpointConfig(Section):
    """When to save, and which checkpoints to keep."""

    every_n_epochs: Count = Field(1, description="save at the end of every n-th epoch; 0: only at the end of training")
    every_n_steps: Count = Field(0, description="save also every n steps, within the epoch; 0: off")
    snapshot_every_n_steps: Count = Field(
        0, description="with --max-restarts: steps between two states kept in memory (/dev/shm), for restarts; 0: off"
    )
    save_top_k: Count = Field(1, description="keep the k best by monitor")
    save_last: bool = Field(True, description="keep the newest, and the one before it in case it gets damaged")
    monitor: str = Field(
        "val_loss", description="the value that decides what is best: val_NAME or train_NAME of the loss or a metric"
    )
    mode: Mode = Field(
        "auto", description="which direction is better; auto: by the metric; set it for metrics of yours"
    )


class EarlyStoppingConfig(Section):
    """When to stop before the end of the training."""

    monitor: str = Field("val_loss", description="the value that must improve: val_NAME or train_NAME")
    patience: Positive = Field(3, description="evaluations without improvement before training stops")
    min_delta: float = Field(0.0, ge=0, description="smallest change that counts as improvement")
    mode: Mode = Field(
        "auto", description="which direction is better; auto: by the metric; set it for metrics of yours"
    )
