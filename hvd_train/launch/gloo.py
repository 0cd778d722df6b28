"""``python -m hvd_train.launch.gloo N PROGRAM ...``: N ranks of this host over Gloo, as ``horovodrun`` starts them.

For restarts: horovodrun needs seconds, in which it loads a framework to ask what was built, where the ranks of a spare
need tenths. They meet at a desk of ours, which answers only who names its token.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
from contextlib import suppress

from hvd_train.errors import stopped_code
from hvd_train.launch.environment import World
from hvd_train.launch.slurm import LOOPBACK, Desk, over_gloo

# Codes of ranks that have saved and leave, one by one.
LEAVING = {stopped_code(number) for number in (signal.SIGTERM, signal.SIGINT)}


def variables(rank: int, size: int, port: int, token: str) -> dict[str, str]:
    """What horovodrun sets in a rank, all on one host."""
    here = World(rank, size, rank, size)
    found = over_gloo(here, "localhost", (0, 1), LOOPBACK, port, token)
    return found | {"HOROVOD_GLOO_IFACE": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def start(size: int, program: list[str]) -> int:
    """Until all have ended: the code of the first that ended with another than 0, 128 + N of one that signal N ended;
    the others are asked to follow it."""
    desk = Desk(LOOPBACK, 0, secrets.token_hex(32), size)
    threading.Thread(target=desk.serve_forever, daemon=True).start()
    ranks = set()
    for rank in range(size):
        given = os.environ | variables(rank, size, desk.server_port, desk.token)
        ranks.add(os.posix_spawn(program[0], program, given, setsigdef=(signal.SIGPIPE, signal.SIGXFSZ)))

    def end(*_: object) -> None:
        for pid in ranks.copy():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    for number in (signal.SIGINT, signal.SIGTERM):  # before, it ends, and ranks end with their launcher
        signal.signal(number, end)
    first = 0
    while ranks:
        pid, status = os.wait()
        ranks.discard(pid)
        code = os.waitstatus_to_exitcode(status)
        if code and not first:
            first = code if code > 0 else 128 - code
            if first not in LEAVING:
                end()
    return first


if __name__ == "__main__":
    sys.exit(start(int(sys.argv[1]), sys.argv[2:]))
