"""The program that a launcher starts instead of a rank with ``--spares``.

It passes its arguments, environment, folder and descriptors 0 to 2 to a spare, and exits as that rank does. If no spare
answers, it becomes the rank. ``python -I -S stub.py NAME PROGRAM ...`` imports only a few modules of the standard
library (20 ms), because spares exist to save startup time.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import sys

CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: unix(7)
LENGTH, STATUS = struct.Struct("<q"), struct.Struct("<q")  # of a request; the exit code, or -N for signal N
ACCEPTED = b"y"  # the spare's answer once it has forked
ANSWER_SECONDS = 5.0


def same_user(connection: socket.socket) -> bool:
    """Return whether the other end belongs to this user: any user can connect to such sockets."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return bool(CREDENTIALS.unpack(credentials)[1] == os.geteuid())


def hand_over(name: str, program: list[str]) -> socket.socket | None:
    """Ask the spare ``name`` to run ``program`` as this process would. Returns the connection, or None."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(ANSWER_SECONDS)
    try:
        connection.connect(f"\0{name}")
        if same_user(connection):
            text = json.dumps([program, dict(os.environ), os.getcwd()]).encode()
            socket.send_fds(connection, [LENGTH.pack(len(text))], [0, 1, 2])
            connection.sendall(text)
            if connection.recv(1) == ACCEPTED:
                return connection
    except OSError:
        pass
    connection.close()
    return None


def wait(connection: socket.socket) -> int:
    """Wait for the rank, and return its status (``STATUS``). The rank ends with this process, and it with its
    parent."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    for pid in {os.getppid(), os.getsid(0)} - {0, 1, os.getpid()}:
        try:
            poll.register(os.pidfd_open(pid), select.POLLIN)
        except ProcessLookupError:
            return -signal.SIGKILL
    ready = [descriptor for descriptor, _ in poll.poll()]
    if connection.fileno() not in ready:
        return -signal.SIGKILL
    status = connection.recv(STATUS.size)
    return int(STATUS.unpack(status)[0]) if len(status) == STATUS.size else -signal.SIGKILL


def main() -> None:
    name, program, launcher = sys.argv[1], sys.argv[2:], os.getppid()
    connection = hand_over(name, program)
    if connection is None:
        # Killing the job kills its spares first: do not become a rank then.
        if os.getppid() != launcher:
            os._exit(5)
        os.execv(program[0], program)
    connection.settimeout(None)
    status = wait(connection)
    if status < 0:  # so that the launcher sees the signal that killed the rank
        os.kill(os.getpid(), -status)
    os._exit(abs(status))


if __name__ == "__main__":
    main()
