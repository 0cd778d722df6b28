"""Warn when the last local steps are never averaged, so that they are not in the result."""

from __future__ import annotations

from hvd_train.config import Config
from hvd_train.errors import amount


def notes(config: Config, steps: int, begin: int, per_epoch: int) -> list[str]:
    """Return warnings about steps that do not enter the result, and rules that act before the evaluated weights change.

    ``steps``: last step; ``begin``: step to resume from; ``per_epoch``: steps. Results and evaluations of ``outer`` and
    ``streaming`` use the weights of the last average, those of ``async`` the centre.
    """
    exchange, mode = config.exchange, config.exchange.spec
    if not mode.result:
        return []
    every = getattr(exchange, mode.interval)
    start = exchange.outer_start  # steps up to here are in the averaged weights
    delay = exchange.stream_delay if "stream_delay" in mode.options else 0
    averaged, last = (max(start, max(step - delay, 0) // every * every) for step in (begin, steps))
    left = steps - max(begin, start)
    title = f"note: exchange.{mode.interval}: {every}"
    hasty = _hasty_rules(config, every, per_epoch)
    if left > 0 and last == averaged:
        what = f"no average comes in the remaining {amount(left, 'step')}"
        weights = f"those of step {averaged}" if averaged else "the first weights"
        return [f"{title}: {what}, so the result has {weights}", *hasty]
    if mode.result == "all" and averaged < last < steps:
        what = f"the result lacks the last {amount(steps - last, 'step')} of {steps}, which are never averaged"
        return [f"{title}: {what}; let {mode.interval} divide the steps", *hasty]
    return hasty


def _hasty_rules(config: Config, every: int, per_epoch: int) -> list[str]:
    """Return a line for each rule that may act before the evaluated weights have changed at all."""
    lines = []
    for key, rule in (("early_stopping", config.early_stopping), ("optim.plateau", config.optim.plateau)):
        if rule and rule.monitor.startswith("val_"):
            steps = rule.patience * config.check_val_every_n_epoch * per_epoch
            if steps < every:
                what = f"that is {amount(steps, 'step')}, and evaluations see other weights every {every}"
                lines.append(f"note: {key}.patience: {rule.patience}: {what}; set a larger one")
    return lines
