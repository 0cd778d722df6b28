"""The interface of a launcher: how it starts ranks, how a rank detects it, and how it differs."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hvd_train.errors import CommunicationError, ConfigError, stopped_code
from hvd_train.launch.launchers import installed
from hvd_train.launch.world import World

if TYPE_CHECKING:
    from hvd_train.launch.hosts import Hosts
    from hvd_train.launch.rendezvous.job_step import JobStep

# Exit codes of launchers for a rank killed by a signal.
FATAL = {128 + s for s in (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)}

LOST_FIX = "look for a crash or too little memory, and go on from the last checkpoint (fit: --resume auto)"
SHARED_MEMORY = Path("/dev/shm")


def named_signal(number: int) -> str:
    """Return the name of the signal that ended a rank; with SIGBUS also the room for shared memory on this host."""
    name = signal.Signals(number).name
    if number != signal.SIGBUS:
        return name
    with suppress(OSError):
        usage = shutil.disk_usage(SHARED_MEMORY)
        room = f"on this host {SHARED_MEMORY} has {usage.free / 1e6:,.0f} of {usage.total / 1e6:,.0f} MB free"
        return f"{name}, as when shared memory is full ({room}; docker run --shm-size=1g enlarges it)"
    return name


@dataclass(frozen=True)
class Layout:
    """How many ranks to start and where: on ``hosts`` (None: this one), or on ``nodes`` of an allocation with
    ``ranks_per_node`` each (None: the scheduler decides)."""

    num_proc: int | None
    hosts: Hosts | None = None
    nodes: int | None = None
    ranks_per_node: int | None = None


class Launcher:
    """A program that starts ranks. The defaults are for a process that was started alone."""

    name = ""
    # Variables of each rank: (rank, world size, local rank, local size); "" if the launcher has no such variable.
    place_variables: Sequence[str] = ("", "", "", "")

    # How it starts ranks
    starts_ranks = False  # --launcher offers it
    tool = ""  # the program that must be installed; "": it needs none
    install = ""  # how to get the tool
    library = ""  # Horovod's transport: "mpi" or "gloo"
    help = ""  # the launcher's part of the help of --launcher
    in_allocation = False  # a scheduler assigns the hosts; only fit offers the launcher
    no_hosts = ""  # in an allocation: what to do instead of naming hosts or asking for restarts
    slow_to_end = False  # ranks run on for a second or more after one was lost, unless we end them
    endless_programs: Sequence[str] = ()  # programs of the launcher that wait for ever for an unreachable host
    forwards_stops = False  # SIGTSTP suspends its ranks on all hosts, and SIGCONT resumes them
    forwarded_signals: Mapping[int, int] = {}  # {signal: the one to send to this launcher instead}

    # What its ranks can rely on
    binds_ranks = True  # False: each rank may use all cores of its host, and binds itself to its share
    opens_terminals = False  # a rank's stdout is a terminal even if the user redirects the output
    leads_session = False  # a shell may stand between launcher and rank: the launcher leads the session of both
    opens_mpi = True  # mpi4py works
    other_library = "use horovodrun --gloo"  # if Horovod and the launcher do not speak the same MPI

    def check(self) -> None:
        """Raise ConfigError if the launcher cannot start ranks here."""
        if not self._installed():
            fix = f"{self.install}, or use --launcher horovodrun, which needs no {self.tool}"
            raise ConfigError(f"{self.tool} is not installed", where=f"--launcher {self.name}", fix=fix)

    def usable(self) -> bool:
        """Return whether ``auto`` may choose this launcher."""
        return self._installed()

    def _installed(self) -> bool:
        return not self.tool or installed.find_tool(self.tool) is not None

    def command(self, layout: Layout, program: Sequence[str]) -> list[str]:
        """Return the command line that starts ``program`` on all ranks of ``layout``."""
        return list(program)

    def settings(self, hosts: Hosts | None) -> dict[str, str]:
        """Return the variables that the launcher needs in its environment, except those that the user has set."""
        return {}

    def check_limits(self, num_proc: int) -> None:
        """Raise ConfigError if a limit of this host would crash so many ranks."""

    def folders(self) -> dict[str, str]:
        """Return {variable: folder in which to create one for the job's files on this host}."""
        return {}

    def remove_left(self) -> None:
        """Remove the job's files on this host if its launcher was killed before it could."""

    def exit_code(self, code: int, signals: Sequence[int], layout: Layout) -> int:
        """Return the job's exit code. ``code`` is the launcher's; ``signals`` were sent to this process meanwhile.

        After a signal it is 128 + its number, or 75 if the ranks have saved. After Ctrl-C it is always 130.
        """
        if signals and code:
            saved = stopped_code(signals[0])
            return saved if code == saved else 128 + signals[0]
        if code in FATAL and layout.num_proc != 1:
            what = f"a rank was ended by {named_signal(code - 128)}"
            raise CommunicationError(what, fix=LOST_FIX)
        return code

    def detect(self, environ: Mapping[str, str]) -> World | None:
        """Return this process's rank and world, or None if the launcher did not start it."""
        rank, size, local_rank, local_size = self.place_variables
        if rank not in environ or size not in environ:
            return None
        place = number(environ, rank), number(environ, size)
        return World(*place, number(environ, local_rank, place[0]), number(environ, local_size, place[1]), self.name)

    def place(self, rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
        """Return the variables that give a rank this rank and world."""
        numbers = zip(self.place_variables, (rank, size, local_rank, local_size), strict=True)
        return {name: str(value) for name, value in numbers if name}

    def joins_ranks(self, environ: Mapping[str, str]) -> bool:
        """Return whether the launcher connects its ranks, and ends all when one fails."""
        return True

    def step(self, environ: Mapping[str, str]) -> JobStep:
        """Describe the ranks that were started together, for a launcher that does not connect them."""
        raise NotImplementedError


def number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return the variable as a whole number. Raises ConfigError if it is something else, or absent without default."""
    text = environ.get(name, str(default))
    if not text.isdigit():
        raise ConfigError(
            f"'{text}' is not a number", where=f"environment variable {name}", fix="unset it, or start anew"
        )
    return int(text)
