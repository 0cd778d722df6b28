"""``python -m hvd_train.launch.ssh_starter -np N [-H a:2,b:2] PROGRAM ...``: start N ranks over Gloo, here or over ssh.

It replaces ``horovodrun --gloo``, which puts the environment and its secret key on command lines, where every user of a
host can read them, and loads a framework before it starts a rank.

1. The starter opens a rendezvous server, which answers only requests with its token.
2. It starts the ranks of this host. For each other host it starts an ssh, which runs this module with ``--remote``.
3. It writes to the standard input of each ssh: first a line of JSON with the ranks to start, the token and the
   environment (so none of them is on a command line), then a line with the number of each signal.
4. Gloo in each rank asks the server for the addresses of the others (``launch/rendezvous/server.py``).
5. The starter waits for all ranks and ssh processes. The first nonzero exit code is the job's; the other ranks then get
   SIGTERM. If the starter dies, the standard inputs close, and the ranks end.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from hvd_train.errors import CommunicationError, ConfigError, TrainError, stopped_code
from hvd_train.launch.hosts import ALIVE, SSH, Hosts, is_here, parse, travelling
from hvd_train.launch.interfaces import interface_of, interfaces
from hvd_train.launch.launchers.base import LOST_FIX, named_signal
from hvd_train.launch.launchers.installed import find_program, python, search_path
from hvd_train.launch.rendezvous.endpoint import LOOPBACK, Endpoint
from hvd_train.launch.rendezvous.server import RendezvousServer
from hvd_train.launch.world import World

# Exit codes of ranks that saved after a signal. All ranks then end by themselves and need no SIGTERM.
LEAVING = {stopped_code(number) for number in (signal.SIGTERM, signal.SIGINT)}
SSH_FAILED = 255  # ssh(1): its own code, whatever the remote command would return
GRACE_SECONDS = 8.0  # for ranks to end after SIGTERM; then they are killed
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
SUSPENDING = (signal.SIGTSTP, signal.SIGCONT)


@dataclass
class Child:
    """A rank of this host, or the ssh process for another host."""

    name: str
    pid: int
    ssh: subprocess.Popen | None = None

    def send(self, line: bytes) -> None:
        """Write a line to the standard input of the ssh."""
        with suppress(BrokenPipeError):  # ssh has ended, and has printed why
            assert self.ssh is not None and self.ssh.stdin is not None
            self.ssh.stdin.write(line + b"\n")
            self.ssh.stdin.flush()

    def signal(self, number: int) -> None:
        if self.ssh:
            self.send(str(number).encode())
            if number == signal.SIGKILL:
                threading.Timer(1.0, self._kill).start()  # the host may be out of reach
        else:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _kill(self) -> None:
        """Kill the ssh. ``Children.wait`` sees its end."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class RankPlace(NamedTuple):
    """A rank's ``world`` (rank, size, local rank, local size) and Horovod's ``cross`` (rank, size)."""

    host: str
    world: tuple[int, int, int, int]
    cross: tuple[int, int]


class Children:
    """The ranks and ssh processes that this process starts. ``host``: this host's name if there are several."""

    def __init__(self, host: str = "") -> None:
        self._host = host
        self._sent: set[int] = set()  # signals
        self._running: dict[int, Child] = {}
        self._mask: set[int] = set()

    def start(self, ranks: Mapping[int, Mapping[str, str]], program: list[str]) -> None:
        """Start ranks of this host. ``ranks``: {rank: its variables}."""
        for rank, variables in ranks.items():
            env = os.environ | dict(variables)
            # Python ignores these two signals, and a program would inherit that.
            ignored = (signal.SIGPIPE, signal.SIGXFSZ)
            pid = os.posix_spawn(program[0], program, env, setsigdef=ignored, setsigmask=self._mask)
            self._running[pid] = Child(f"rank {rank}", pid)

    def reach(self, host: str, message: Mapping[str, Any]) -> None:
        """Start the ranks of another host over ssh, as ``message`` says."""
        ssh = subprocess.Popen(_ssh(host), stdin=subprocess.PIPE, preexec_fn=self._unblock)
        child = self._running[ssh.pid] = Child(f"host {host}", ssh.pid, ssh)
        child.send(json.dumps(message).encode())

    def signal(self, number: int) -> None:
        self._sent.add(number)
        for child in list(self._running.values()):
            child.signal(number)

    def suspend(self, number: int) -> None:
        """Suspend (SIGTSTP) or resume (SIGCONT) all ranks and the processes that they started."""
        import psutil

        for child in list(self._running.values()):
            if child.ssh:
                child.send(str(number).encode())
                continue
            with suppress(psutil.NoSuchProcess):
                rank = psutil.Process(child.pid)
                for process in (rank, *rank.children(recursive=True)):
                    with suppress(psutil.NoSuchProcess):
                        process.send_signal(signal.SIGSTOP if number == signal.SIGTSTP else number)

    @contextmanager
    def forwarding_signals(self) -> Iterator[None]:
        """Forward signals to the children that are started within this block, once it ends.

        Signals are blocked within the block. Otherwise one could end this process alone, or reach only some of the
        children. Children do not inherit the blocked signals.
        """
        self._mask = {int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)}
        try:
            yield
            for number in FORWARDED:
                signal.signal(number, lambda number, frame: self.signal(number))
            for number in SUSPENDING:
                signal.signal(number, lambda number, frame: self.suspend(number))
        finally:
            self._unblock()

    def _unblock(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def wait(self) -> int:
        """Wait until all have ended. Returns the first nonzero exit code, 128 + N if signal N ended the rank.

        The other ranks then get SIGTERM. If ``host`` is set, a rank killed by a signal is printed as an error line, and
        the exit code is 5: the starter on the first host cannot know which rank it was.
        """
        first, named = 0, False
        while self._running:
            for child, code in self._ended():
                lost = first in (0, CommunicationError.exit_code)
                # This also finds a killed rank that takes longer to end than the ranks that lost it.
                if cause := bool(self._host) and not child.ssh and lost and not named and self._is_cause(code):
                    how = f"{child.name} on host {self._host} was ended by {named_signal(-code)}"
                    print(f"error: {CommunicationError(how, fix=LOST_FIX)}", file=sys.stderr, flush=True)
                    named = True
                if not code or first:
                    continue
                if child.ssh:
                    first = CommunicationError.exit_code if code == SSH_FAILED else code
                elif cause:
                    first = CommunicationError.exit_code
                else:
                    first = code if code > 0 else 128 - code
                if first not in LEAVING:
                    self.signal(signal.SIGTERM)
                    self._end_later()
        return first

    def _ended(self) -> list[tuple[Child, int]]:
        """Wait for a child. Returns all that have ended and their exit codes, those killed by a signal first.

        A rank that loses another one ends soon after, so if both have ended the killed one is the cause.
        """
        pid, status = os.wait()
        ended = []
        while pid:
            if child := self._running.pop(pid, None):
                ended.append((child, os.waitstatus_to_exitcode(status)))
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:  # that was the last one
                break
        return sorted(ended, key=lambda one: one[1] >= 0)

    def _is_cause(self, code: int) -> bool:
        """Return whether the child was killed by a signal from elsewhere, before the others were told to end."""
        if self._sent:
            return code == -signal.SIGKILL and signal.SIGKILL not in self._sent
        return code < 0

    def _end_later(self) -> None:
        """Kill all after ``GRACE_SECONDS``: a rank that is stopped or waits for a lost one does not end by SIGTERM."""
        timer = threading.Timer(GRACE_SECONDS, self.signal, [signal.SIGKILL])
        timer.daemon = True
        timer.start()


def variables(place: RankPlace, address: str, port: int, token: str, network: str) -> dict[str, str]:
    """Return the variables that horovodrun would set. ``network``: the interface, "" to let Gloo choose."""
    return Endpoint(address, port, token, network, place.cross).horovod_variables(World(*place.world), place.host)


def places(slots: Mapping[str, int], size: int) -> list[RankPlace]:
    """Assign ranks to hosts: fill all slots of a host before the next one."""
    counts: dict[str, int] = {}
    for host, count in slots.items():
        counts[host] = min(count, size - sum(counts.values()))
    ranks: list[RankPlace] = []
    for k, (host, count) in enumerate(counts.items()):
        for local in range(count):
            # Which hosts have a rank with this local rank: together these ranks are Horovod's cross communicator.
            level = [other > local for other in counts.values()]
            ranks.append(RankPlace(host, (len(ranks), size, local, count), (sum(level[:k]), sum(level))))
    return ranks


def start(size: int, hosts: Hosts | None, program: list[str]) -> int:
    """Start all ranks on all hosts and wait for their end. Returns the exit code of ``Children.wait``."""
    slots, here = hosts.slots if hosts else {"localhost": size}, find_program(program)
    ranks: dict[str, list[RankPlace]] = {}
    for place in places(slots, size):
        ranks.setdefault(place.host, []).append(place)
    remote = [host for host in ranks if not is_here(host)]
    server = RendezvousServer("" if remote else LOOPBACK, 0, secrets.token_hex(32), size)
    networks = hosts.interfaces.split(",") if hosts and hosts.interfaces else []
    network = (networks or [_interface_to(remote) if remote else "lo"])[0]
    addresses = [address for name, address in interfaces() if name in networks or not networks]
    port, token = server.server_port, server.token
    children = Children(platform.node() if hosts else "")
    with children.forwarding_signals():
        # Within the block, because a thread inherits the signal mask: one that blocks nothing would receive the signal
        # and end the process.
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for host, group in ranks.items():
            if host in remote:
                way = {"host": host, "addresses": addresses, "networks": networks}
                common = {"common": travelling(os.environ), "program": program}
                children.reach(host, {"port": port, "token": token, "ranks": group} | way | common)
            else:
                children.start(_variables_of(group, LOOPBACK, port, token, network), here)
    return children.wait()


def _variables_of(ranks: Iterable[RankPlace], *endpoint: Any) -> dict[int, dict[str, str]]:
    """Return {rank: variables}. ``endpoint``: address, port, token and network, as in ``variables``."""
    return {place.world[0]: variables(place, *endpoint) for place in ranks}


def _interface_to(hosts: Sequence[str]) -> str:
    """Return the network interface that routes to the other hosts."""
    for host in hosts:
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # "Connecting" a UDP socket only chooses the route. Nothing is sent, so the port does not matter.
            probe.connect((socket.gethostbyname(host), 9))
            return interface_of(probe.getsockname()[0])
    return ""


def _ssh(host: str) -> list[str]:
    path = [f"PYTHONPATH={os.environ['PYTHONPATH']}"] if "PYTHONPATH" in os.environ else []
    words = ["exec", "env", *path, *python("hvd_train.launch.ssh_starter"), "--remote"]
    return [*SSH, *ALIVE, host, f"cd {shlex.quote(os.getcwd())} && {shlex.join(words)}"]


# ---- on another host


def start_remote() -> int:
    """Start the ranks of this host that standard input lists. End them when it closes: the starter is gone."""
    lines = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # ranks read nothing
    line = lines.readline()
    if not line:  # the starter died before it wrote
        return CommunicationError.exit_code
    message = json.loads(line)
    os.environ["PATH"] = search_path()
    try:
        address, program = _server_address(message), find_program(message["program"])
    except TrainError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    # SSH_CONNECTION: client address, client port, server address, server port. The starter reached us at the third.
    came_to = os.environ.get("SSH_CONNECTION", f"- - {LOOPBACK} -").split()[2]
    network = (message["networks"] or [interface_of(came_to)])[0]
    os.environ.update(message["common"])
    ranks = [RankPlace(*one) for one in message["ranks"]]
    children = Children(message["host"])
    children.start(_variables_of(ranks, address, message["port"], message["token"], network), program)
    threading.Thread(target=_listen, args=[lines, children], daemon=True).start()
    return children.wait()


def _listen(lines: Iterable[bytes], children: Children) -> None:
    """Forward signals, one number a line, to the ranks. End the ranks when the lines end."""
    for line in lines:
        (children.suspend if int(line) in SUSPENDING else children.signal)(int(line))
    # The starter or the connection is gone. Ranks may save first.
    children.signal(signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    children.signal(signal.SIGKILL)


def _server_address(message: Mapping[str, Any]) -> str:
    """Return an address of the starter that can be reached from here: ssh's origin if possible."""
    came_from = os.environ.get("SSH_CONNECTION", "").split()[:1]
    addresses = list(dict.fromkeys([*(came_from if not message["networks"] else []), *message["addresses"]]))
    for address in addresses:
        if Endpoint(address, message["port"], message["token"]).answers():
            return address
    what = f"no connection to the starting host: {', '.join(addresses)}, port {message['port']}"
    fix = "open the ports between the hosts (ssh alone is not enough), or name another network: --network-interfaces"
    raise CommunicationError(what, where=f"host {message['host']}", fix=fix)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--remote", action="store_true")
    parser.add_argument("-np", type=int, default=1)
    parser.add_argument("-H", dest="hosts", default="")
    parser.add_argument("--network-interfaces", default="")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if options.remote:
        return start_remote()
    hosts = parse(options.hosts or None, None, options.network_interfaces or None)
    try:
        return start(options.np, hosts, options.program)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
