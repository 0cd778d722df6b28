"""Everything between the backward pass and new weights. ``exchange.mode`` is a file and a row of ``config/modes``."""

from __future__ import annotations

from collections.abc import Callable

from hvd_train.config import ExchangeConfig
from hvd_train.config.modes import ALLREDUCE, MODES
from hvd_train.protocol import Communicator, Exchange, Parameters, Update
from hvd_train.update.replicated import Replicated


def make_update(
    options: ExchangeConfig,
    frontend: Parameters,
    build: Callable[[Communicator], Exchange],
    alone: Communicator,
) -> Update:
    """Build the update of ``exchange.mode`` and connect it to the front-end.

    ``build`` makes the exchange over a communicator; ``alone`` is one of this rank alone, for gradients that stay.
    """
    if options.mode == ALLREDUCE:
        return Replicated(frontend, build(frontend.groups.data), local_gradients=options.op == "adasum")
    row = MODES[options.mode]
    values = [getattr(options, option) for option in row.options]
    if row.deltas:
        return row.update_class(frontend, build(frontend.groups.data), alone, *values)
    return row.update_class(frontend, build(frontend.groups.data if row.gradients else alone), *values)
