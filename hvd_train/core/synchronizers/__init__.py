"""How N ranks are one model, by ``exchange.mode``: a file each, a keyword each in the configuration."""

from __future__ import annotations

from hvd_train.config.keys import ExchangeConfig
from hvd_train.core.synchronizers.allreduce import AllReduce
from hvd_train.core.synchronizers.local_sgd import LocalSGD
from hvd_train.core.synchronizers.partial import Partial
from hvd_train.protocol import Synchronizer


def make(exchange: ExchangeConfig) -> Synchronizer:
    """The synchronizer ``exchange.mode``, with the options that belong to it."""
    if exchange.mode == "partial":
        return Partial(exchange.partial_fraction)
    if exchange.mode == "local_sgd":
        return LocalSGD(exchange.local_steps)
    return AllReduce(exchange.op)
