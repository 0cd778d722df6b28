"""Everything between the backward pass and new weights. ``exchange.mode`` is a keyword and a file for each way."""

from __future__ import annotations

from collections.abc import Callable

from hvd_train.config.keys import ExchangeConfig
from hvd_train.protocol import Communicator, Exchange, FrontEnd, Update
from hvd_train.update.local_sgd import LocalSGD
from hvd_train.update.partial import Partial
from hvd_train.update.replicated import Replicated


def make_update(
    options: ExchangeConfig, frontend: FrontEnd, build: Callable[[Communicator], Exchange], alone: Communicator
) -> Update:
    """Build the update of ``exchange.mode`` and connect it to the front-end.

    ``build`` makes the exchange over a communicator; ``alone`` is one of this rank alone, for gradients that stay.
    """
    if options.mode == "partial":
        return Partial(frontend, build(alone), options.partial_fraction)
    if options.mode == "local_sgd":
        return LocalSGD(frontend, build(alone), options.local_steps)
    return Replicated(frontend, build(frontend.communicator), local_gradients=options.op == "adasum")
