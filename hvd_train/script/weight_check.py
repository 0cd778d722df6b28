"""The ranks of a script compare their weights and learning rates now and then.

They do so where gradients travel. A script that moves weights by itself, past its optimizers, sends none: its weights
are compared at the end of a pass in which they moved, in sums over ranks, and at the exit.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable, Mapping

from hvd_train.core.agreement import agree_on_weights, due
from hvd_train.errors import CommunicationError, name_ranks
from hvd_train.protocol import Communicator

_followed: weakref.WeakValueDictionary[int, WeightCheck] = weakref.WeakValueDictionary()  # by number of the model
_every = 0  # sums over ranks between two comparisons; 0: there has been no model to follow
_sums = 0  # how often numbers were added up over ranks


class WeightCheck:
    """One model's weights and settings, compared after every ``every`` steps (0: never).

    ``checksums`` gives a bit sum of each weight, ``settings`` what else must be equal and is the likely cause of a
    difference. ``fix``: what the error advises.
    """

    def __init__(
        self,
        communicator: Communicator,
        every: int,
        checksums: Callable[[], Mapping[str, int]],
        settings: Callable[[], Mapping[str, str]],
        fix: str,
    ) -> None:
        self._communicator, self.every, self._fix = communicator, every, fix
        self._checksums, self._settings = checksums, settings
        self._first, self._hand_fix = "", fix
        self._stepped: Callable[[], bool] = lambda: True

    def due(self, before: int, after: int) -> bool:
        """Return whether a comparison is due in steps ``before`` + 1 to ``after``."""
        # One execution of Keras may make several steps.
        return any(due(step, self.every) for step in range(before + 1, after + 1))

    def compare(self, where: str, by_hand: bool = False) -> None:
        """Raise the same CommunicationError on all ranks where something differs; on all ranks together."""
        if self.every:
            sums, settings = self._checksums(), self._settings()
            fix = self._hand_fix if by_hand and not self._stepped() else self._fix
            agree_on_weights(self._communicator, sums, where, settings=settings, fix=fix)

    # ---- weights that a script moves by itself

    def follow(self, number: int, stepped: Callable[[], bool], fix: str) -> None:
        """Compare also where no gradient travels. ``number``: of the model, the same on all ranks.

        ``stepped`` returns whether gradients of the model have ever travelled. ``fix``: what the error advises if not.
        """
        global _every
        if self.every:
            self._stepped, self._hand_fix, self._first = stepped, fix, self.digest()
            _followed[number], _every = self, max(_every, self.every)

    def digest(self) -> str:
        return hashlib.blake2b(json.dumps(dict(self._checksums())).encode(), digest_size=8).hexdigest()

    def moved_alone(self) -> bool:
        """Return whether weights have moved though no gradient has ever travelled."""
        return not self._stepped() and self.digest() != self._first

    def error_at_exit(self, ranks: list[int]) -> CommunicationError:
        what = f"the weights of this rank differ from those of {name_ranks(ranks)}, and no gradient has travelled"
        return CommunicationError(what, where="the end of the script", fix=self._hand_fix)


def digests() -> dict[int, str]:
    """Return {number: digest} of the weights of each model."""
    return {number: check.digest() for number, check in sorted(_followed.items())}


def pass_ended(before: Mapping[int, str], where: str) -> None:
    """Compare the models whose weights are not as in ``before``, at the end of a pass in which no optimizer stepped.

    A rank that goes through a pass by itself moves no weights, and compares nothing.
    """
    for number, check in sorted(_followed.items()):
        if number in before and before[number] != check.digest():
            check.compare(where, by_hand=True)


def summed(where: str, communicator: Communicator) -> None:
    """Compare all models now and then where numbers are added up over ranks; on all ranks together."""
    global _sums
    _sums += 1
    if not (_every and (_sums == 1 or due(_sums, _every))):
        return
    local = digests()
    message = json.dumps({str(number): digest for number, digest in local.items()}).encode()
    everyone = [json.loads(part) for part in communicator.allgather_bytes(message, f"{where}.weights")]
    for number in local:
        # A model that is gone on a rank is not compared: when Python frees one is chance.
        values = {digests.get(str(number)) for digests in everyone}
        if len(values) > 1 and None not in values:
            _followed[number].compare(where, by_hand=True)


def at_exit() -> dict[str, str]:
    """Return {number: digest} of the models whose weights have moved though no gradient has ever travelled."""
    return {str(number): check.digest() for number, check in sorted(_followed.items()) if check.moved_alone()}


def compare_at_exit(local: Mapping[str, str], everyone: Mapping[int, Mapping[str, str]]) -> None:
    """Raise CommunicationError where ranks that have come to their end have other weights than this one.

    Nobody waits for a rank: the last one to end sees all. Ranks whose weights have not moved do not count, as rank 0
    may have loaded other ones to export them. ``everyone``: {rank: what ``at_exit`` gave there}.
    """
    for number, digest in local.items():
        apart = [rank for rank, digests in everyone.items() if digests.get(number, digest) != digest]
        if apart:
            raise _followed[int(number)].error_at_exit(apart)
