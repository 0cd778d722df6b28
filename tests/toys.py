"""An exchange that leaves the weights apart: the border holds it, the configuration does not offer it yet."""

from __future__ import annotations

from hvd_train.core.exchange import plan


class Apart:
    """An exchange that leaves gradients alone: each rank applies its own; weights are averaged at other times."""

    def __init__(self, specs, packing) -> None:
        self.buckets = plan(specs, packing)

    def initial(self):
        return [() for _ in self.buckets]

    def start(self, bucket, gradient, state):
        return gradient, state

    def finish(self, started):
        return [gradient for gradient, _ in started], [state for _, state in started]
