"""End a rank after an error: print one line, exit with its code, and leave no other rank waiting."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from hvd_train import files
from hvd_train.errors import SOME_RANK, STYLE, LostRankError, TrainError, named_reason, printable
from hvd_train.launch import peers
from hvd_train.launch.environment import world
from hvd_train.launch.rendezvous import client as rendezvous
from hvd_train.launch.signals import current_listener
from hvd_train.run_folder import layout
from hvd_train.run_folder.terminal import say

SPEAK_SECONDS = 3.0  # mpirun takes about a second to end the other ranks
# how long to wait for rank 0 to print an error that all ranks have; a busy machine may delay it by many seconds
COMMON_SECONDS = 15.0


def rank_tag(ranks: Sequence[int] = ()) -> str:
    """Return the tag ``[rank 1]`` of an error line; empty for a process that was started alone."""
    try:
        here = world()
    except TrainError:
        return ""
    number = ", ".join(map(str, ranks)) or here.rank
    return f"[rank {number}]" if here.launcher else ""


def print_error(text: str, lines: Sequence[str], code: int, common: bool = False) -> None:
    """Print the lines of an error, unless rank 0 prints the same ``text``. ``common``: all ranks raised it."""
    # Rank 0 prints at once. Another rank waits first: mpirun ends all ranks when one fails, so leaving at once could
    # end rank 0 before it has printed. Where the launcher ends no ranks, rank 0 is asked whether it has the same error.
    others, same = rendezvous.current() if rank_tag() else None, None
    if rank_tag() not in ("", "[rank 0]"):
        if others is None:
            time.sleep(COMMON_SECONDS if common else SPEAK_SECONDS)
        elif same := others.report_exit(text, code, SPEAK_SECONDS):
            return
        if common:
            return
    say("\n".join(lines), err=True)
    if others is not None and same is None:
        others.report_exit(text, code)


def exit_rank(code: int) -> NoReturn:
    """End this process with ``code``."""
    if listener := current_listener():
        listener.report_end(code=code, line=f"left with code {code}")
    sys.stdout.flush()
    sys.stderr.flush()
    # sys.exit() would run Horovod's shutdown, which waits for ranks that may never come, and close files.
    if rank_tag() or files.hanging():
        os._exit(code)
    sys.exit(code)


def exit_with_error(error: BaseException) -> None:
    """Print an error and end this process. Errors that are not the user's also print a traceback."""
    summary = named_reason(error)[:2000]
    kept = _report_error(error, summary)
    if isinstance(error, LostRankError):
        _exit_after_lost(error)
    if isinstance(error, TrainError):
        print_error(str(error), _lines(error), error.exit_code, error.common)
        exit_rank(error.exit_code)
    # One write, because all ranks share the terminal.
    say("\n".join([f"error{rank_tag()}: {summary}", *_trace(error, kept)]), err=True)
    others = rendezvous.current() if rank_tag() else None
    if others is not None:
        others.report_exit(summary, 1)
    exit_rank(1)


def end_at_once(error: TrainError) -> NoReturn:
    """Print an error and end this process, from any thread: the main thread may hang."""
    _report_error(error, str(error))
    print_error(str(error), _lines(error), error.exit_code)
    if listener := current_listener():
        files.within(listener.call_last, 1.0)
    os._exit(error.exit_code)


def _trace(error: BaseException, kept: str) -> list[str]:
    """Return the lines to print below an unexpected error: first the user's code, then the values it was given.

    Without a line of user code, names the layer of the model. ``kept``: the file with the traceback; without it, or
    without user code, the traceback is printed too.
    """
    from hvd_train.config.user_code import failed_layer, user_frames

    frames = user_frames(error)
    lines = [line.rstrip("\n") for line in traceback.format_list(frames)]
    if not frames and (layer := failed_layer(error)):
        lines = [layer]
    if lines:
        lines += [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]
    rest = f"the whole traceback: {kept}" if lines and kept else "".join(traceback.format_exception(error))
    return [printable(STYLE.sub("", line)).rstrip("\n") for line in (*lines, rest)]


def _report_error(error: BaseException, summary: str) -> str:
    """Report the error to the process that started this rank. Returns the file with the traceback, if written."""
    listener, kept = current_listener(), ""
    if listener is None:
        return kept
    if isinstance(error, TrainError):
        lost = isinstance(error, LostRankError)
        listener.report_end(code=error.exit_code, line=str(error)[:2000], lost=lost, kept="")
    else:
        kept = _keep_traceback(listener.run_dir, summary, error)
        listener.report_end(code=1, line=summary, lost=False, kept=kept)
    return kept


def _exit_after_lost(error: LostRankError) -> NoReturn:
    """End this rank because another one was lost, with that rank's exit code if it is known."""
    listener = current_listener()
    code = rendezvous.exit_code_of_lost(error.exit_code)
    # The watching process, or the rank that failed, prints the cause, which must come first.
    if not (listener and listener.is_watched) and not peers.cause_reported():
        lost = peers.lost()
        line = str(error).replace(SOME_RANK, lost, 1) if lost else str(error)
        say(f"error{rank_tag()}: {line}", err=True)
    # The launcher reports the code of the rank that ends first, which should be the lost rank.
    time.sleep(1.0)
    exit_rank(code)


def _keep_traceback(run_dir: Path | None, summary: str, error: BaseException) -> str:
    """Write the traceback into the run folder. Returns the file, or None if it cannot be written."""
    if run_dir is None:
        return ""
    text = "".join([f"{summary}\n\n", *traceback.format_exception(error)])
    with suppress(TrainError):
        return layout.keep_failure(run_dir, f"rank-{world().rank}", text)
    return ""


def _lines(error: TrainError) -> list[str]:
    """Format ``error[rank 1]: what; where; what to do``, followed by the line of user code that raised, if any.

    Further lines (a table) are only indented.
    """
    from hvd_train.config.user_code import user_place

    first, *rest = str(error).split("\n")
    place = user_place(error.__cause__)
    if place and place not in first:
        first = f"{first}; {place}"
    where = rank_tag(error.ranks)
    if rest and not rest[0].startswith("  "):
        return [f"error{where}: {line}" for line in (first, *rest)]
    return [f"error{where}: {first}", *rest]
