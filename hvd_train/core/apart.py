"""Weights that differ between ranks for a while: which of them are averaged after which step."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hvd_train.config.keys import ExchangeConfig
from hvd_train.protocol import TensorSpec


def parts(specs: Sequence[TensorSpec], fraction: float) -> list[list[str]]:
    """Names in ceil(1 / fraction) consecutive parts of about equal numbers of entries; a tensor is never cut."""
    count = math.ceil(1 / fraction - 1e-9)
    total, done = sum(spec.size for spec in specs), 0
    found: list[list[str]] = [[] for _ in range(count)]
    for spec in specs:
        found[min(count - 1, done * count // total)].append(spec.name)
        done += spec.size
    return [part for part in found if part]


def due(exchange: ExchangeConfig, specs: Sequence[TensorSpec], step: int) -> list[str]:
    """Names of the weights to average after step number ``step`` (from 1).

    ``partial``: the next part in turn (Apache SINGA's partial synchronization). ``local_sgd``: all after every
    ``local_steps`` steps (Stich 2019).
    """
    if exchange.mode == "partial":
        cycle = parts(specs, exchange.partial_fraction)
        return cycle[(step - 1) % len(cycle)]
    if exchange.mode == "local_sgd" and step % exchange.local_steps == 0:
        return [spec.name for spec in specs]
    return []
