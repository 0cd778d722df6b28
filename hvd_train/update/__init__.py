"""From gradients to new weights. To add an update, add a file here and a row to ``config/modes``."""

from __future__ import annotations

from collections.abc import Callable

from hvd_train.config import ExchangeConfig
from hvd_train.config.modes import ModeSpec
from hvd_train.protocol import Communicator, Exchange, HostMemory, Parameters
from hvd_train.update.replicated import Replicated


def make_update(
    options: ExchangeConfig,
    frontend: Parameters,
    build: Callable[[Communicator], Exchange],
    alone: Communicator,
    spec: ModeSpec | None = None,
    memory: HostMemory | None = None,
) -> Replicated:
    """Build the update of ``spec`` (default: of ``exchange.mode``) and connect it to the front-end.

    ``build`` makes the exchange over a communicator. ``alone`` is a communicator of this rank, for local gradients.
    ``memory``: in which the ranks of a host share the weights, if the update can.
    """
    spec = spec or options.spec
    values = [getattr(options, option) for option in spec.options]
    values += [memory] if spec.shares_memory else []
    if spec.deltas:
        return spec.update_class(frontend, build(frontend.groups.data), alone, *values)
    return spec.update_class(frontend, build(frontend.groups.data if spec.gradients else alone), *values)
