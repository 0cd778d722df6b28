"""Everything between the backward pass and new weights. ``exchange.mode`` is a keyword and a file for each way."""

from __future__ import annotations

from hvd_train.config.keys import ExchangeConfig
from hvd_train.protocol import Synchronizer
from hvd_train.update.local_sgd import LocalSGD
from hvd_train.update.partial import Partial
from hvd_train.update.replicated import AllReduce


def make_synchronizer(exchange: ExchangeConfig) -> Synchronizer:
    """The synchronizer ``exchange.mode``, with the options that belong to it."""
    if exchange.mode == "partial":
        return Partial(exchange.partial_fraction)
    if exchange.mode == "local_sgd":
        return LocalSGD(exchange.local_steps)
    return AllReduce(exchange.op)
