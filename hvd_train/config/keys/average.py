"""The keys of ``ema`` and ``swa``."""

from __future__ import annotations

from pydantic import Field

from hvd_train.config.keys.section import Positive, Section


class EmaConfig(Section):
    """An exponential moving average of the weights (``update/ema.py``)."""

    decay: float = Field(0.999, gt=0, lt=1, description="share of the mean that stays when new weights are added")
    every_n_steps: Positive = Field(1, description="steps between two additions")


class SwaConfig(Section):
    """Stochastic weight averaging (``update/epoch_mean.py``)."""

    epochs: Positive = Field(5, description="last epochs at whose ends the weights are taken")
