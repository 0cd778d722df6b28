"""The configuration: typed, frozen, every key explained."""

from hvd_train.config.keys import (
    CheckpointConfig,
    Config,
    DataConfig,
    EarlyStoppingConfig,
    ExchangeConfig,
    ModelConfig,
    OptimConfig,
    SlurmConfig,
    TaskConfig,
    TransformConfig,
    did_you_mean,
)
from hvd_train.config.reading import explained, load_config
from hvd_train.config.writing import changed, digest, explain, resolved_yaml

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EarlyStoppingConfig",
    "ExchangeConfig",
    "ModelConfig",
    "OptimConfig",
    "SlurmConfig",
    "TaskConfig",
    "TransformConfig",
    "changed",
    "did_you_mean",
    "digest",
    "explain",
    "explained",
    "load_config",
    "resolved_yaml",
]
