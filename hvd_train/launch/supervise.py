"""``hvd-train fit -np N``: start the ranks of this host, watch them, and restart them.

Each attempt has a ``StatusTable`` in memory, into which every rank writes its phase, its step and how it ended. This
process never talks to ranks over a network, so a rank that hangs cannot block it:

1. ``process.run`` starts the launcher, and waits for the ends of the ranks through their pidfds.
2. When a rank fails, or the watchdog finds one stuck, all are ended: Horovod cannot continue with fewer ranks.
3. ``_cause`` finds the first rank that failed. Others, which failed because of it, report ``lost``.
4. With ``--max-restarts`` all ranks restart from the newest checkpoint, unless they would fail in the same way.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from hvd_train import faults
from hvd_train.checkpoint import store
from hvd_train.errors import CommunicationError, ConfigError, amount, nothing_saved, stopped_code
from hvd_train.launch import process, start
from hvd_train.launch.launchers import NONE, choose
from hvd_train.launch.launchers.base import LOST_FIX, Launcher, named_signal
from hvd_train.launch.spares import Spares
from hvd_train.launch.status import VARIABLE, StatusTable, supported
from hvd_train.launch.watchdog import Watchdog
from hvd_train.run_folder import layout
from hvd_train.run_folder.terminal import say

IDLE_RESTARTS = 2  # give up after so many restarts in a row without progress
FINAL = {2, 3, 4, 6}  # exit codes of user errors, and of failures that would repeat


@dataclass(frozen=True)
class Cause:
    """The cause of a job's end: the first thing that went wrong.

    ``rank`` None: the launcher failed. ``silent``: the rank could not report its error. ``kept``: the file with its
    traceback.
    """

    what: str
    place: str
    code: int
    rank: int | None = None
    silent: bool = True
    kept: str = ""
    unsaid: bool = False  # the supervisor must print the error


def supervise(
    num_proc: int,
    launcher: str,
    arguments: list[str],
    run_dir: Path | None,
    max_restarts: int,
    verbose: bool,
    watchdog_s: float = 0,
    spares: Spares | None = None,
    min_np: int | None = None,
    program: Sequence[str] = (),
) -> int:
    """Train to the end, with at most ``max_restarts`` restarts. Returns the exit code.

    Raises the error of a rank that could not print it. ``watchdog_s``: seconds without a step until ranks are stuck, 0:
    never. ``spares`` replace ranks at a restart. ``min_np``: each restart drops the lost rank, down to so many ranks;
    None: all restart. ``program``: a user's script, which resumes by itself and has no ``run_dir``, in place of
    ``hvd-train ARGUMENTS``.
    """
    if not supported():
        if max_restarts:
            raise ConfigError(
                "this kernel cannot watch processes", where="--max-restarts", fix="Linux 5.3 or later can"
            )
        return start.launch(num_proc, launcher, arguments, verbose, program=program)
    start.note_of_cores(num_proc)
    chosen = choose(launcher) if num_proc > 1 else NONE
    known, restarts, idle = _checkpoints(run_dir), 0, 0
    furthest, fewest = (-1, -1), min(min_np or num_proc, num_proc)
    while True:
        words = spares.program(arguments, num_proc) if spares else program
        line = start.command(num_proc, chosen.name, arguments, "hvd_train", words)
        if verbose:
            say(" ".join(line), err=True)
        attempt = _attempt(line, num_proc, chosen, run_dir, watchdog_s, spares)
        if program and attempt.cause and attempt.cause.rank is None:
            attempt = replace(attempt, cause=_cause_of_script(attempt.cause, program))
        os.environ.pop(faults.VARIABLE, None)  # an injected fault is only for the first start
        code = _final_code(attempt)
        if code is not None or attempt.cause is None:
            return code or 0
        reached = max((step for step, _, _ in _checkpoints(run_dir)), default=-1), attempt.step
        # It is not known how far a script has come.
        idle = 0 if program or reached[0] > furthest[0] or reached[1] > furthest[1] else idle + 1
        furthest = max(furthest[0], reached[0]), max(furthest[1], reached[1])
        if restarts == max_restarts or idle == IDLE_RESTARTS:
            return _give_up(attempt.cause, restarts, idle)
        restarts += 1
        # Before the first step the run folder may still hold another run, whose checkpoints must not be used.
        if attempt.step and not program:
            arguments = _going_on(arguments, known, _checkpoints(run_dir))
        left = max(fewest, num_proc - 1)
        on = f" on {amount(left, 'rank')}" if left < num_proc else ""
        num_proc = left
        say(f"restart {restarts} of {max_restarts}{on}: {_words(attempt.cause)}", err=True)


@dataclass(frozen=True)
class Attempt:
    """One start of the ranks. ``cause``: why it failed, None if it succeeded. ``signals``: received by this process.
    ``step``: the last one reported by a rank."""

    cause: Cause | None
    signals: list[int]
    step: int


def _attempt(
    line: list[str], num_proc: int, launcher: Launcher, run_dir: Path | None, watchdog_s: float, spares: Spares | None
) -> Attempt:
    """Start the ranks with the command ``line``, and watch them until they end."""
    killed = _out_of_memory()  # read before the start, because the kernel only keeps a count
    with StatusTable(num_proc) as table, start.folders(launcher, num_proc) as own:
        watchdog = Watchdog(table, watchdog_s)
        env = start.environment() | own | {VARIABLE: table.path}
        code, signals, ended = process.run(line, env, launcher, table, watchdog, spares.look if spares else None)
        statuses = [table.read(rank) for rank in range(num_proc)]
        well = all(one.record.get("code") == 0 for one in statuses) or not any(one.pid for one in statuses)
        cause = None if code == 0 and well else _cause(table, ended, code)
        if watchdog.stuck and not statuses[min(watchdog.stuck)].record:  # else it has printed its error
            cause = _stuck(table, watchdog, run_dir)
    if cause and cause.what.endswith("SIGKILL") and _out_of_memory() > killed:
        cause = replace(cause, what=f"{cause.what}, by the kernel, which ran out of memory")
    return Attempt(cause, signals, max(one.step for one in statuses))


def _final_code(attempt: Attempt) -> int | None:
    """Return the exit code of a job that must not restart: it succeeded, was stopped, or would fail again."""
    cause, signals = attempt.cause, attempt.signals
    if cause is None:
        return 0
    if cause.unsaid:  # ranks do not print this line, so that it is printed once
        say(cause.what, err=True)
    if len(signals) > 1:
        return 128 + signals[-1]
    # 75 and 130: the ranks have saved after the signal.
    if signals and cause.code not in (75, 130):
        if cause.rank is not None:
            return 128 + signals[0]
        if not attempt.step:
            say(nothing_saved(signals[0]), err=True)
        return stopped_code(signals[0])
    return cause.code if cause.code in (75, 130) or cause.code in FINAL else None


def _give_up(cause: Cause, restarts: int, idle: int) -> int:
    stuck = f"; {restarts} restarts, of which the last {idle} came no further" if idle == IDLE_RESTARTS else ""
    if cause.silent:
        fix = f"its stack: {cause.kept}; --resume auto goes on" if cause.kept else LOST_FIX
        raise CommunicationError(f"{_who(cause)}{cause.what}{stuck}", where=cause.place, fix=fix)
    if restarts:
        say(f"given up: {_words(cause)}{stuck or '; ' + amount(restarts, 'restart')}", err=True)
    return cause.code


def _words(cause: Cause) -> str:
    kept = f"; its traceback: {cause.kept}" if cause.kept else ""
    return f"{_who(cause)}{cause.what}; {cause.place}{kept}"


def _who(cause: Cause) -> str:
    return "" if cause.rank is None else f"rank {cause.rank} " if cause.silent else f"rank {cause.rank}: "


def _stuck(table: StatusTable, watchdog: Watchdog, run_dir: Path | None) -> Cause:
    """Return the first stuck rank as the cause. Writes the stacks of all stuck ranks to the run folder."""
    kept = ""
    stacks = {rank: stack for rank, (_, stack) in watchdog.stuck.items() if stack}
    if run_dir and stacks and table.read(min(stacks)).step:  # only then does the run folder belong to this run
        text = "\n\n".join(f"rank {rank}\n{stack}" for rank, stack in stacks.items())
        kept = layout.keep_failure(run_dir, "stacks", text)
    rank = min(watchdog.stuck)
    return Cause(watchdog.stuck[rank][0], table.read(rank).place, 5, rank, kept=kept)


def _cause(table: StatusTable, ended: Mapping[int, float], code: int) -> Cause:
    """Return the first rank that failed. Ranks that report the loss of another one come last."""
    by = named_signal(code - 128) if 128 < code < 160 else ""
    causes = []
    for rank in range(table.ranks):
        status = table.read(rank)
        record = status.record
        if record:
            if record["code"]:
                line, kept, unsaid = record.get("line", ""), record.get("kept", ""), record.get("unsaid", False)
                cause = Cause(line, status.place, record["code"], rank, False, kept, unsaid)
                causes.append((record.get("lost", False), record["time"], cause))
        elif rank in ended:
            how = f"was ended by {by}" if by else "left before the end of the training"
            how += f" (the job's code is {code})" if code >= 0 and not by else ""
            causes.append((False, ended[rank], Cause(how, status.place, 5, rank)))
    if causes and not (by and all(lost for lost, _, _ in causes)):
        lost, when, first = min(causes, key=lambda row: row[:2])
        same_time = [str(cause.rank) for *key, cause in causes if cause.silent and key == [lost, when]]
        if first.silent and len(same_time) > 1:  # noticed at the same time: perhaps this process was stopped itself
            return replace(first, what=f"rank {' or '.join(same_time)} {first.what}", rank=None)
        return first
    begun = any(table.read(rank).pid for rank in range(table.ranks))
    how = f"the launcher was ended by {by}" if by else f"the launcher ended with code {code}"
    how += "" if by or begun else ", before any rank had begun"
    return Cause(how, table.read(0).place, 5 if by or not code else code)


def _cause_of_script(cause: Cause, program: Sequence[str]) -> Cause:
    """Return the cause for ranks whose status nobody reads: a script need not be of hvd_train."""
    place = f"'{' '.join(program)}'"
    if "SIG" in cause.what:
        return replace(cause, what=cause.what.replace("the launcher", "a rank"), place=place)
    return replace(cause, what=f"a rank ended with code {cause.code}", place=place, silent=False)


def _checkpoints(run_dir: Path | None) -> set[tuple[int, Path, int]]:
    """Return (step, folder, inode) of all checkpoints. The inode identifies one that was rewritten."""
    checkpoints = set()
    for step, path in store.find(run_dir / "checkpoints") if run_dir else ():
        with suppress(OSError):
            checkpoints.add((step, path, path.stat().st_ino))
    return checkpoints


def _going_on(arguments: list[str], known: set[tuple[int, Path, int]], now: set[tuple[int, Path, int]]) -> list[str]:
    """Return the command that continues a run from its newest checkpoint.

    If the run was started with --resume, checkpoints that existed before (``known``) are not this run's.
    """
    kept, resume, words = [], "auto", iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name == "--resume":
            resume = value if equals else next(words, "auto")
        elif word != "--overwrite":
            kept.append(word)
    if resume not in ("auto", "last"):
        new = sorted(now - known)
        # The run folder is this run's by now. If nothing was saved, start again from the given checkpoint.
        return [*kept, "--resume", *([str(new[-1][1])] if new else [resume, "--overwrite"])]
    return [*kept, "--resume", "auto"]


def _out_of_memory() -> int:
    """Return how many processes the kernel's OOM killer has killed since boot."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
