"""The ranks of a script compare their weights and learning rates now and then."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hvd_train.core.agreement import agree_on_weights, due
from hvd_train.protocol import Communicator


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

    def due(self, before: int, after: int) -> bool:
        """Return whether a comparison is due in steps ``before`` + 1 to ``after``."""
        # One execution of Keras may make several steps.
        return any(due(step, self.every) for step in range(before + 1, after + 1))

    def compare(self, where: str) -> None:
        """Raise the same CommunicationError on all ranks where something differs; on all ranks together."""
        if self.every:
            sums, settings = self._checksums(), self._settings()
            agree_on_weights(self._communicator, sums, where, settings=settings, fix=self._fix)
