"""Numbers of passes over data, from which the order of samples follows."""

from __future__ import annotations

from collections.abc import Callable


class PassNumbers:
    """Number passes by the optimizer steps made so far, so that a pass without a step shifts nothing.

    Ranks make equal numbers of steps, so counts are equal, whatever one of them takes from its data besides. A pass
    that begins after a step has another number than the one before, also where that was left early.

    ``steps`` gives the steps of this process so far; ``first`` is the number of a pass that begins now.
    """

    def __init__(self, steps: Callable[[], int], first: int) -> None:
        self._steps = steps
        self.set(first)

    @property
    def next(self) -> int:
        """The number of a pass that begins now."""
        return self._offset + self._steps()

    def set(self, number: int) -> None:
        """Number the next pass; later ones count on from it, by steps."""
        self._offset = number - self._steps()

    def skip(self) -> None:
        """Give the next pass another number, without a step between."""
        self._offset += 1
