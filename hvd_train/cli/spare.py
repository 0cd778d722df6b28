"""``python -m hvd_train.cli.spare NAME FRAMEWORK THREADS RANKS COUNT VERBOSE``: a standby process that forks ranks.

``launch/spares.py`` starts it, and ``launch/stub.py`` talks to it over an abstract Unix socket called NAME:

1. The stub, which the launcher started instead of a rank, sends its descriptors 0 to 2, then its command line,
   environment and folder as JSON. Both sides check that the other belongs to the same user.
2. This process answers ``ACCEPTED`` and forks. The fork becomes the rank.
3. When the fork ends, this process sends its status, and the stub ends in the same way. If the connection breaks, the
   stub is gone, and the fork is killed.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import select
import signal
import socket
import struct
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from hvd_train.launch.launchers.installed import python
from hvd_train.launch.process import PR_SET_PDEATHSIG
from hvd_train.launch.stub import ACCEPTED, ANSWER_SECONDS, LENGTH, STATUS, same_user
from hvd_train.run_folder.terminal import say

NICE = 10  # training ranks have priority


@dataclass(frozen=True)
class RankProcess:
    """What a stub passes on for a rank: program, environment, folder and standard streams."""

    program: list[str]
    environment: dict[str, str]
    folder: str
    descriptors: list[int]

    def take(self) -> None:
        """Become the rank."""
        for number, descriptor in enumerate(self.descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        sys.argv = ["hvd-train", *self.program[len(python("hvd_train")) :]]
        # Reseed, because all forks copy the same random generators.
        random.seed()
        np.random.seed()


def receive(connection: socket.socket) -> RankProcess:
    """Read the data of a stub. Raises OSError, ValueError or EOFError."""
    connection.settimeout(ANSWER_SECONDS)
    head, descriptors, _, _ = socket.recv_fds(connection, LENGTH.size, 3)
    text = b""
    while len(text) < LENGTH.unpack(head)[0]:
        part = connection.recv(1 << 16)
        if not part:
            raise EOFError
        text += part
    program, environment, folder = json.loads(text)
    return RankProcess(program, environment, folder, descriptors)


def warm(framework: str, wanted: str, ranks: int, verbose: bool) -> None:
    """Import what a rank needs, in a thread of low priority, so that training ranks keep the cores."""
    os.setpriority(os.PRIO_PROCESS, 0, NICE)
    for module in ("hvd_train.cli.fit", "hvd_train.jobs.fit", "hvd_train.update.exchange", "safetensors.numpy"):
        import_module(module)
    from hvd_train.session import preload

    preload(framework, int(wanted) if wanted.isdigit() else wanted, ranks, verbose)


def serve(listener: socket.socket, most: int) -> RankProcess:
    """Fork for each stub that asks, at most ``most`` at a time. Returns in the fork."""
    poll = select.poll()
    waiting: dict[int, int] = {}  # {descriptor of a connection: pidfd of its fork}
    children: dict[int, tuple[int, socket.socket]] = {}  # {pidfd: (pid, the stub that waits for its status)}
    poll.register(listener, select.POLLIN)
    prctl: Any = ctypes.CDLL(None).prctl
    while True:
        for descriptor, _ in poll.poll():
            if descriptor in waiting:  # the stub is gone, because it never sends more
                poll.unregister(descriptor)
                signal.pidfd_send_signal(waiting.pop(descriptor), signal.SIGKILL)
            elif descriptor in children:
                pid, connection = children.pop(descriptor)
                poll.unregister(descriptor)
                if waiting.pop(connection.fileno(), None) is not None:
                    poll.unregister(connection)
                send_status(connection, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                os.close(descriptor)
            elif descriptor == listener.fileno():
                connection = listener.accept()[0]
                try:
                    place = receive(connection) if same_user(connection) and len(children) < most else None
                    if place:
                        connection.sendall(ACCEPTED)
                except (OSError, ValueError, EOFError, TypeError, struct.error):
                    # The stub has gone, or was none. Without an answer it becomes the rank itself.
                    place = None
                if place is None:
                    connection.close()
                    continue
                parent, pid = os.getpid(), os.fork()
                if pid == 0:
                    # Forks end if this process is killed. The check covers a death before the call.
                    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                    if os.getppid() != parent:
                        os._exit(5)
                    # Close copies of other ranks' connections, which would stay open when this process ends.
                    for other in (*waiting, *children):
                        os.close(other)
                    for _, held in children.values():
                        held.detach()
                    listener.close()
                    connection.close()
                    return place
                # The fork has copies. Open ones here would hide the end of the rank's output from its reader.
                for number in place.descriptors:
                    os.close(number)
                pidfd = os.pidfd_open(pid)
                waiting[connection.fileno()], children[pidfd] = pidfd, (pid, connection)
                poll.register(connection, select.POLLIN)
                poll.register(pidfd, select.POLLIN)


def send_status(connection: socket.socket, status: int) -> None:
    with connection, suppress(OSError):
        connection.sendall(STATUS.pack(status))


def main() -> None:
    name, framework, threads, ranks, most, verbose = sys.argv[1:]
    done: list[bool] = []

    def load() -> None:
        warm(framework, threads, int(ranks), bool(verbose))
        done.append(True)

    # In a thread, because the low priority is per thread, and forks of the main thread keep the normal one.
    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    if not done:  # the error has been printed; ranks import the framework themselves
        sys.exit(1)
    gc.freeze()  # garbage collection in a fork would write to pages shared with this process
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(f"\0{name}")
        except OSError as error:
            why = f"the socket {name} cannot be opened ({error.strerror})"
            say(f"spare: {why}; ranks load all by themselves", err=True)
            sys.exit(1)
        listener.listen(int(ranks))
        place = serve(listener, int(most))
    place.take()
    from hvd_train.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
