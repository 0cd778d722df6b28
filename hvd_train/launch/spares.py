"""Spares of ``-np --max-restarts --spares``: a standby process that has imported the framework.

At a restart launchers start ``stub.py`` instead of each rank. It asks the spare to fork, and the fork becomes the rank.
The spare has no threads and has computed nothing, so forking it is safe.
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
    """The spare of a job. ``count``: ranks that may be forked at a time, 0: none. ``ranks``: ranks of the job."""

    def __init__(self, count: int, framework: str, threads: int | str, ranks: int, verbose: bool) -> None:
        self._count, self._ranks = count, ranks
        self._words = [framework, str(threads), str(ranks), str(count), "-v" if verbose else ""]
        self._name = ""
        self._process: subprocess.Popen | None = None

    def look(self, table: StatusTable) -> None:
        """Start the spare once all ranks have taken a step; before, it would delay them."""
        if self._count and self._process is None and all(table.read(rank).step for rank in range(table.ranks)):
            # Abstract sockets are open to all users of a host, so the name must not be guessable.
            self._name = f"hvd-train-{secrets.token_hex(16)}"
            line = [*python("hvd_train.cli.spare"), self._name, *self._words]
            self._process = subprocess.Popen(
                line, env=environment(), start_new_session=True, preexec_fn=process.end_with_parent
            )

    def program(self, arguments: list[str], ranks: int) -> list[str]:
        """Return the program to start for each rank; [] without a spare for so many ranks."""
        # The spare exits if it cannot import the framework. Ranks then import it as usual.
        if self._process and self._process.poll() is not None:
            self._process = None
        # The spare's framework is configured with the threads for the initial number of ranks.
        if self._process is None or ranks != self._ranks:
            return []
        return [
            sys.executable, "-I", "-S", str(Path(stub.__file__)), self._name, *python("hvd_train"), *arguments
        ]  # fmt: skip

    def close(self) -> None:
        if self._process:
            self._process.kill()  # its forks end with it
            self._process.wait()
