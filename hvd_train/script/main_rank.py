"""The work of a script's rank 0 for all ranks: it prints, and shows progress."""

from __future__ import annotations

import atexit
import builtins
import warnings
from typing import Any

from hvd_train.errors import ConfigError


def print_on(main: bool, *values: Any, **options: Any) -> None:
    """Python's ``print`` where ``main`` is true; nothing elsewhere."""
    if main:
        builtins.print(*values, **options)


def progress_on(main: bool, where: str, *arguments: Any, **options: Any) -> Any:
    """tqdm's progress bar over an iterable. It shows where ``main`` is true, and is silent elsewhere.

    ``where``: the function's name in the script. Raises ConfigError where tqdm is not installed.
    """
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ConfigError("tqdm is not installed", where=where, fix="pip install tqdm", common=True) from error
    return tqdm(*arguments, **{**options, "disable": options.get("disable", False) if main else True})


class UnsharedSums:
    """Says once, on rank 0, that sums over a rank's part of the data were not added up over ranks.

    A pass over this rank's batches without an optimizer's step is the script's validation. What it adds up is this
    rank's, and so is a "best" that is chosen by it. ``cure``: what adds it up.
    """

    def __init__(self, main: bool, cure: str) -> None:
        self._main, self._cure, self._open, self._since = main, cure, False, 0
        self.count = 0  # how often something of all ranks has been joined
        # The last pass of a script is often its test.
        atexit.register(self.begins)

    def passed(self, since: int | None = None) -> None:
        """A pass without a step has ended. ``since``: ``count`` at its beginning, if ``begins`` was not called."""
        self._open = self._open or self.count == (self._since if since is None else since)

    def shared(self, traced: bool = False) -> None:
        """Note that numbers were added up over ranks; ``traced``: will be, whenever a graph runs."""
        self.count += 1
        self._open, self._main = False, self._main and not traced

    def stepped(self) -> None:
        """Note that gradients were exchanged."""
        self.count += 1
        self.begins()

    def begins(self) -> None:
        """Note that another pass begins, or the script ends: sums of the last one are done with."""
        if self._open and self._main:
            what = "a pass over this rank's part of the data made no step, and nothing of it was added up over ranks"
            warnings.warn(f"{what}: each rank has a sum of its own ({self._cure})", stacklevel=3)
            self._main = False
        self._open, self._since = False, self.count
