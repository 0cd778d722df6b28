"""Output on rank 0 only: print, progress bar, and a warning about local sums."""

from __future__ import annotations

import atexit
import builtins
import warnings
from typing import Any

from hvd_train.errors import ConfigError


def print_on(main: bool, *values: Any, **options: Any) -> None:
    """Print if ``main`` is true."""
    if main:
        builtins.print(*values, **options)


def progress_on(main: bool, where: str, *arguments: Any, **options: Any) -> Any:
    """Wrap an iterable in tqdm's progress bar, which is shown if ``main`` is true.

    ``where``: the function's name in the script. Raises ConfigError if tqdm is not installed.
    """
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ConfigError("tqdm is not installed", where=where, fix="pip install tqdm", common=True) from error
    return tqdm(*arguments, **{**options, "disable": options.get("disable", False) if main else True})


class UnsharedSums:
    """A warning, once and on rank 0, that validation sums cover only this rank's data.

    A pass over this rank's batches without an optimizer step is probably a validation. Its sums are local, and so is a
    "best" chosen by them, unless the script adds them up over ranks. ``cure``: how to do that.
    """

    def __init__(self, main: bool, cure: str) -> None:
        self._main, self._cure, self._open, self._since = main, cure, False, 0
        self.count = 0  # how often values were combined over ranks
        # The last pass of a script is often its test.
        atexit.register(self.begins)

    def passed(self, since: int | None = None) -> None:
        """Record the end of a pass without a step. ``since``: ``count`` at its start, if ``begins`` was not called."""
        self._open = self._open or self.count == (self._since if since is None else since)

    def shared(self, traced: bool = False) -> None:
        """Record that numbers were added up over ranks; ``traced``: a graph will do so whenever it runs."""
        self.count += 1
        self._open, self._main = False, self._main and not traced

    def stepped(self, of_list: bool = False) -> None:
        """Record that gradients were exchanged; ``of_list``: of a batch of the last pass, which had ended before."""
        self.count += 1
        self._open = self._open and not of_list
        self.begins()

    def begins(self) -> None:
        """Warn about the last pass, if necessary, because another one begins or the script ends."""
        if self._open and self._main:
            what = "a pass over this rank's part of the data made no step, and nothing was added up over ranks"
            warnings.warn(f"{what}: each rank has its own sum ({self._cure})", stacklevel=3)
            self._main = False
        self._open, self._since = False, self.count
