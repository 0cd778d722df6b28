"""How a rank ends when something went wrong: one line on stderr, the exit code, and no other rank left waiting."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from hvd_train.errors import LostRankError, TrainError
from hvd_train.launch import peers
from hvd_train.launch.environment import world
from hvd_train.launch.outside import EARS
from hvd_train.launch.rendezvous import rank as rendezvous

SPEAK_SECONDS = 3.0  # mpirun takes about a second to end the other ranks


def rank_tag(ranks: Sequence[int] = ()) -> str:
    """``[rank 1]``: where an error came up; nothing for a process that was started alone."""
    try:
        here = world()
    except TrainError:
        return ""
    number = ", ".join(map(str, ranks)) or here.rank
    return f"[rank {number}]" if here.launcher else ""


def tell(text: str, lines: Sequence[str], code: int) -> None:
    """Prints the lines of an error, ``text``. Rank 0 speaks at once. Another rank waits: if rank 0 has the same to say,
    the launcher ends this one first; some launchers end nobody, so rank 0 is asked."""
    others, same = rendezvous.current() if rank_tag() else None, None
    if rank_tag() not in ("", "[rank 0]"):
        if others is None:
            time.sleep(SPEAK_SECONDS)
        elif same := others.report_exit(text, code, SPEAK_SECONDS):
            return
    print(*lines, sep="\n", file=sys.stderr, flush=True)
    if others is not None and same is None:
        others.report_exit(text, code)


def shutdown(code: int) -> NoReturn:
    """Under a launcher without Python's own exit: Horovod's would wait for ranks that may never come."""
    if EARS:
        EARS[0].end(code=code, line=f"left with code {code}")
    sys.stdout.flush()
    sys.stderr.flush()
    if rank_tag():
        os._exit(code)
    sys.exit(code)


def shutdown_with(error: BaseException) -> None:
    """Tells an error and ends: a line for the user's mistakes, the traceback as well for a fault of ours or theirs."""
    ears = EARS[0] if EARS else None
    summary = f"{type(error).__name__}: {error}".splitlines()[0][:2000]
    if ears:
        code, told = (error.exit_code, str(error)) if isinstance(error, TrainError) else (1, summary)
        kept = "" if isinstance(error, TrainError) else _keep(ears.run_dir, summary, error)
        ears.end(code=code, line=told[:2000], lost=isinstance(error, LostRankError), kept=kept)
    if isinstance(error, LostRankError):
        code = rendezvous.exit_code_of_lost(error.exit_code)
        if not (ears and ears.told) and not peers.told():  # who reads it knows the cause, which comes first
            print(f"error{rank_tag()}: {error}", file=sys.stderr)
        time.sleep(1.0)  # the launcher reports the code of the rank that ends first: the lost one's, not ours
        shutdown(code)
    if isinstance(error, TrainError):
        if error.common and rank_tag() in ("", "[rank 0]"):
            print(*_lines(error), sep="\n", file=sys.stderr)
        elif not error.common:
            tell(str(error), _lines(error), error.exit_code)
        shutdown(error.exit_code)
    print(f"error{rank_tag()}: {summary}", file=sys.stderr)
    traceback.print_exception(error)
    others = rendezvous.current() if rank_tag() else None
    if others is not None:
        others.report_exit(summary, 1)
    shutdown(1)


def _keep(run_dir: Path | None, summary: str, error: BaseException) -> str:
    """The traceback in the run folder; gives the file, or nothing where it cannot be written."""
    if run_dir is None:
        return ""
    with suppress(OSError, TrainError):
        folder = run_dir / "failures"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-rank-{world().rank}.txt"
        path.write_text("".join([f"{summary}\n\n", *traceback.format_exception(error)]), encoding="utf-8")
        return str(path)
    return ""


def _lines(error: TrainError) -> list[str]:
    """``error[rank 1]: what; where; what to do``; a table below the first line is indented and stands as it is."""
    first, *rest = str(error).split("\n")
    where = rank_tag(error.ranks)
    if rest and not rest[0].startswith("  "):
        return [f"error{where}: {line}" for line in (first, *rest)]
    return [f"error{where}: {first}", *rest]
