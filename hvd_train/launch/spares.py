"""Spares of ``-np --max-restarts --spares``: a process that has loaded the framework and waits while the job trains.

At a restart launchers start ``stub.py`` in a rank's place, which asks for one: the process forks, and the fork is the
rank. It has no thread and has computed nothing, so that nothing of it is in the way of what its forks do.
"""

from __future__ import annotations

import secrets
import subprocess
import sys
from pathlib import Path

from hvd_train.launch import process, stub
from hvd_train.launch.launchers.installed import python
from hvd_train.launch.start import environment
from hvd_train.launch.status import StatusTable


class Spares:
    """``count``: how many ranks may come of it at a time, 0: none; ``ranks``: of the job."""

    def __init__(self, count: int, framework: str, threads: int | str, ranks: int, verbose: bool) -> None:
        self._count, self._ranks = count, ranks
        self._words = [framework, str(threads), str(ranks), str(count), "-v" if verbose else ""]
        self._name = ""
        self._process: subprocess.Popen | None = None

    def look(self, table: StatusTable) -> None:
        """Start the process when all ranks have taken a step, which it would have delayed."""
        if self._count and self._process is None and all(table.read(rank).step for rank in range(table.ranks)):
            # Names of abstract sockets are open to all users of a host, so nobody should be able to guess this one.
            self._name = f"hvd-train-{secrets.token_hex(16)}"
            line = [*python("hvd_train.cli.spare"), self._name, *self._words]
            self._process = subprocess.Popen(
                line, env=environment(), start_new_session=True, preexec_fn=process.end_with_parent
            )

    def program(self, arguments: list[str], ranks: int) -> list[str]:
        """Return the program that the launcher starts for each rank; [] if there is no spare for so many ranks."""
        # It ends by itself if it could not load the framework. Then ranks load it as usual.
        if self._process and self._process.poll() is not None:
            self._process = None
        # The framework in the spare has threads for the first number of ranks.
        if self._process is None or ranks != self._ranks:
            return []
        return [
            sys.executable, "-I", "-S", str(Path(stub.__file__)), self._name, *python("hvd_train"), *arguments
        ]  # fmt: skip

    def close(self) -> None:
        if self._process:
            self._process.kill()  # its forks end with it
            self._process.wait()
