"""Start ranks with a launcher, on this host or on others, and wait for their end."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from hvd_train.errors import CommunicationError, amount
from hvd_train.launch import process
from hvd_train.launch.environment import CORES
from hvd_train.launch.host_news import HostNews
from hvd_train.launch.hosts import Hosts, after, look
from hvd_train.launch.job_folders import VARIABLE, job_folder
from hvd_train.launch.launchers import NONE, choose, named, startable
from hvd_train.launch.launchers.base import FATAL, LOST_FIX, Launcher, Layout, named_signal
from hvd_train.launch.launchers.installed import find_program, python, search_path
from hvd_train.run_folder.terminal import say


def command(
    num_proc: int,
    launcher: str,
    arguments: Sequence[str],
    module: str = "hvd_train",
    program: Sequence[str] = (),
    hosts: Hosts | None = None,
) -> list[str]:
    """Return the launcher's command line for ``python -m MODULE ARGUMENTS``, or for ``program`` instead.

    It starts ``num_proc`` ranks on this host or on ``hosts``. A single rank on this host needs no launcher.
    """
    chosen = named(launcher) if num_proc > 1 or hosts else NONE
    return chosen.command(Layout(num_proc, hosts), program or [*python(module), *arguments])


def environment(hosts: Hosts | None = None) -> dict[str, str]:
    """Return the environment of a launcher outside an allocation: its own variables, the cores that the ranks share,
    and the width of the terminal, which ranks behind a pipe cannot see."""
    env = dict(os.environ)
    if not hosts:
        env[CORES] = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    for launcher in startable():
        env |= launcher.settings(hosts)
    env["PATH"] = search_path()
    env["HVD_TRAIN_TERMINAL"] = str(shutil.get_terminal_size().columns) if sys.stdout.isatty() else "0"
    return env


def note_of_cores(num_proc: int) -> None:
    """Warn about more than two ranks a core on this host."""
    cores = len(os.sched_getaffinity(0))
    if num_proc > 2 * cores:
        what = (
            f"{num_proc} ranks share {amount(cores, 'core')} of this host: they compute in turn, and each waits for all"
        )
        say(f"note: {what}; -np {cores} is faster", err=True)


@contextmanager
def folders(launcher: Launcher, num_proc: int) -> Iterator[dict[str, str]]:
    """Create the folders of a job on this host, and yield the variables that name them. Raises ConfigError if the ranks
    cannot start."""
    launcher.check_limits(num_proc)
    variables = {}
    with ExitStack() as stack:
        for name, place in launcher.folders().items():
            if name not in os.environ:
                with suppress(OSError):  # if it is not writable, the launcher uses its default
                    variables[name] = str(stack.enter_context(job_folder(Path(place), "mpi")))
        yield variables | {VARIABLE: os.pathsep.join(variables.values())}


def launch(
    num_proc: int,
    launcher: str,
    arguments: Sequence[str],
    verbose: bool = False,
    module: str = "hvd_train",
    program: Sequence[str] = (),
    more: Mapping[str, str] | None = None,
    hosts: Hosts | None = None,
) -> int:
    """Run ``python -m MODULE ARGUMENTS``, or ``program`` instead, on all ranks to the end, and return the exit code.

    ``more`` is added to the environment. Signals are forwarded to the ranks; the exit code is then 75 if they have
    saved, else 128 + signal. It is 5 if a rank was killed by a signal.
    """
    if hosts:
        hosts.needed(num_proc)  # raises if there are too few slots
        hosts = hosts if hosts.elsewhere else None  # this host needs no ssh
    if not hosts:
        program = find_program(program) if program else ()
        note_of_cores(num_proc)
    chosen = choose(launcher) if num_proc > 1 or hosts else NONE
    return start(chosen, Layout(num_proc, hosts), program or [*python(module), *arguments], verbose, more)


def start(
    launcher: Launcher,
    layout: Layout,
    program: Sequence[str],
    verbose: bool = False,
    more: Mapping[str, str] | None = None,
) -> int:
    """Like ``launch``, with a launcher that has been checked."""
    hosts = layout.hosts.needed(layout.num_proc or 1) if layout.hosts else []
    if hosts:
        look(hosts)
    line = launcher.command(layout, program)
    if verbose:
        say(" ".join(line), err=True)
    # In an allocation the scheduler decides which variables ranks on other hosts get.
    env = dict(os.environ) if launcher.in_allocation else environment(layout.hosts)
    if not hosts:
        with folders(launcher, layout.num_proc or 1) as own:
            code, signals, _ = process.run(line, env | own | dict(more or {}), launcher)
        return launcher.exit_code(code, signals, layout)
    news = HostNews(hosts, launcher)
    code, signals, _ = process.run(line, env | news.variables | dict(more or {}), launcher, wait=news.wait)
    if not signals:
        if "code" in news.last:
            return int(news.last["code"])  # its error line has been printed
        after(hosts, code)
        if code in FATAL and news.lost:
            what = f"{news.lost} was ended by {named_signal(code - 128)}"
            raise CommunicationError(what, fix=LOST_FIX)
    return launcher.exit_code(code, signals, layout)
