"""``python -m hvd_train.launch.gloo -np N [-H a:2,b:2] PROGRAM ...``: start N ranks over Gloo, here or over ssh.

In the place of ``horovodrun --gloo``, which puts the whole environment and the key of its services on command lines,
where every user of a host can read them, and which loads a framework before it starts a rank. Here a host is told over
the standard input of its ssh: first what its ranks are, in a line of JSON, then a line for each signal. The ranks meet
at a desk of ours, which answers only who names its token.
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
from hvd_train.launch.environment import World
from hvd_train.launch.hosts import ALIVE, SSH, Hosts, parse, travelling
from hvd_train.launch.slurm import LOOPBACK, Desk, interface_of, is_desk, over_gloo

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
        else:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


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
        """``ranks``: {rank: its variables}."""
        for rank, given in ranks.items():
            pid = os.posix_spawn(
                program[0], program, os.environ | dict(given), setsigdef=(signal.SIGPIPE, signal.SIGXFSZ)
            )
            self._running[pid] = Child(f"rank {rank}", pid)

    def reach(self, host: str, message: Mapping[str, Any]) -> None:
        ssh = subprocess.Popen(_ssh(host), stdin=subprocess.PIPE)
        child = self._running[ssh.pid] = Child(f"host {host}", ssh.pid, ssh)
        child.send(json.dumps(message).encode())

    def signal(self, number: int) -> None:
        self._asked = True
        for child in list(self._running.values()):
            child.signal(number)

    def heed_signals(self) -> None:
        """Hand signals on from here. Before, a signal ends this process, and ranks end with their launcher."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda number, frame: self.signal(number))

    def wait(self) -> int:
        """Until all have ended: the code of the first that ended with another than 0, 128 + N of one that signal N
        ended; the others are asked to follow it. With a host's name a rank that a signal ended is told, and 5."""
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
        return first


def variables(place: Place, address: str, port: int, token: str, network: str) -> dict[str, str]:
    """Return horovodrun's variables of a rank; ``network``: its interface, empty where Gloo is to choose."""
    found = over_gloo(World(*place.world), place.host, place.cross, address, port, token)
    return found | ({"HOROVOD_GLOO_IFACE": network, "NCCL_SOCKET_IFNAME": network} if network else {})


def places(slots: Mapping[str, int], size: int) -> list[Place]:
    """Return each rank's place, with hosts filled one after the other."""
    counts: dict[str, int] = {}
    for host, count in slots.items():
        counts[host] = min(count, size - sum(counts.values()))
    found, rank = [], 0
    for k, (host, count) in enumerate(counts.items()):
        for local in range(count):
            level = [other > local for other in counts.values()]
            found.append(Place(host, (rank, size, local, count), (sum(level[:k]), sum(level))))
            rank += 1
    return found


def start(size: int, hosts: Hosts | None, program: list[str]) -> int:
    """Until all have ended, on all hosts; the exit code as ``Children.wait`` says."""
    slots = hosts.slots if hosts else {"localhost": size}
    ranks: dict[str, list[Place]] = {}
    for place in places(slots, size):
        ranks.setdefault(place.host, []).append(place)
    far = [host for host in ranks if not is_here(host)]
    desk = Desk("" if far else LOOPBACK, 0, secrets.token_hex(32), size)
    threading.Thread(target=desk.serve_forever, daemon=True).start()
    networks = hosts.interfaces.split(",") if hosts and hosts.interfaces else []
    port, token = desk.server_port, desk.token
    children = Children(platform.node() if hosts else "")
    for host, group in ranks.items():
        if host in far:
            way = {"host": host, "addresses": _addresses(networks), "networks": networks}
            common = {"common": travelling(os.environ), "program": program}
            children.reach(host, {"port": port, "token": token, "ranks": group} | way | common)
        else:
            network = (networks or [_interface_to(far) if far else "lo"])[0]
            given = {one.world[0]: variables(one, LOOPBACK, port, token, network) for one in group}
            children.start(given, program)
    children.heed_signals()
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

    found = [
        one.address
        for name, kinds in psutil.net_if_addrs().items()
        for one in kinds
        if one.family == socket.AF_INET and (name in networks or not networks)
    ]
    return [address for address in found if not address.startswith("127.")]


def _interface_to(hosts: Sequence[str]) -> str:
    """Return the interface by which this host reaches the others; nothing is sent."""
    for host in hosts:
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((socket.gethostbyname(host), 9))
            return interface_of(probe.getsockname()[0])
    return ""


def _ssh(host: str) -> list[str]:
    path = [f"PYTHONPATH={os.environ['PYTHONPATH']}"] if "PYTHONPATH" in os.environ else []
    words = ["exec", "env", *path, sys.executable, "-m", "hvd_train.launch.gloo", "--told"]
    return [*SSH, *ALIVE, host, f"cd {shlex.quote(os.getcwd())} && {shlex.join(words)}"]


# ---- on another host


def follow() -> int:
    """Start this host's ranks as standard input says; where that ends, the starter is gone and its ranks follow."""
    lines = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # ranks read nothing
    line = lines.readline()
    if not line:
        return CommunicationError.exit_code
    given = json.loads(line)
    try:
        address = _desk_of(given)
    except CommunicationError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    came_to = os.environ.get("SSH_CONNECTION", f"- - {LOOPBACK} -").split()[2]
    network = (given["networks"] or [interface_of(came_to)])[0]
    os.environ.update(given["common"])
    ranks = [Place(*one) for one in given["ranks"]]
    children = Children(given["host"])
    found = {one.world[0]: variables(one, address, given["port"], given["token"], network) for one in ranks}
    children.start(found, given["program"])
    threading.Thread(target=_listen, args=[lines, children], daemon=True).start()
    return children.wait()


def _listen(lines: Iterable[bytes], children: Children) -> None:
    """Hand signals on, a line each."""
    for line in lines:
        children.signal(int(line))
    children.signal(signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    children.signal(signal.SIGKILL)


def _desk_of(given: Mapping[str, Any]) -> str:
    """The starter's address, as this host reaches it: by the way that ssh came, or any of its others."""
    came = os.environ.get("SSH_CONNECTION", "").split()[:1]
    addresses = list(dict.fromkeys([*(came if not given["networks"] else []), *given["addresses"]]))
    for address in addresses:
        if is_desk(address, given["port"], given["token"]):
            return address
    what = f"no connection to the starting host: {', '.join(addresses)}, port {given['port']}"
    fix = "open the ports between the hosts (ssh alone is not enough), or name another network: --network-interfaces"
    raise CommunicationError(what, where=f"host {given['host']}", fix=fix)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--told", action="store_true")
    parser.add_argument("-np", type=int, default=1)
    parser.add_argument("-H", dest="hosts", default="")
    parser.add_argument("--network-interfaces", default="")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    if given.told:
        return follow()
    return start(given.np, parse(given.hosts or None, None, given.network_interfaces or None), given.program)


if __name__ == "__main__":
    sys.exit(main())
