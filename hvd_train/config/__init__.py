"""The configuration: typed, frozen, every key explained."""

from hvd_train.config.frontend_config import FrontEndConfig
from hvd_train.config.keys.checkpoint import CheckpointConfig, EarlyStoppingConfig
from hvd_train.config.keys.config import Config
from hvd_train.config.keys.data import DataConfig
from hvd_train.config.keys.exchange import ExchangeConfig
from hvd_train.config.keys.model import ModelConfig
from hvd_train.config.keys.optim import OptimConfig
from hvd_train.config.keys.parallel import ParallelConfig
from hvd_train.config.keys.slurm import SlurmConfig
from hvd_train.config.keys.task import TaskConfig
from hvd_train.config.keys.transforms import TransformConfig
from hvd_train.config.names import did_you_mean
from hvd_train.config.reading import explained, load_config
from hvd_train.config.writing import changed, digest, explain, leaves, resolved_yaml
