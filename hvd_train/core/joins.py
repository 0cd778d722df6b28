"""What a training leaves out of its result because ranks that train apart join too rarely for its length."""

from __future__ import annotations

from hvd_train.config import Config
from hvd_train.config.modes import MODES
from hvd_train.errors import amount


def notes(config: Config, steps: int, begin: int = 0) -> list[str]:
    """Return a line where steps of a training are not in its result; an evaluation would not show them, either.

    ``steps``: number of its last step; ``begin``: of the step that it goes on from. The result of ``outer`` and
    ``streaming`` has the weights of the last join, and that of ``async`` the centre.
    """
    options, exchange = MODES[config.exchange.mode].options, config.exchange
    key = next((option for option in ("outer_steps", "async_steps") if option in options), None)
    if key is None:
        return []
    every = getattr(exchange, key)
    apart = max(begin, exchange.outer_start)  # steps up to here are in the weights already
    delay = exchange.stream_delay if "stream_delay" in options else 0
    last = max(steps - delay, 0) // every * every
    title = f"note: exchange.{key}: {every}"
    if apart < steps and last <= apart:
        what = f"the ranks do not join within the {amount(steps - apart, 'step')} that are left"
        return [f"{title}: {what}, so the result has {'the first weights' if not apart else f'those of step {apart}'}"]
    if config.exchange.mode == "outer" and apart < last < steps:
        what = f"the last {amount(steps - last, 'step')} of {steps} come after the last join"
        return [f"{title}: {what} and are not in the result; let outer_steps divide the steps"]
    return []
