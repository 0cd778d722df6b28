"""One process on each host reports its ranks to rank 0's host every second, over TCP, beside MPI or Gloo.

The first rank of each host starts the process (``peers.py``). It is not a thread of the rank, so that it lives on when
ranks are stopped or hold Python's lock. The one on rank 0's host is the hub; the others are leaves.

- A leaf opens two connections to the hub, and both sides prove that they know the job's token (``handshake.py``).
- "small": every ``BEAT_SECONDS`` the leaf sends a line of JSON with its ranks' status. The hub answers with a line:
  a request for stacks, the ranks that were lost, and "end" once the job is to end.
- "large": a message of ``LARGE_BYTES`` every ``LARGE_SECONDS``, which the hub sends back. A wrong MTU drops only large
  packets: training then hangs although the hosts hear one another.
- The hub judges all ranks by the rules of ``hosts_watchdog.py``, and ends them through its answers. A silent host is
  blamed only if no other rank makes progress. A leaf judges the hub by the same rules, but later, so that the two sides
  of a broken network do not blame each other at the same time.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from hvd_train.launch.handshake import LARGE_BYTES, connect, echo, greet, introduce, listener, read_exactly
from hvd_train.launch.hosts_watchdog import Host, HostsWatchdog, gone_hub
from hvd_train.launch.local_ranks import LocalRanks
from hvd_train.launch.status import StatusTable

BEAT_SECONDS, LARGE_SECONDS = 1.0, 4.0  # seconds; 64 KiB each way every 4 s are 0.03 % of a 1 Gbit/s link
LINE_BYTES = 8 << 20  # limit of a report, which may hold the stacks of a host's ranks
STRANGERS = 64  # unverified connections at a time: one more closes the oldest
OPEN_SECONDS = 60.0  # for the hub to start listening
CONNECT_SECONDS = 5.0
STACK_SECONDS = 13.0  # for the stacks of all hosts; longer than one host takes (watchdog.LATE_SECONDS)
LATER_SECONDS, TURN_SECONDS = 15.0, 3.0  # how much longer a leaf waits than the hub, and than the previous leaf
EXIT_SECONDS = 2.0  # for the hub's ranks to end first


class HostArguments(NamedTuple):
    """The arguments of the process that reports the ranks of a host.

    ``hosts``: [(name, ranks)], the hub's first; ``here``: this host's index there. ``path``: the status of its ranks.
    ``limit``: seconds without a step until ranks are stuck. ``goes_on``: how the job continues after a loss.
    ``addresses`` and ``port``: where leaves find the hub, which takes the first free of ``ports``. ``verdict``: the
    status from which the process that started all ranks reads the end of the job.
    """

    hosts: list[tuple[str, list[int]]]
    here: int
    path: str
    limit: float
    goes_on: str
    token: str
    addresses: Sequence[str] = ()
    port: int = 0
    ports: Sequence[int] = (0,)
    verdict: str = ""


_started: list[subprocess.Popen] = []  # kept, because Python warns when a Popen of a running process is collected


def start(job: HostArguments) -> IO[bytes]:
    """Start this host's process. The token goes to its standard input, where other users cannot see it."""
    # Isolated (-I): modules of the user's folder must not shadow those that this process needs.
    root = str(Path(__file__).parents[2])
    code = f"import sys; sys.path.append({root!r}); from hvd_train.launch.heartbeat import main; main()"
    child = subprocess.Popen([sys.executable, "-I", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    _started.append(child)
    assert child.stdin is not None and child.stdout is not None
    with suppress(BrokenPipeError), child.stdin:
        child.stdin.write(json.dumps(job._asdict()).encode())
    return child.stdout


def start_hub(job: HostArguments) -> int:
    """Start the hub's process. Returns the port at which it listens, or 0 if it does not listen."""
    out = start(job)
    ready, _, _ = select.select([out], [], [], OPEN_SECONDS)
    word = out.readline().strip() if ready else b""
    if not word.isdigit():
        _started[-1].kill()  # no leaf will learn its port
        return 0
    return int(word)


# ---- the hub


class Hub:
    """The process on rank 0's host, which receives the reports of all hosts.

    ``serve`` returns when this host's ranks have ended, by themselves or because the hub has ended them.
    """

    def __init__(self, job: HostArguments) -> None:
        self._job, self._local = job, LocalRanks(job.path, job.hosts[0][1])
        self.hosts = [Host(name, ranks) for name, ranks in job.hosts]
        self._watchdog = HostsWatchdog(self.hosts, job.limit, self._all_stacks)
        self._end: dict[str, Any] = {}
        self._asked, self._stacks = 0, dict[int, tuple[int, list[list[str]]]]()
        self._strangers: list[socket.socket] = []
        self._guard = threading.Lock()
        self._missing = {(host, kind) for host in range(1, len(job.hosts)) for kind in ("small", "large")}
        self.listener = listener(job.ports)
        self._starter: StatusTable | None = None
        if job.verdict:
            with suppress(OSError):
                self._starter = StatusTable(0, job.verdict)

    def serve(self) -> None:
        threading.Thread(target=self._accept, daemon=True).start()
        local_host, before, published = self.hosts[0], 0.0, list[str]()
        while not self._local.ended:
            self._local.wait(0.5)
            local_host.update(self._local.report())
            lost = self._watchdog.lost()
            if lost != published:
                self._publish({"lost": lost})
                published = lost
            if time.monotonic() - before >= 0.5:
                before = time.monotonic()
                if self._watchdog.look():
                    self._finish()
                    return
        if self._watchdog.lost():
            time.sleep(BEAT_SECONDS)  # time for the leaves to get the answer to their next report

    def _finish(self) -> None:
        """Print the verdict and end all ranks. Leaves are told in the answers to their reports."""
        print_error(self._watchdog.verdict(self._job.goes_on))
        self._end = {"end": EXIT_SECONDS}
        with suppress(OSError):
            os.setpgid(0, 0)  # leaves the rank's process group, all of which mpirun ends, as this process has work left
        self._local.finish(0.0, self._starter)
        time.sleep(BEAT_SECONDS)
        if not self._starter:
            self._local.end_launcher()

    def _publish(self, news: dict[str, Any]) -> None:
        self._local.table.publish(news)
        if self._starter:
            self._starter.publish(news)

    def _all_stacks(self) -> dict[int, list[str]]:
        """Return {rank: stacks of its threads}; [""] if its host does not answer within ``STACK_SECONDS``."""
        self._asked += 1
        self._stacks[0] = self._asked, self._local.stacks()
        stop = time.monotonic() + STACK_SECONDS
        while time.monotonic() < stop and sum(n == self._asked for n, _ in self._stacks.values()) < len(self.hosts):
            time.sleep(0.1)
        stacks = {rank: [""] for host in self.hosts for rank in host.ranks}
        for place, (number, rows) in list(self._stacks.items()):
            if number == self._asked:
                stacks |= dict(zip(self.hosts[place].ranks, rows, strict=True))
        return stacks

    def _accept(self) -> None:
        """Accept connections until each leaf has opened both of its own. Then stop listening."""
        while self._missing:
            try:
                connection, _ = self.listener.accept()
            except OSError:  # no file descriptor is left, or all leaves have connected
                time.sleep(0.05)
                continue
            self._strangers.append(connection)
            threading.Thread(target=self._welcome, args=[connection], daemon=True).start()
            # Close the oldest, so that unverified connections cannot use up the descriptors.
            if len(self._strangers) > STRANGERS + 2 * len(self.hosts):
                with suppress(OSError):
                    self._strangers[0].shutdown(socket.SHUT_RDWR)
        self.listener.close()

    def _welcome(self, connection: socket.socket) -> None:
        """Serve one connection until it ends, in its own thread."""
        place, kind = 0, ""
        try:
            try:
                place, kind = greet(connection, self._job.token, len(self.hosts))
            finally:
                self._strangers.remove(connection)
            with self._guard:
                if (place, kind) not in self._missing:
                    raise ConnectionError("it has come before")
                self._missing.remove((place, kind))
                last = not self._missing
            if last:
                self.listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            (self._receive if kind == "small" else echo)(connection, *([place] if kind == "small" else []))
        except (OSError, ValueError, TypeError, LookupError, AttributeError):
            if kind == "small":
                self.hosts[place].closed = True
        connection.close()

    def _receive(self, connection: socket.socket, place: int) -> None:
        """Receive the reports of leaf ``place`` and answer each. Raises ConnectionError when they end."""
        host, lines = self.hosts[place], connection.makefile("rb")
        while line := lines.readline(LINE_BYTES):
            report = json.loads(line)
            if report.get("asked"):
                self._stacks[place] = report["asked"], report["stacks"]
            host.update(report["ranks"], report["large"])
            answer = {"ask": self._asked, "lost": self._watchdog.lost(), **self._end}
            connection.sendall(json.dumps(answer).encode() + b"\n")
        raise ConnectionError("closed")


# ---- another host


class Leaf:
    """The process on another host, which reports its ranks to the hub and watches the hub."""

    def __init__(self, job: HostArguments) -> None:
        self._job, self._local = job, LocalRanks(job.path, job.hosts[job.here][1])
        self._large = time.monotonic()  # when a large message came back
        self._asked = 0
        self._lost: list[str] = []

    def serve(self) -> None:
        name, ranks = self._job.hosts[0]
        hub = Host(name, ranks)
        # The hub knows more, so it decides first. If it is gone, leaves wait for different times, so that one prints.
        later = LATER_SECONDS + TURN_SECONDS * (self._job.here - 1)
        silence = gone_hub(hub, self._job.limit + later)
        lines = self._connect("small", hub, silence)
        threading.Thread(target=self._send_large, daemon=True).start()
        while not self._local.ended:
            if lines is None:
                self._local.wait(BEAT_SECONDS)
            else:
                lines = self._beat(lines, hub, silence)
            self._judge(hub, silence)
        if lines is not None:  # the last report: how all ranks have ended
            self._send(lines, {})

    def _connect(self, kind: str, hub: Host, silence: Callable[..., str]) -> socket.socket | None:
        """Try all addresses until the hub answers. Returns the connection, or None if this host's ranks end first."""
        while not self._local.ended:
            for address in self._job.addresses:
                with suppress(OSError):
                    connection = connect(address, self._job.port, CONNECT_SECONDS, small=kind == "small")
                    try:
                        introduce(connection, self._job.token, self._job.here, kind)
                    except OSError:
                        connection.close()
                        raise
                    self._address = address
                    hub.heard = time.monotonic()
                    return connection
                self._judge(hub, silence)
            self._local.wait(BEAT_SECONDS)
        return None

    def _send(self, connection: socket.socket, more: Mapping[str, Any]) -> None:
        """Send a report. A failure to send is noticed when the answer is read."""
        report = {"ranks": self._local.report(), "large": time.monotonic() - self._large, **more}
        with suppress(OSError):
            connection.sendall(json.dumps(report).encode() + b"\n")

    def _beat(self, connection: socket.socket, hub: Host, silence: Callable[..., str]) -> socket.socket | None:
        """Send one report and read its answer. Returns None if the connection has ended."""
        self._send(connection, {})
        return connection if self._answered(connection, hub, silence) else None

    def _answered(self, connection: socket.socket, hub: Host, silence: Callable[..., str]) -> bool:
        """Wait for the hub's answer and obey it; watch the hub meanwhile. Returns whether the connection is alive."""
        line = b""
        while not line.endswith(b"\n"):
            if self._local.wait(BEAT_SECONDS, connection):
                try:
                    part = connection.recv(1 << 16)
                except OSError:
                    part = b""
                if not part:
                    hub.closed = True
                    return False
                line += part
            elif self._local.ended:
                return True
            self._judge(hub, silence)
        hub.heard = time.monotonic()
        answer = json.loads(line)
        if answer["lost"] != self._lost:
            self._lost = answer["lost"]
            self._local.table.publish({"lost": self._lost})
        if "end" in answer:
            self._local.finish(answer["end"])
        elif answer["ask"] > self._asked:
            self._asked = answer["ask"]
            self._send(connection, {"asked": self._asked, "stacks": self._local.stacks()})
            return self._answered(connection, hub, silence)
        self._local.wait(BEAT_SECONDS)
        return True

    def _send_large(self) -> None:
        """Send large messages on their own connection, as a lost one blocks all that follow."""
        connection = self._connect("large", Host("", []), lambda *more: "")
        with suppress(OSError):
            while connection:
                connection.sendall(bytes(LARGE_BYTES))
                read_exactly(connection, LARGE_BYTES)
                self._large = time.monotonic()
                time.sleep(LARGE_SECONDS)

    def _judge(self, hub: Host, silence: Callable[..., str]) -> None:
        """End this host's ranks if the hub is silent and they make no progress."""
        line = silence(self._local.report(), self._job.goes_on)
        if line:
            print_error(line)
            with suppress(OSError):
                os.setpgid(0, 0)  # as the hub does
            self._local.finish(0.0)
            self._local.end_launcher()


def print_error(line: str) -> None:
    # Not print(): the rank that started this process may have closed the pipe.
    with suppress(OSError):
        os.write(2, f"error: {line}\n".encode())


def main() -> None:
    # Ranks save when they are asked to end; this process ends when they have.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    job = HostArguments(**json.load(sys.stdin))
    with suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))  # its parent is bound to the core on which it computes
    with suppress(OSError):
        if job.here:
            Leaf(job).serve()
            return
        hub = Hub(job)
        # The rank that started this process waits for the port, and then reads no more.
        os.write(1, f"{hub.listener.getsockname()[1]}\n".encode())
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 1)
        hub.serve()
