"""Loops over a rank's share of which nothing reaches the other ranks, as a validation loss that each rank keeps.

A whole pass over a loader of ``ht.shard`` in which neither gradients nor sums travel is one, unless ``ht.sum`` follows
before the next step. Rank 0 says so once, for each rank would print, compare and decide by a number of its own.
"""

from __future__ import annotations

import warnings


class Alone:
    def __init__(self) -> None:
        self._joined = 0  # how often something of all ranks has travelled
        self._ended = self._told = False

    def begin(self) -> int:
        """At the beginning of a pass; for ``end``."""
        return self._joined

    def end(self, began: int) -> None:
        """A whole pass is over, on rank 0."""
        self._ended = self._ended or began == self._joined

    def summed(self) -> None:
        """Ranks have joined what they computed."""
        self._joined, self._ended = self._joined + 1, False

    def exchanged(self) -> None:
        """Gradients have travelled."""
        self._joined += 1
        self.tell()

    def tell(self) -> None:
        """The script goes on, or ends."""
        ended, self._ended = self._ended, False
        if ended and not self._told:
            self._told = True
            what = "a loop over a loader of ht.shard joined nothing: each rank has computed over its own share alone"
            fix = "join sums before you divide, print or decide by them: loss, count = ht.sum(loss, count)"
            warnings.warn(f"{what}; ht.shard; {fix}", stacklevel=2)


alone = Alone()
