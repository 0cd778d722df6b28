"""Numbers of passes over data, which determine the order of samples."""

from __future__ import annotations

from collections.abc import Callable


class PassNumbers:
    """Numbers of passes that count optimizer steps, so that passes without a step do not matter.

    Ranks make equal numbers of steps, so the numbers are equal, even if one rank iterates over its data more often. A
    pass that begins after a step has another number than the one before, even if that ended early.

    ``steps`` returns the steps of this process so far; ``first`` is the number of the next pass.
    """

    def __init__(self, steps: Callable[[], int], first: int) -> None:
        self._steps = steps
        self.set(first)

    @property
    def next(self) -> int:
        """Return the number of the next pass."""
        return self._offset + self._steps()

    def set(self, number: int) -> None:
        """Set the number of the next pass, from which later ones count by steps."""
        self._offset = number - self._steps()

    def skip(self) -> None:
        """Increase the number of the next pass without a step."""
        self._offset += 1
