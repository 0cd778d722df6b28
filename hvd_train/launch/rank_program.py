"""``python -m hvd_train.launch.rank_program [--tag] [--torchrun ADDRESS:PORT] PROGRAM ...``: a program as one rank.

It adds what the launcher does not give: torchrun's variables, and the rank before each line of output.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hvd_train.errors import TrainError
from hvd_train.launch.environment import world
from hvd_train.launch.failed_rank import exit_with_error
from hvd_train.launch.launchers.installed import find_program, python
from hvd_train.launch.launchers.srun import node_names
from hvd_train.launch.process import end_with_parent
from hvd_train.launch.world import World

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def wrapped(program: Sequence[str], tag: bool, torchrun: bool, address: str) -> list[str]:
    """Return the command for each rank. With ``torchrun`` the ranks meet at a port of rank 0's host, whose ``address``
    is "" if Slurm chooses it."""
    if not (tag or torchrun):
        return list(program)
    with socket.create_server(("", 0)) as free:  # as torchrun does; on another host it is free as well, most likely
        place = f"{address}:{free.getsockname()[1]}"
    options = ["--tag"] * tag + ["--torchrun", place] * torchrun
    return [*python("hvd_train.launch.rank_program"), *options, *program]


def torchrun_variables(here: World, place: str) -> dict[str, str]:
    """Return what ``torch.distributed.init_process_group`` reads (torch.distributed, "Environment variable
    initialization")."""
    address, _, port = place.rpartition(":")
    address = address or node_names(os.environ["SLURM_STEP_NODELIST"])[0]
    numbers = {"RANK": here.rank, "WORLD_SIZE": here.size, "LOCAL_RANK": here.local_rank}
    numbers["LOCAL_WORLD_SIZE"] = here.local_size
    return {name: str(n) for name, n in numbers.items()} | {"MASTER_ADDR": address, "MASTER_PORT": port}


def main(words: Sequence[str]) -> int:
    """Replace this process by the program. With ``--tag`` run it as a child instead, and return its exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tag", action="store_true")
    parser.add_argument("--torchrun", default="")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    given = parser.parse_args(words)
    here, program = world(), find_program(given.program)
    if given.torchrun:
        os.environ.update(torchrun_variables(here, given.torchrun))
    if not given.tag:
        os.execv(program[0], program)
    return _tagged(program, f"[{here.rank}] ".encode())


def _tagged(program: Sequence[str], tag: bytes) -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # until there is a child to forward them to
    child = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=_begin, bufsize=0)
    for number in FORWARDED:
        signal.signal(number, lambda number, _: child.send_signal(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    pairs = [(child.stdout, 1), (child.stderr, 2)]
    copies = [threading.Thread(target=_copy, args=(source, target, tag)) for source, target in pairs]
    for copy in copies:
        copy.start()
    code = child.wait()
    for copy in copies:
        copy.join()
    if code < 0:  # end as the program did, so that the launcher names the signal
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _begin() -> None:
    end_with_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)


def _copy(source: Any, target: int, tag: bytes) -> None:
    """Copy whole lines, so that those of two ranks do not mix."""
    rest = b""
    while part := source.read(1 << 16):
        *lines, rest = (rest + part).split(b"\n")
        _write(target, b"".join(tag + line + b"\n" for line in lines))
    if rest:
        _write(target, tag + rest + b"\n")


def _write(target: int, text: bytes) -> None:
    while text:
        text = text[os.write(target, text) :]


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except TrainError as error:
        exit_with_error(error)
