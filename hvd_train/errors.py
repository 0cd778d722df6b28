"""The errors that users see. Each has an exit code; the command line prints one line and exits with that code.

``0`` success, ``2`` usage or configuration, ``3`` data, ``4`` checkpoint, ``5`` a rank was lost or the ranks disagree
at run time, ``6`` a non-finite loss, ``75`` stopped by a signal and saved.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from typing import Any

LISTED = 20  # names in a message


def printable(text: str, one_line: bool = False) -> str:
    """Escape control characters, so that text of a file or a user cannot control the terminal.

    ``one_line``: also line breaks, for a name that must not look like a line of ours.
    """
    # An escape sequence in a file name or a YAML value could move the cursor or set the window's title.
    return "".join(c if c.isprintable() or (c in "\n\t" and not one_line) else "?" for c in text)


STYLE = re.compile("\x1b\\[[0-9;]*m")  # colours, which Keras puts into messages
# What Keras writes around the reason in its messages.
KERAS_HEAD, KERAS_END = "Exception encountered when calling ", "\n\nArguments received by "


def _reasons(error: BaseException) -> list[str]:
    text = STYLE.sub("", str(error)).partition(KERAS_END)[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return [line for line in lines if not line.startswith(KERAS_HEAD)] or [type(error).__name__]


def reason(error: BaseException) -> str:
    """Return the line of an error's message that says what happened."""
    return _reasons(error)[0]


def whole_reason(error: BaseException) -> str:
    """Return an error's message in one line, without what Keras writes around it."""
    return " ".join(" ".join(_reasons(error)).split())


def named_reason(error: BaseException) -> str:
    """Return ``reason`` with the error's type: ``KeyError: 'a'``."""
    return f"{type(error).__name__}: {reason(error)}"


def name_ranks(ranks: Iterable[int]) -> str:
    """Name ranks in a message: ``rank 1``, or ``ranks 0, 2``."""
    names = [str(rank) for rank in ranks]
    return f"{'ranks' if len(names) > 1 else 'rank'} {', '.join(names)}"


def listing(names: Sequence[Any]) -> str:
    """Write the first names as text, and the number of further ones."""
    more = f" and {len(names) - LISTED:,} more" if len(names) > LISTED else ""
    return ", ".join(map(str, names[:LISTED])) + more


def noun_and_names(noun: str, names: Sequence[Any]) -> str:
    """Write a noun with its names as text: ``class cat``, or ``columns age, height``."""
    ending = ("es" if noun.endswith("s") else "s") * (len(names) != 1)
    return f"{noun}{ending} {listing(names)}"


def amount(count: int, noun: str) -> str:
    """Return a number with its noun: ``1 rank``, ``2 ranks``."""
    return f"{count} {noun}" + "s" * (count != 1)


class TrainError(Exception):
    """An error that says what went wrong, where, and what to do.

    For example ``TrainError("the file is empty", where="data.csv", fix="write it again")``.

    ``common``: every rank raises the same error, so only rank 0 prints it; ``ranks``: where it happened, if not on the
    rank that prints it.
    """

    exit_code = 1

    def __init__(
        self, what: str, *, where: str = "", fix: str = "", common: bool = False, ranks: Sequence[int] = ()
    ) -> None:
        super().__init__(what, where, fix)
        self.what, self.where, self.fix, self.common, self.ranks = what, where, fix, common, tuple(ranks)

    def __reduce__(self) -> Any:
        # An error of a process that fetches samples is sent to the rank. Subclasses take other arguments.
        return _sent, (type(self), self.args, self.__dict__)

    def __str__(self) -> str:
        where = printable(self.where, one_line=True)
        return printable("; ".join(part for part in (self.what, where, self.fix) if part))


def _sent(kind: type[TrainError], arguments: tuple[Any, ...], state: dict[str, Any]) -> TrainError:
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(state)
    return error


class ConfigError(TrainError):
    """The command line, the configuration or the environment cannot be used."""

    exit_code = 2


class DataError(TrainError):
    """A data set is missing, damaged or unfit."""

    exit_code = 3


class CheckpointError(TrainError):
    """A checkpoint or run folder cannot be written, read or used."""

    exit_code = 4


class CommunicationError(TrainError):
    """A rank was lost, stalled, or differs from the others."""

    exit_code = 5


SOME_RANK = "another rank"  # replaced in the message once the rank is known


class LostRankError(CommunicationError):
    """Another rank has ended. That rank's message and exit code take precedence."""


class EndedRankError(CommunicationError):
    """Another rank has finished its script, and this one still waits for it."""


class NonFiniteError(TrainError):
    """The loss or a gradient is NaN or infinite."""

    exit_code = 6


class Interrupted(TrainError):
    """A signal requested the end: all ranks have saved at the same step."""

    exit_code = 75  # sysexits.h: a temporary failure, try again

    def __init__(self, number: int, step: int) -> None:
        name = signal.Signals(number).name
        super().__init__(f"stopped by {name} at step {step}, and saved", fix="--resume auto goes on", common=True)
        self.exit_code = stopped_code(number)


def stopped_code(number: int) -> int:
    """Return the exit code of a job that a signal stopped: 130 for Ctrl-C, as in a shell, else 75."""
    return 130 if number == signal.SIGINT else Interrupted.exit_code


def nothing_saved(number: int, rank: int | None = None) -> str:
    """Describe an end by a signal before the first step. ``rank``: the one that got it, if nothing else is known."""
    name = signal.Signals(number).name
    who = f"stopped by {name}" if rank is None else f"rank {rank} was told to stop ({name})"
    return f"{who} before the first step: there was nothing to save"


class RankError(TrainError):
    """A function that ``hvd_train.launch`` ran raised: the error's type and message, the rank, and its traceback."""

    def __init__(self, kind: str, message: str, rank: int, trace: str, exit_code: int) -> None:
        super().__init__(f"{kind}: {message}", where=f"rank {rank}")
        self.kind, self.message, self.rank, self.trace, self.exit_code = kind, message, rank, trace, exit_code

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.what}\n\n{self.trace}"
