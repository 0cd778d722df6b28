"""End a rank after an error: one line on stderr, the exit code, and no other rank left waiting."""

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
from hvd_train.launch.rendezvous import rank as rendezvous
from hvd_train.launch.signals import current_listener
from hvd_train.run_folder import layout
from hvd_train.run_folder.terminal import say

SPEAK_SECONDS = 3.0  # mpirun takes about a second to end the other ranks
# For rank 0 to print an error that all ranks have: on a busy machine it may come to it many seconds later than others.
COMMON_SECONDS = 15.0


def rank_tag(ranks: Sequence[int] = ()) -> str:
    """Return ``[rank 1]``: where an error came up. Empty for a process that was started alone."""
    try:
        here = world()
    except TrainError:
        return ""
    number = ", ".join(map(str, ranks)) or here.rank
    return f"[rank {number}]" if here.launcher else ""


def print_error(text: str, lines: Sequence[str], code: int, common: bool = False) -> None:
    """Print the lines of the error ``text``, unless rank 0 prints the same error; ``common``: all ranks raised it."""
    # Rank 0 prints at once. Another rank waits: if rank 0 has the same error, the launcher ends this rank meanwhile.
    # Some launchers end nobody, so rank 0 is asked. A rank that left at once would end rank 0 before it has printed:
    # mpirun ends all ranks when one of them fails.
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
    # Python's exit would call Horovod's, which waits for ranks that may never come, and close files.
    if rank_tag() or files.hanging():
        os._exit(code)
    sys.exit(code)


def exit_with_error(error: BaseException) -> None:
    """Print an error and end this process: a line for a mistake of the user, else the traceback as well."""
    summary = named_reason(error)[:2000]
    kept = _report_error(error, summary)
    if isinstance(error, LostRankError):
        _exit_after_lost(error)
    if isinstance(error, TrainError):
        print_error(str(error), _lines(error), error.exit_code, error.common)
        exit_rank(error.exit_code)
    # In one piece: ranks write to the same terminal.
    say("\n".join([f"error{rank_tag()}: {summary}", *_trace(error, kept)]), err=True)
    others = rendezvous.current() if rank_tag() else None
    if others is not None:
        others.report_exit(summary, 1)
    exit_rank(1)


def end_at_once(error: TrainError) -> NoReturn:
    """Print an error and end this process. Any thread may call it, as the main one may hang."""
    _report_error(error, str(error))
    print_error(str(error), _lines(error), error.exit_code)
    if listener := current_listener():
        files.within(listener.call_last, 1.0)
    os._exit(error.exit_code)


def _trace(error: BaseException, kept: str) -> list[str]:
    """Return the lines below an error that no check has caught: those of the user's code first, and what it was given.

    Where no line is the user's: which layer of the model. ``kept``: the file with the whole traceback, which is printed
    too where there is none, or nothing of the user's in it.
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
    """Report the error to whoever started this rank; return the file with its traceback, if one was written."""
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
    """End this rank because another one was lost, with the exit code of that one if it is known."""
    listener = current_listener()
    code = rendezvous.exit_code_of_lost(error.exit_code)
    # Who watches this rank, or has reported the cause, says more: the cause comes first.
    if not (listener and listener.is_watched) and not peers.cause_reported():
        lost = peers.lost()
        line = str(error).replace(SOME_RANK, lost, 1) if lost else str(error)
        say(f"error{rank_tag()}: {line}", err=True)
    # The launcher reports the code of the rank that ends first. That should be the lost one's, not ours.
    time.sleep(1.0)
    exit_rank(code)


def _keep_traceback(run_dir: Path | None, summary: str, error: BaseException) -> str:
    """Write the traceback into the run folder, and return the file, or nothing if it cannot be written."""
    if run_dir is None:
        return ""
    text = "".join([f"{summary}\n\n", *traceback.format_exception(error)])
    with suppress(TrainError):
        return layout.keep_failure(run_dir, f"rank-{world().rank}", text)
    return ""


def _lines(error: TrainError) -> list[str]:
    """Return ``error[rank 1]: what; where; what to do``, and the line of the user's code that raised, where one did.

    A table below the first line is indented and stands as it is.
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
