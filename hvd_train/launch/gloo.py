"""``python -m hvd_train.launch.gloo -np N [-H a:2,b:2] PROGRAM ...``: start N ranks over Gloo, here or over ssh.

In the place of ``horovodrun --gloo``, which puts the whole environment and the key of its services on command lines,
where every user of a host can read them, and which loads a framework before it starts a rank. Another host is
instructed over the standard input of its ssh: first which ranks to start, in a line of JSON, then a line for each
signal. The ranks meet at a rendezvous server of ours, which answers only who names its token.
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
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from hvd_train.errors import CommunicationError, stopped_code
from hvd_train.launch.hosts import ALIVE, SSH, Hosts, parse, travelling
from hvd_train.launch.rendezvous.endpoint import LOOPBACK, Endpoint, interface_of
from hvd_train.launch.rendezvous.server import RendezvousServer
from hvd_train.launch.world import World

# Codes of ranks that have saved and leave, one by one.
LEAVING = {stopped_code(number) for number in (signal.SIGTERM, signal.SIGINT)}
SSH_FAILED = 255
GRACE_SECONDS = 8.0  # for ranks to end where their starter is gone
FIX = "look for a crash or too little memory; --resume auto goes on from there"


@dataclass
class Child:
    """A rank of this host, or the ssh to another one."""

    name: str
    pid: int
    ssh: subprocess.Popen | None = None

    def send(self, line: bytes) -> None:
        with suppress(BrokenPipeError):  # ssh has ended, and says why
            assert self.ssh is not None and self.ssh.stdin is not None
            self.ssh.stdin.write(line + b"\n")
            self.ssh.stdin.flush()

    def signal(self, number: int) -> None:
        if self.ssh:
            self.send(str(number).encode())
            if number == signal.SIGKILL:
                threading.Timer(1.0, self._kill).start()  # of a host that does not hear it
        else:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _kill(self) -> None:
        """Kill a child. Whoever waits for all children sees its end."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class Place(NamedTuple):
    """``world``: (rank, size, local rank, local size); ``cross``: (place among the ranks with this local rank, their
    number)."""

    host: str
    world: tuple[int, int, int, int]
    cross: tuple[int, int]


class Children:
    """The ranks that one process starts, and their end. ``host``: the name of this one where there are several."""

    def __init__(self, host: str = "") -> None:
        self._host, self._asked = host, False
        self._running: dict[int, Child] = {}

    def start(self, ranks: Mapping[int, Mapping[str, str]], program: list[str]) -> None:
        """Start ranks of this host. ``ranks``: {rank: its variables}."""
        for rank, variables in ranks.items():
            env = os.environ | dict(variables)
            pid = os.posix_spawn(program[0], program, env, setsigdef=(signal.SIGPIPE, signal.SIGXFSZ))
            self._running[pid] = Child(f"rank {rank}", pid)

    def reach(self, host: str, message: Mapping[str, Any]) -> None:
        """Start the ranks of another host over ssh, as ``message`` says."""
        ssh = subprocess.Popen(_ssh(host), stdin=subprocess.PIPE)
        child = self._running[ssh.pid] = Child(f"host {host}", ssh.pid, ssh)
        child.send(json.dumps(message).encode())

    def signal(self, number: int) -> None:
        self._asked = True
        for child in list(self._running.values()):
            child.signal(number)

    def forward_signals(self) -> None:
        """Forward signals from now on. Before, a signal ends this process, and ranks end with their launcher."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda number, frame: self.signal(number))

    def wait(self) -> int:
        """Wait until all have ended, and return the first exit code that is not 0 (128 + N of a rank that signal N
        ended). The other ranks are asked to follow. With a host's name, a rank that a signal ended is an error line and
        exit code 5."""
        first = 0
        while self._running:
            pid, status = os.wait()
            child = self._running.pop(pid, None)
            code = os.waitstatus_to_exitcode(status)
            if child is None or not code or first:
                continue
            if child.ssh:
                first = CommunicationError.exit_code if code == SSH_FAILED else code
            elif code < 0 and self._host and not self._asked:
                how = f"{child.name} on host {self._host} was ended by {signal.Signals(-code).name}"
                print(f"error: {CommunicationError(how, fix=FIX)}", file=sys.stderr, flush=True)
                first = CommunicationError.exit_code
            else:
                first = code if code > 0 else 128 - code
            if first not in LEAVING:
                self.signal(signal.SIGTERM)
                self._end_later()
        return first

    def _end_later(self) -> None:
        """A rank that is stopped, or waits for a lost one, does not heed the signal."""
        timer = threading.Timer(GRACE_SECONDS, self.signal, [signal.SIGKILL])
        timer.daemon = True
        timer.start()


def variables(place: Place, address: str, port: int, token: str, network: str) -> dict[str, str]:
    """Return horovodrun's variables of a rank. ``network``: its interface, empty if Gloo is to choose."""
    return Endpoint(address, port, token, network, place.cross).horovod_variables(World(*place.world), place.host)


def places(slots: Mapping[str, int], size: int) -> list[Place]:
    """Return each rank's place, with hosts filled one after the other."""
    counts: dict[str, int] = {}
    for host, count in slots.items():
        counts[host] = min(count, size - sum(counts.values()))
    ranks: list[Place] = []
    for k, (host, count) in enumerate(counts.items()):
        for local in range(count):
            level = [other > local for other in counts.values()]  # hosts that have a rank with this local rank
            ranks.append(Place(host, (len(ranks), size, local, count), (sum(level[:k]), sum(level))))
    return ranks


def start(size: int, hosts: Hosts | None, program: list[str]) -> int:
    """Start all ranks, wait until they have ended on all hosts, and return the exit code as ``Children.wait`` says."""
    slots = hosts.slots if hosts else {"localhost": size}
    ranks: dict[str, list[Place]] = {}
    for place in places(slots, size):
        ranks.setdefault(place.host, []).append(place)
    remote = [host for host in ranks if not is_here(host)]
    server = RendezvousServer("" if remote else LOOPBACK, 0, secrets.token_hex(32), size)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    networks = hosts.interfaces.split(",") if hosts and hosts.interfaces else []
    port, token = server.server_port, server.token
    children = Children(platform.node() if hosts else "")
    for host, group in ranks.items():
        if host in remote:
            way = {"host": host, "addresses": _addresses(networks), "networks": networks}
            common = {"common": travelling(os.environ), "program": program}
            children.reach(host, {"port": port, "token": token, "ranks": group} | way | common)
        else:
            network = (networks or [_interface_to(remote) if remote else "lo"])[0]
            own = {one.world[0]: variables(one, LOOPBACK, port, token, network) for one in group}
            children.start(own, program)
    children.forward_signals()
    return children.wait()


def is_here(host: str) -> bool:
    """Return whether a name is this host's."""
    if host in ("localhost", platform.node()):
        return True
    with suppress(OSError):
        address = socket.gethostbyname(host)
        return address.startswith("127.") or bool(interface_of(address))
    return False  # a name of ssh's configuration


def _addresses(networks: Sequence[str]) -> list[str]:
    """Return the IPv4 addresses at which other hosts may reach this one."""
    import psutil

    addresses = [
        one.address
        for name, kinds in psutil.net_if_addrs().items()
        for one in kinds
        if one.family == socket.AF_INET and (name in networks or not networks)
    ]
    return [address for address in addresses if not address.startswith("127.")]


def _interface_to(hosts: Sequence[str]) -> str:
    """Return the interface by which this host reaches the others; nothing is sent."""
    for host in hosts:
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((socket.gethostbyname(host), 9))
            return interface_of(probe.getsockname()[0])
    return ""


def _ssh(host: str) -> list[str]:
    path = [f"PYTHONPATH={os.environ['PYTHONPATH']}"] if "PYTHONPATH" in os.environ else []
    words = ["exec", "env", *path, sys.executable, "-m", "hvd_train.launch.gloo", "--remote"]
    return [*SSH, *ALIVE, host, f"cd {shlex.quote(os.getcwd())} && {shlex.join(words)}"]


# ---- on another host


def start_remote() -> int:
    """Start this host's ranks as standard input says. When that ends, the starter is gone, and its ranks end, too."""
    lines = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # ranks read nothing
    line = lines.readline()
    if not line:
        return CommunicationError.exit_code
    message = json.loads(line)
    try:
        address = _server_address(message)
    except CommunicationError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    came_to = os.environ.get("SSH_CONNECTION", f"- - {LOOPBACK} -").split()[2]
    network = (message["networks"] or [interface_of(came_to)])[0]
    os.environ.update(message["common"])
    ranks = [Place(*one) for one in message["ranks"]]
    children = Children(message["host"])
    own = {one.world[0]: variables(one, address, message["port"], message["token"], network) for one in ranks}
    children.start(own, message["program"])
    threading.Thread(target=_listen, args=[lines, children], daemon=True).start()
    return children.wait()


def _listen(lines: Iterable[bytes], children: Children) -> None:
    """Send the ranks the signals that come in, a line each."""
    for line in lines:
        children.signal(int(line))
    children.signal(signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    children.signal(signal.SIGKILL)


def _server_address(message: Mapping[str, Any]) -> str:
    """Return the starter's address, as this host reaches it: where ssh came from, or any other of its addresses."""
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
    return start(options.np, hosts, options.program)


if __name__ == "__main__":
    sys.exit(main())
