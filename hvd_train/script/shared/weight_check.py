"""Regular comparison of weights and learning rates between the ranks of a script.

It happens at the exchange of gradients. If a script updates weights itself, without our optimizers, there is none. Then
weights are compared at the end of a pass that changed them, in sums over ranks, and at exit.
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
_every = 0  # sums over ranks between two comparisons; 0: no model yet
_sums = 0  # number of sums over ranks so far


class WeightCheck:
    """The comparison of one model's weights and settings every ``every`` steps (0: never).

    ``checksums`` returns a checksum of each weight, ``settings`` other values that must be equal and are likely causes
    of a difference. ``fix``: the advice in the error.
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
        """Raise the same CommunicationError on all ranks if something differs; all ranks call it."""
        if self.every:
            sums, settings = self._checksums(), self._settings()
            fix = self._hand_fix if by_hand and not self._stepped() else self._fix
            agree_on_weights(self._communicator, sums, where, settings=settings, fix=fix)

    # ---- weights that a script updates itself

    def follow(self, number: int, stepped: Callable[[], bool], fix: str) -> None:
        """Compare also without an exchange of gradients. ``number``: of the model, the same on all ranks.

        ``stepped`` returns whether the model's gradients were ever exchanged. ``fix``: the advice if not.
        """
        global _every
        if self.every:
            self._stepped, self._hand_fix, self._first = stepped, fix, self.digest()
            _followed[number], _every = self, max(_every, self.every)

    def digest(self) -> str:
        return hashlib.blake2b(json.dumps(dict(self._checksums())).encode(), digest_size=8).hexdigest()

    def moved_alone(self) -> bool:
        """Return whether weights have changed without any exchange of gradients."""
        return not self._stepped() and self.digest() != self._first

    def error_at_exit(self, ranks: list[int]) -> CommunicationError:
        what = f"the weights of this rank differ from those of {name_ranks(ranks)}, and no gradient was exchanged"
        return CommunicationError(what, where="the end of the script", fix=self._hand_fix)


def digests() -> dict[int, str]:
    """Return {model number: digest of its weights}."""
    return {number: check.digest() for number, check in sorted(_followed.items())}


def pass_ended(before: Mapping[int, str], where: str) -> None:
    """Compare models whose weights differ from ``before``, at the end of a pass without an optimizer step.

    If one rank alone makes a pass, it changes no weights, so it compares nothing.
    """
    for number, check in sorted(_followed.items()):
        if number in before and before[number] != check.digest():
            check.compare(where, by_hand=True)


def summed(where: str, communicator: Communicator) -> None:
    """Compare all models now and then in a sum over ranks; all ranks call it."""
    global _sums
    _sums += 1
    if not (_every and (_sums == 1 or due(_sums, _every))):
        return
    local = digests()
    message = json.dumps({str(number): digest for number, digest in local.items()}).encode()
    everyone = [json.loads(part) for part in communicator.allgather_bytes(message, f"{where}.weights")]
    for number in local:
        # Skip a model that a rank has already freed: when Python frees it is chance.
        values = {digests.get(str(number)) for digests in everyone}
        if len(values) > 1 and None not in values:
            _followed[number].compare(where, by_hand=True)


def at_exit() -> dict[str, str]:
    """Return {model number: digest} for models changed without any exchange of gradients."""
    return {str(number): check.digest() for number, check in sorted(_followed.items()) if check.moved_alone()}


def compare_at_exit(local: Mapping[str, str], everyone: Mapping[int, Mapping[str, str]]) -> None:
    """Raise CommunicationError if ranks that have ended have other weights than this one.

    No rank waits: the last one to end sees all others. Ranks whose weights have not changed do not count, because rank
    0 may have loaded others to export them. ``everyone``: {rank: its result of ``at_exit``}.
    """
    for number, digest in local.items():
        others = [rank for rank, digests in everyone.items() if digests.get(number, digest) != digest]
        if others:
            raise _followed[int(number)].error_at_exit(others)
