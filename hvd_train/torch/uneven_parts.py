"""Batches of which ranks have shares of unequal length, where a script makes parts of a share: one rank may then call
``backward()`` more often than another.

While such a batch is in use, ranks compare at each backward pass, step, next batch and sum where they are. A rank that
is through with its parts takes part in the others' backward passes, with the gradients that all have: for a mean over
ranks that is no change, and a missing part counts as zero. So N ranks are one, where each part counts by its samples.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from typing import Any

from hvd_train.errors import CommunicationError
from hvd_train.protocol import Communicator
from hvd_train.script.dataloader import passes
from hvd_train.torch import backward
from hvd_train.torch.reducer import Reducer

# Where a rank is in its script.
BACKWARD = "backward()"
STEP = "optimizer.step()"
NEXT = "the next batch"
FORWARD = "forward with sync_batchnorm"
SUM = "ht.sum"
WHOLE = "make all batches of equal length, as with drop_last=True"
ONCE = f"put all parts of a batch but its last into ht.no_sync, or {WHOLE}"


class PartSync:
    """The places at which the ranks of ``communicator`` are in the parts of a batch."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._reducers: dict[float, Reducer] = {}
        self._stepped = False  # in the batch in use
        self._warned = False
        backward.before = lambda members: self.arrive(BACKWARD, [member.number for member in members])
        passes.leaving = lambda: self.arrive(NEXT)

    def add(self, reducer: Reducer) -> None:
        self._reducers[reducer.number] = reducer

    def arrive(self, place: str, numbers: Sequence[float] = ()) -> None:
        """This rank has come to ``place``; at a backward pass, ``numbers`` are of those whose gradients travel next.

        Returns when all ranks are at such a place, or this one at a backward pass. Raises CommunicationError on all
        ranks where their work cannot be joined.
        """
        while shares := [p.share_of_batch for p in passes.uneven()]:
            changed = [number for number, reducer in self._reducers.items() if place != BACKWARD and reducer.changed()]
            # Of each rank: its place, its shares' lengths, reducers that exchange next, those with changed gradients.
            message = json.dumps([place, shares, list(numbers), changed]).encode()
            everyone = [json.loads(part) for part in self._communicator.allgather_bytes(message, "parts of a batch")]
            # All at one place: nobody is ahead, and each goes on.
            if len({there for there, *_ in everyone}) == 1:
                self._stepped = place != NEXT and (self._stepped or place == STEP)
                return
            self._check(everyone)
            if place == BACKWARD:
                return
            # This rank is through with its parts: it takes part in the others' pass and asks again.
            for number in next(numbers for there, _, numbers, _ in everyone if there == BACKWARD):
                self._reducers[number].adopt()

    def _check(self, everyone: Sequence[Any]) -> None:
        places = [there for there, *_ in everyone]
        more = [rank for rank, there in enumerate(places) if there == BACKWARD]
        less = [rank for rank, there in enumerate(places) if there != BACKWARD]
        lengths = ", ".join(str(shares[0]) for _, shares, *_ in everyone)
        what = f"the ranks' shares of a batch differ in length ({lengths} samples)"
        what += ", and they make unequal numbers of parts of them"
        listed = ", ".join(f"{there} on rank {rank}" for rank, there in enumerate(places))
        numbers = {number for there, _, sent, _ in everyone if there == BACKWARD for number in sent}
        changed = [rank for rank, (*_, sent) in enumerate(everyone) if numbers.intersection(sent)]
        stepped = self._stepped and NEXT in places  # the others would make a step more
        reason = ""
        if not more or stepped or FORWARD in places:
            reason = f"{what}: {listed}"
        elif changed:
            reason = f"{what}: rank {changed[0]} has changed its gradients, and others call backward() again"
        elif not numbers <= set(self._reducers):
            reason = f"{what}, one of which unfreezes parameters"
        if reason:
            fix = WHOLE if FORWARD in places or stepped or not more else ONCE
            raise CommunicationError(reason, where="ht.shard", fix=fix, common=True)
        if not self._warned and not self._communicator.rank:
            what = f"{what}: rank {more[0]} calls backward() more often than rank {less[0]}"
            fix = "this is exact where each part counts by its samples (reduction='sum', divided by the share's length)"
            warnings.warn(f"{what}; ht.shard; {fix}", stacklevel=2)
        self._warned = True
