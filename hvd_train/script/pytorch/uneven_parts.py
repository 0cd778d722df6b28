"""Synchronization of ranks that split uneven shares of a batch into unequal numbers of parts, so that one rank calls
``backward()`` more often than another.

During such a batch the ranks compare their positions at each backward pass, step, next batch and sum. A rank that has
finished its parts joins the others' backward passes with its current gradients, which are equal on all ranks. So their
mean does not change, and a missing part counts as zero. N ranks equal one if each part is weighted by its samples.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from typing import Any

from hvd_train.errors import CommunicationError
from hvd_train.protocol import Communicator
from hvd_train.script.pytorch import backward
from hvd_train.script.pytorch.reducer import Reducer
from hvd_train.script.shared.dataloader import passes

# The position of a rank in its script.
BACKWARD = "backward()"
STEP = "optimizer.step()"
NEXT = "the next batch"
FORWARD = "forward with sync_batchnorm"
SUM = "ht.sum"
WHOLE = "make all batches of equal length, as with drop_last=True"
ONCE = f"put all parts of a batch but its last into ht.no_sync, or {WHOLE}"


class PartSync:
    """The comparison of the ranks' positions within an uneven batch."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._reducers: dict[float, Reducer] = {}
        self._stepped = False  # within the current batch
        self._warned = False
        backward.before = lambda members: self.arrive(BACKWARD, [member.number for member in members])
        passes.leaving = lambda: self.arrive(NEXT)

    def add(self, reducer: Reducer) -> None:
        self._reducers[reducer.number] = reducer

    def arrive(self, place: str, numbers: Sequence[float] = ()) -> None:
        """Wait at position ``place``, and join other ranks' backward passes meanwhile.

        ``numbers``: at a backward pass, the reducers that exchange next. Returns when all ranks are at the same
        position, or this one is at a backward pass. Raises CommunicationError on all ranks if they cannot be matched.
        """
        while shares := [p.share_of_batch for p in passes.uneven()]:
            changed = [number for number, reducer in self._reducers.items() if place != BACKWARD and reducer.changed()]
            # For each rank: position, lengths of shares, reducers that exchange next, reducers with changed gradients.
            message = json.dumps([place, shares, list(numbers), changed]).encode()
            everyone = [json.loads(part) for part in self._communicator.allgather_bytes(message, "parts of a batch")]
            # All ranks are at the same position and continue.
            if len({there for there, *_ in everyone}) == 1:
                self._stepped = place != NEXT and (self._stepped or place == STEP)
                return
            self._check(everyone)
            if place == BACKWARD:
                return
            # This rank has finished its parts: it joins the others' pass and compares again.
            for number in next(numbers for there, _, numbers, _ in everyone if there == BACKWARD):
                self._reducers[number].adopt()

    def _check(self, everyone: Sequence[Any]) -> None:
        places = [there for there, *_ in everyone]
        more = [rank for rank, there in enumerate(places) if there == BACKWARD]
        less = [rank for rank, there in enumerate(places) if there != BACKWARD]
        lengths = ", ".join(str(shares[0]) for _, shares, *_ in everyone)
        what = f"the ranks' shares of a batch differ in length ({lengths} samples)"
        what += ", and they split them into unequal numbers of parts"
        listed = ", ".join(f"{there} on rank {rank}" for rank, there in enumerate(places))
        numbers = {number for there, _, sent, _ in everyone if there == BACKWARD for number in sent}
        changed = [rank for rank, (*_, sent) in enumerate(everyone) if numbers.intersection(sent)]
        stepped = self._stepped and NEXT in places  # the others would make one more step
        reason = ""
        if not more or stepped or FORWARD in places:
            reason = f"{what}: {listed}"
        elif changed:
            reason = f"{what}: rank {changed[0]} has changed its gradients, and others call backward() again"
        elif not numbers <= set(self._reducers):
            reason = f"{what}, in one of which parameters are unfrozen"
        if reason:
            fix = WHOLE if FORWARD in places or stepped or not more else ONCE
            raise CommunicationError(reason, where="ht.shard", fix=fix, common=True)
        if not self._warned and not self._communicator.rank:
            what = f"{what}: rank {more[0]} calls backward() more often than rank {less[0]}"
            fix = "this is exact if parts are weighted by samples (reduction='sum', divided by the share's length)"
            warnings.warn(f"{what}; ht.shard; {fix}", stacklevel=2)
        self._warned = True
