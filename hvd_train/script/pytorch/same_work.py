"""Compare the ranks' gradients in a model's first passes, and warn if they are equal."""

from __future__ import annotations

from hvd_train.protocol import Communicator
from hvd_train.script.shared.same_work import PASSES, warn_of_same_work


class SameWorkWarning:
    """The comparison of checksums of the ranks' gradients in the first passes of a model."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._bits = self._equal = 0  # sum over this pass' gradients; passes in which it was equal on all ranks
        self.left = PASSES

    def add(self, bits: int) -> None:
        """Add the checksum of a gradient, before it is averaged."""
        self._bits += bits

    def pass_ended(self) -> None:
        """Compare the checksums; all ranks call it, and rank 0 warns after the last compared pass."""
        bits, self._bits, self.left = self._bits % 2**64, 0, self.left - 1
        everyone = self._communicator.allgather_bytes(bits.to_bytes(8, "little"), "gradients")
        # A sum of 0 does not count, because all gradients may be zero.
        self._equal += bits > 0 and len(everyone) > 1 and len(set(everyone)) == 1
        if self._equal == PASSES and not self._communicator.rank:
            warn_of_same_work("ht.shard")
