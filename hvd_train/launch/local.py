"""``hvd-train ... -np N``: the same command again under mpirun or horovodrun, on this host or on others."""

from __future__ import annotations

import ctypes
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import IO, TYPE_CHECKING

from hvd_train.errors import CommunicationError, ConfigError
from hvd_train.launch.board import Board
from hvd_train.launch.environment import CORES
from hvd_train.launch.hosts import Hosts, after, look, options, variables
from hvd_train.launch.watchdog import Watchdog

if TYPE_CHECKING:
    import psutil

    from hvd_train.launch.spares import Spares

GRACE_SECONDS = 8.0  # horovodrun leaves its ranks 5
PATIENCE = 5.0  # for a launcher to end all ranks where one is gone; mpirun takes 1 or 2, a rank that says why 3
SILENCE = 0.25  # of a rank that died: the others have nothing to say then, and mpirun, which knows its code, is slow
LOOK_MS, CLOSE_MS = 100, 20  # while all is well, and from the first end on
APART = 205  # Open MPI's, where a daemon cannot connect to mpirun
PR_SET_PDEATHSIG = 1
# What launchers return for a rank that a signal ended.
FATAL = {128 + s for s in (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)}


def find_tool(name: str) -> str | None:
    """The launcher beside this Python (a virtual environment need not be activated), else the one on PATH."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


def mpi_built() -> bool:
    """Whether Horovod speaks MPI, found by a file name: loading Horovod would load a framework."""
    from importlib.util import find_spec

    spec = find_spec("horovod")
    if spec is None or spec.origin is None:
        raise ConfigError("Horovod is not installed", fix="run scripts/setup")
    for library in Path(spec.origin).parent.glob("*/mpi_lib*.so"):
        linked = subprocess.run(["ldd", str(library)], capture_output=True, text=True, check=False).stdout
        return "libmpi" in linked
    return False


def choose(launcher: str) -> str:
    """MPI before Gloo: on CPUs its allreduce goes through shared memory."""
    if launcher == "auto":
        launcher = "mpirun" if find_tool("mpirun") and mpi_built() else "horovodrun"
    if find_tool(launcher) is None:
        raise ConfigError(
            f"{launcher} is not installed", where="--launcher", fix="run scripts/setup, or 'hvd-train doctor'"
        )
    if launcher == "mpirun" and not mpi_built():
        raise ConfigError("Horovod was built without MPI", where="--launcher mpirun", fix="use --launcher horovodrun")
    return launcher


def command(
    num_proc: int,
    launcher: str,
    arguments: list[str],
    module: str = "hvd_train",
    program: Sequence[str] = (),
    hosts: Hosts | None = None,
) -> list[str]:
    """The launcher's command line for ``python -m MODULE ARGUMENTS`` on ``num_proc`` ranks of this host, or ``hosts``,
    or ``program`` instead."""
    program = list(program) or [sys.executable, "-m", module, *arguments]
    if num_proc == 1 and not hosts:
        return program
    if launcher == "mpirun":
        # Ranks bind themselves (environment.bind): mpirun would give each one core, however many there are.
        line = [find_tool(launcher) or launcher, "--quiet", "-np", str(num_proc), "--bind-to", "none"]
        return [*line, *(options(launcher, hosts) if hosts else ["--map-by", "slot:oversubscribe"]), *program]
    # horovodrun itself puts the whole environment on command lines.
    line = [sys.executable, "-m", "hvd_train.launch.gloo", "-np", str(num_proc)]
    return [*line, *(options(launcher, hosts) if hosts else []), *program]


def environment(hosts: Hosts | None = None) -> dict[str, str]:
    """What Open MPI asks for under root, the cores that the ranks share, and the terminal's width, which ranks behind a
    pipe cannot see."""
    env = dict(os.environ)
    if not hosts:
        env[CORES] = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    if os.geteuid() == 0:
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    env.setdefault("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")
    # Ranks of one host need no network; a listening port is one more thing to protect.
    if hosts:
        env |= variables(hosts)
    else:
        env.setdefault("OMPI_MCA_btl", "self,vader")
        env.setdefault("OMPI_MCA_oob_tcp_if_include", "lo")
        # Within an allocation mpirun would ask Slurm to start also the ranks of this host, and may wait for ever.
        for name in ("ras", "plm"):
            env.setdefault(f"OMPI_MCA_{name}", "^slurm")
            env.setdefault(f"PRTE_MCA_{name}", "^slurm")
    env["HVD_TRAIN_TERMINAL"] = str(shutil.get_terminal_size().columns) if sys.stdout.isatty() else "0"
    return env


def launch(
    num_proc: int,
    launcher: str,
    arguments: list[str],
    verbose: bool = False,
    module: str = "hvd_train",
    program: Sequence[str] = (),
    more: Mapping[str, str] | None = None,
    hosts: Hosts | None = None,
) -> int:
    """Runs the job to its end and returns its exit code; one rank needs no launcher. ``more``: of its environment.

    A signal to this process reaches the ranks, and its code is 128 + signal; a rank that a signal ended is code 5.
    """
    taken = hosts.taken(num_proc) if hosts else []
    chosen = choose(launcher) if num_proc > 1 or hosts else ""
    if hosts:
        look(taken)
    line = command(num_proc, chosen, arguments, module, program, hosts)
    if verbose:
        print(" ".join(line), file=sys.stderr, flush=True)
    code, received, _ = run(line, environment(hosts) | dict(more or {}))
    if hosts and not received:
        after(taken, code)
        if code == APART and chosen == "mpirun":
            what = f"mpirun's daemons on {', '.join(taken)} do not reach one another, though ssh does"
            fix = "open the ports between the hosts, or name another network: --network-interfaces"
            raise CommunicationError(what, where=f"-H {hosts.words}", fix=fix)
    if received and code:
        return 128 + received[0]
    if code in FATAL and num_proc > 1:
        what = f"a rank was ended by {signal.Signals(code - 128).name}"
        raise CommunicationError(what, fix="look for a crash or too little memory; --resume auto goes on from there")
    return code


def run(
    line: Sequence[str],
    env: Mapping[str, str],
    board: Board | None = None,
    watchdog: Watchdog | None = None,
    spares: Spares | None = None,
    sent: Mapping[int, int] = MappingProxyType({}),
) -> tuple[int, list[int], dict[int, float]]:
    """Starts the launcher and waits for its end, which is that of all its processes: (exit code, 128 + N where signal N
    ended it, -1 where it had to be ended; the signals that came meanwhile; of each rank that ended, when).

    Without a ``board`` the launcher is sent what this process is sent, or what ``sent`` says instead. With one the
    ranks are, and where a rank ends with anything but 0, the others have ``PATIENCE`` to follow; where the ``watchdog``
    finds one stuck, all are ended.
    """
    received: list[int] = []
    child: subprocess.Popen | None = None

    def passed(number: int) -> int:
        """A launcher does not know what a closed terminal means."""
        return sent.get(number, signal.SIGTERM if number == signal.SIGHUP else number)

    def forward(number: int, frame: object) -> None:
        received.append(number)
        if child is None or child.poll() is not None:
            return
        if board is None:
            child.send_signal(passed(number))
            return
        board.look()
        board.signal(number)
        if len(received) > 1 or len(board.open) < board.ranks:  # the first step is far away
            child.terminate()

    # Before the child starts: a signal that comes in between must not end this process alone.
    closed = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)  # nohup
    signals = (signal.SIGINT, signal.SIGTERM, *closed, *((signal.SIGUSR1,) if board else ()))
    main = threading.current_thread() is threading.main_thread()
    previous = {s: signal.signal(s, forward) for s in signals} if main else {}
    ended: dict[int, float] = {}
    hung = False
    try:
        out, err = (None if os.isatty(number) else subprocess.PIPE for number in (1, 2))
        child = subprocess.Popen(
            line, env=env, start_new_session=True, preexec_fn=end_with_parent, stdout=out, stderr=err
        )
        pumps = _pumps(child)
        if received:
            child.terminate() if board else child.send_signal(passed(received[0]))
        if board:
            ended = _watch(child, board, watchdog, spares)
            hung = child.poll() is None
        else:
            child.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if child is not None:
            _end(child, board)
    code = child.wait()
    for pump in pumps:
        pump.join(GRACE_SECONDS)
    return -1 if hung else code if code >= 0 else 128 - code, received, ended


def _pumps(child: subprocess.Popen) -> list[threading.Thread]:
    """Start threads that hand on what the launcher prints into pipes.

    Where the reader leaves (``| head``), mpirun ends all ranks, and a script's rank its own.
    """
    streams = [(stream, number) for number, stream in ((1, child.stdout), (2, child.stderr)) if stream]
    pumps = [threading.Thread(target=_pump, args=pair, daemon=True) for pair in streams]
    for pump in pumps:
        pump.start()
    return pumps


def _pump(source: IO[bytes], target: int) -> None:
    while part := os.read(source.fileno(), 1 << 16):
        with suppress(OSError):  # nobody reads it
            while part:
                part = part[os.write(target, part) :]


def _watch(child: subprocess.Popen, board: Board, watchdog: Watchdog | None, spares: Spares | None) -> dict[int, float]:
    """Until the launcher ends, or has not although a rank did, or a rank is stuck: {rank that ended: when}."""
    ended: dict[int, float] = {}
    poll, ranks, first = select.poll(), {}, math.inf
    launcher, slow = os.pidfd_open(child.pid), Path(str(child.args[0])).name == "mpirun"  # type: ignore[index]
    poll.register(launcher, select.POLLIN)
    while child.poll() is None and time.monotonic() < first + PATIENCE:
        board.look()
        if watchdog and watchdog.look():
            break
        silent = ended and not any(board.read(rank).record for rank in ended)
        if slow and silent and time.monotonic() > first + SILENCE:
            board.signal(signal.SIGKILL)
        if spares:
            spares.look(board)
        for rank, descriptor in list(board.open.items()):  # a signal may come
            if descriptor not in ranks:
                ranks[descriptor] = rank
                poll.register(descriptor, select.POLLIN)
        gone = list(board.gone - ended.keys())
        if slow and len(ended) == board.ranks:
            child.send_signal(signal.SIGCHLD)  # wakes it: between two signals to its ranks it sleeps for a second
        for descriptor, _ in poll.poll(0 if gone else CLOSE_MS if ended else LOOK_MS):
            if descriptor in ranks:
                poll.unregister(descriptor)
                gone.append(ranks[descriptor])
        for rank in gone:
            ended[rank] = time.monotonic()
            if board.read(rank).record.get("code") != 0:
                first = min(first, ended[rank])
    os.close(launcher)
    board.look()
    took = {ranks[descriptor] for descriptor, _ in poll.poll(0) if descriptor in ranks} | board.gone - ended.keys()
    return ended | dict.fromkeys(took, time.monotonic())  # which took the launcher along


def end_with_parent() -> None:
    """In the child: whoever kills this process must not leave a job without an owner (Linux: prctl(2))."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(child: subprocess.Popen, board: Board | None) -> None:
    """Leaves no process behind: whatever of the launcher's session still runs is ended, and every rank."""
    import psutil

    if board:
        board.signal(signal.SIGKILL)  # a checkpoint is whole or not there
    if child.poll() is None:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_SECONDS)
    session = [p for p in psutil.process_iter() if p.pid != child.pid and _in_session(p, child.pid)]
    left, stop = list(filter(_lives, session)), time.monotonic() + GRACE_SECONDS
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    while (left := list(filter(_lives, left))) and time.monotonic() < stop:
        time.sleep(0.01)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    if child.poll() is None:
        child.kill()


def _lives(process: psutil.Process) -> bool:
    """One that has ended may lie there for seconds, until the first process of the system asks for its code."""
    import psutil

    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _in_session(process: object, session: int) -> bool:
    try:
        return os.getsid(process.pid) == session  # type: ignore[attr-defined]
    except (ProcessLookupError, PermissionError):
        return False
