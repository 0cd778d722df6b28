"""The error of compression: how far decoded gradients are from exact ones, and how many bytes are saved."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from hvd_train.protocol import Communicator, Exchange, Handle, Ops, State, Tensor
from hvd_train.update.clip import Clip


def compression_error(exchange: Exchange, gradients: Sequence[Tensor], states: Sequence[State]) -> Tensor:
    """Measure the error of compression for these gradients; gradients and states are not changed.

    Returns (5,) float64: exact . decoded, exact . exact, decoded . decoded, the bytes that this rank sends, and the
    bytes that it would send without compression.
    """
    ops, communicator = exchange.ops, exchange.communicator
    meter = _Meter(communicator, ops)
    # The same buckets and compressors, over a communicator that counts, and without clipping.
    other = copy.copy(exchange)
    other.communicator, other.clip = meter, Clip()  # type: ignore[assignment, attr-defined]
    # A copy of each gradient, because an exchange may reduce in place. The new states are dropped.
    decoded, _ = other.reduce([g + 0 for g in gradients], states)
    figures = [0.0] * 5
    for b, (gradient, d) in enumerate(zip(gradients, decoded, strict=True)):
        # e: the exact sum over ranks (n,); d: what was decoded (n,).
        e = communicator.synchronize(communicator.allreduce_async(gradient + 0, f"compression_error{b}"))
        row, column = ops.reshape(e, (1, -1)), ops.reshape(d, (-1, 1))
        products = (ops.reshape(ops.matmul(row, column), ()), ops.sum_of_squares(e), ops.sum_of_squares(d))
        figures[:3] = [a + ops.cast(x, "float64") for a, x in zip(figures[:3], products, strict=True)]
        figures[4] = figures[4] + ops.cast(ops.nbytes(e), "float64")
    figures[3] = sum(meter.sent)
    return ops.stack([ops.cast(x, "float64") for x in figures])


class _Meter:
    """A communicator that counts the bytes that this rank sends, where each byte of an allreduce counts once.

    A ring allreduce sends each byte 2 (N - 1) / N times, so a byte sent to every other rank counts N / 2 times.
    """

    def __init__(self, communicator: Communicator, ops: Ops) -> None:
        self._communicator, self._ops, self.size = communicator, ops, communicator.size
        self.sent: list[Tensor] = []

    def allreduce_async(self, x: Tensor, name: str, op: str = "sum") -> Handle:
        self._count(x, 1)
        return self._communicator.allreduce_async(x, name, op)

    def allgather_async(self, x: Tensor, name: str) -> Handle:
        self._count(x, max(self.size, 2) / 2)
        return self._communicator.allgather_async(x, name)

    def alltoall_async(self, x: Tensor, sizes: Sequence[int], name: str) -> Handle:
        self._count(x, 1 / min(self.size, 2))
        return self._communicator.alltoall_async(x, sizes, name)

    def _count(self, x: Tensor, times: float) -> None:
        self.sent.append(self._ops.cast(self._ops.nbytes(x), "float64") * times)

    def synchronize(self, handle: Handle) -> Tensor:
        return self._communicator.synchronize(handle)
